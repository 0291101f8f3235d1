"""Fetch or recompute: from how many tokens on a tier beats computing again."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.sim.hardware import MemoryTier, Roofline

NEW_TOKENS = 256
"""Tokens that follow the cached prefix, where nothing else is said: a turn of a chat."""

SCANNED = 2048
"""Lengths that are tried before the borders are found exactly."""


class Crossover(msgspec.Struct, frozen=True, kw_only=True):
    """For which cached prefixes fetching them from a tier makes the first token come sooner.

    `wins`        runs of lengths in tokens, (first, last), both included; empty: never
    `limit`       the longest length that was looked at
    `new_tokens`  computed after the prefix, in both cases
    """

    tier: str
    wins: list[tuple[int, int]]
    limit: int
    new_tokens: int
    block_size: int

    @property
    def verdict(self) -> str:
        """always, never, from N tokens, up to N tokens, or the runs."""
        if not self.wins:
            return "never"
        first, last = self.wins[0][0], self.wins[-1][1]
        if len(self.wins) > 1:
            return " and ".join(
                f"{low:,}-{high:,}" if high < self.limit else f"from {low:,}"
                for low, high in self.wins
            )
        if first <= self.block_size:
            return "always" if last >= self.limit else f"up to {last:,}"
        return f"from {first:,}" if last >= self.limit else f"{first:,}-{last:,}"


def crossover(
    roofline: Roofline,
    tier: MemoryTier,
    limit: int,
    *,
    new_tokens: int = NEW_TOKENS,
    block_size: int = 16,
) -> Crossover:
    """Compare fetching and recomputing for prefixes of one block up to `limit` tokens.

    A fetch overlaps with the computation of the new tokens; it wins where it is sooner, not where
    both take equally long.
    """
    num_blocks = max(1, limit // block_size)

    def wins(blocks: int) -> bool:
        tokens = blocks * block_size
        fetched = roofline.ttft_s(new_tokens, tokens, tier)
        return fetched < roofline.ttft_s(new_tokens + tokens) * (1 - 1e-9)

    step = max(1, num_blocks // SCANNED)
    tried = [*range(1, num_blocks + 1, step)]
    if tried[-1] != num_blocks:
        tried.append(num_blocks)
    runs: list[tuple[int, int]] = []
    begun = 1 if wins(1) else None
    before, won = 1, begun is not None
    for blocks in tried[1:]:
        now = wins(blocks)
        if now != won:
            border = _border(wins, before, blocks)
            if begun is None:
                begun = border
            else:
                runs.append((begun, border - 1))
                begun = None
        before, won = blocks, now
    if begun is not None:
        runs.append((begun, num_blocks))
    return Crossover(
        tier=tier.name,
        wins=[(low * block_size, high * block_size) for low, high in runs],
        limit=num_blocks * block_size,
        new_tokens=new_tokens,
        block_size=block_size,
    )


def _border(wins: Callable[[int], bool], low: int, high: int) -> int:
    """Return the first length above `low` that is not like it; `high` is not."""
    like = wins(low)
    while high - low > 1:
        middle = (low + high) // 2
        if wins(middle) == like:
            low = middle
        else:
            high = middle
    return high

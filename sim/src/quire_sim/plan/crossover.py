"""Fetch or recompute: from how many tokens on a tier beats computing again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import msgspec

from quire_sim.hardware import MemoryTier, ModelTimes

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
    timing: ModelTimes,
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

    @cache
    def wins(blocks: int) -> bool:
        tokens = blocks * block_size
        fetched = timing.ttft_s(new_tokens, tokens, tier)
        return fetched < timing.ttft_s(new_tokens + tokens) * (1 - 1e-9)

    tried = sorted({*range(1, num_blocks + 1, max(1, num_blocks // SCANNED)), num_blocks})
    borders = [_border(wins, low, high) for low, high in pairwise(tried) if wins(low) != wins(high)]
    runs = [(low, high - 1) for low, high in pairwise([1, *borders, num_blocks + 1]) if wins(low)]
    return Crossover(
        tier=tier.name,
        wins=[(low * block_size, high * block_size) for low, high in runs],
        limit=num_blocks * block_size,
        new_tokens=new_tokens,
        block_size=block_size,
    )


def _border(wins: Callable[[int], bool], low: int, high: int) -> int:
    """Return the first length above `low` that is not like it; `high` is not."""
    between = range(low + 1, high)
    return between.start + bisect_left(between, True, key=lambda blocks: wins(blocks) != wins(low))

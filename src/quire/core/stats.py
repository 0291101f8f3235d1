"""Counters of a manager, with one definition of hit rate."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

MISS_REASONS = ("last_token", "partial_block", "evicted", "window", "cold")
"""Why prompt tokens were not found by `open`, counted once, at the first `reserve` that succeeds:

last_token     the last token of every prompt is computed: it gives the next one
partial_block  all whole blocks before it were found; it stands in the last, incomplete one
evicted        its block was cached and was evicted or dropped since; cold where no watcher remembers that
window         its tokens are cached, but a group with a window or a state has dropped what
               a hit there needs
cold           it was never stored in this scope; `explain` says whether another one has it
"""


class Missed(NamedTuple):
    """Why a hit ends where it does, and how many tokens that explains; the rest is cold.

    `last_user`  of evicted tokens, the number of the request that used them last, else 0
    `memo`       of whoever was asked for that, to be shown again
    """

    reason: str
    num_tokens: int = 0
    last_user: int = 0
    memo: object = None


class Counters(msgspec.Struct):
    """The running counts of a manager, read through `Stats`.

    `missed` has neither the misses of reason `last_token`, one per request, nor the `cold` ones: `Stats` adds both.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    missed: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    published_blocks: int = 0
    restored_blocks: int = 0
    deduplicated_blocks: int = 0
    evicted_blocks: int = 0
    invalidated_blocks: int = 0
    copied_blocks: int = 0

    def opened(self, num_tokens: int, num_cached: int, missed: Missed) -> None:
        """Count a request that has room, of so many prompt tokens, of which so many were found."""
        self.num_requests += 1
        self.prompt_tokens += num_tokens
        self.hit_tokens += num_cached
        if missed.num_tokens:
            self.missed[missed.reason] += missed.num_tokens

    def stats(self) -> Stats:
        """Return the counts as they are now."""
        counts = msgspec.structs.asdict(self)
        missed = counts["missed"] = {**self.missed, "last_token": self.num_requests}
        missed["cold"] = self.prompt_tokens - self.hit_tokens - sum(missed.values())
        return Stats(**counts)


class Stats(Counters, frozen=True):  # pyright: ignore[reportGeneralTypeIssues] - msgspec can
    """Counters since the manager was made. Tokens unless the name says otherwise.

    hit rate = hit_tokens / prompt_tokens: token-weighted, counted once per request, at the first `reserve` that succeeds.
    prompt_tokens == hit_tokens + sum(missed.values())
    """

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found cached, 0 to 1; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that were not found: prompt_tokens - hit_tokens."""
        return self.prompt_tokens - self.hit_tokens

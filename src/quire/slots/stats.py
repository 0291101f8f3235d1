"""Counters of a slot cache."""

from __future__ import annotations

import msgspec


class SlotStats(msgspec.Struct):
    """Counters since the cache was made. Tokens unless the name says otherwise.

    hit rate = hit_tokens / prompt_tokens: token-weighted, counted once per request, at `open`.

    `reoccupied_slots`  requests that took over a free slot which held their prefix: no copy
    `copied_slots`      requests and forks that got their prefix, or part of it, by a copy
    `copied_tokens`     tokens planned to be copied
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    reoccupied_slots: int = 0
    copied_slots: int = 0
    copied_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found, 0 to 1; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

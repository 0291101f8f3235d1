"""Counters of a slot cache."""

from __future__ import annotations

import msgspec

SLOT_MISS_REASONS = ("last_token", "evicted", "cold")
"""Why prompt tokens were not found, counted once, at open:

last_token  the last token of every prompt is computed: it gives the next one
evicted     a slot held it and was overwritten since
cold        no slot of its scope held it, as far back as overwritten contents are remembered
"""


class SlotStats(msgspec.Struct):
    """Counters since the cache was made. Tokens unless the name says otherwise.

    hit rate = hit_tokens / prompt_tokens: token-weighted, counted once per request, at `open`.

    `reoccupied_slots`  requests that took over a free slot which held their prefix: no copy
    `copied_slots`      requests and forks that got their prefix, or part of it, by a copy
    `copied_tokens`     tokens planned to be copied
    `evicted_tokens`    tokens overwritten or cut that no other slot held

    hit_tokens + sum of the missed tokens of each reason == prompt_tokens
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    missed: dict[str, int] = msgspec.field(
        default_factory=lambda: dict.fromkeys(SLOT_MISS_REASONS, 0)
    )
    computed_tokens: int = 0
    reoccupied_slots: int = 0
    copied_slots: int = 0
    copied_tokens: int = 0
    evicted_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found, 0 to 1; 0 before the first request."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def missed_tokens(self) -> int:
        """Prompt tokens that were not found: prompt_tokens - hit_tokens."""
        return self.prompt_tokens - self.hit_tokens

    def opened(self, prompt_len: int, num_cached: int, held_before: int) -> None:
        """Count a request; a slot held its first `held_before` tokens and was overwritten since."""
        missed = prompt_len - 1 - num_cached
        evicted = max(held_before - num_cached, 0)
        self.num_requests += 1
        self.prompt_tokens += prompt_len
        self.hit_tokens += num_cached
        self.missed["last_token"] += 1
        self.missed["evicted"] += evicted
        self.missed["cold"] += missed - evicted

    def copy(self) -> SlotStats:
        """Return the counts as they are now."""
        return msgspec.structs.replace(self, missed=dict(self.missed))

"""The live curve: the hit rate of every capacity, from a short note per request."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from quire.core.kernel import Kernel, Watcher
from quire.core.sequence import Sequence
from quire.core.stats import Missed
from quire.core.tokens import TOKEN_BYTES, Key
from quire.foresight.distances import hit_curve, uses_of
from quire.foresight.trail import Trail
from quire.foresight.whatif import WhatIf

Notes: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""int64 [requests, NOTE]"""

NOTE = 4
"""Entries of a note: tokens that were found in a block whose rest is another; the tokens of a prompt; how many of them a cache that forgets nothing would have found,
of those that came from elsewhere none; and the last request that used all of these."""

PACK_EVERY = 1 << 13
"""Requests after which their notes are packed: 32 bytes each instead of about 100."""

MAX_NOTES = 1 << 17
"""Requests that are remembered; beyond them the oldest are forgotten."""

WARM_UP = 4
"""The first quarter of the remaining notes is not in the curve: too little is known of earlier blocks."""


class LiveCurve(Watcher):
    """Makes a hit-rate curve of the latest requests, when asked.

    A `Trail` knows of each block which request used it last, also of evicted ones. So three numbers
    per request are enough to see afterwards who shared how much of a prompt with whom,
    and what a larger or a smaller cache would have found (`distances`).
    """

    needs = (Trail,)

    def begin(self, kernel: Kernel) -> None:
        self._trail = kernel.watchers.of(Trail)
        self._block_size = kernel.rows.block_size
        self._capacity, self._counters = kernel.capacity, kernel.counters
        self._begun = self._begun_hits = self._begun_tokens = 0
        self._packed: list[Notes] = []
        self._notes: list[int] = []

    def restart(self) -> None:
        """Start the curve anew from the next request; earlier ones count only as history."""
        counters = self._counters
        self._begun = counters.num_requests
        self._begun_hits, self._begun_tokens = counters.hit_tokens, counters.prompt_tokens

    def opened(self, seq: Sequence, key: Key, missed: Missed) -> None:
        if not seq.number % PACK_EVERY:
            self._pack()
        trail, shared = self._trail, seq.num_cached
        part = 0 if missed.last_user else shared % self._block_size
        last_user = trail.last_user
        if missed.last_user:
            shared += missed.num_tokens
            last_user = missed.last_user
        elif trail.num_foreign and shared:
            shared -= trail.num_foreign * self._block_size
        self._notes += (
            part,
            len(key) // TOKEN_BYTES,
            shared,
            last_user,
        )  # whole, whatever interrupts

    def what_if(self) -> WhatIf:
        """Return the hit-rate curve of the latest requests, under LRU.

        Mostly within a tenth of a point. Of the requests that are remembered, or of those since it was begun anew.
        What was found in blocks whose rest is another counts at every capacity, but for none.
        """
        counters, block_size = self._counters, self._block_size
        parts, prompt, found, since = np.concatenate((*self._packed, self._unpacked())).T
        num_notes = len(prompt)
        num_forgotten = max(counters.num_requests - num_notes, 0)
        size = (prompt - 1) // block_size * block_size
        shared = np.clip(found, 0, size) // block_size * block_size
        since -= np.where(since > 0, num_forgotten, 0)
        # Where an interrupt came between, a number may be one too high.
        since = np.minimum(since, np.arange(num_notes))
        generated = counters.computed_tokens + counters.hit_tokens - counters.prompt_tokens
        share = num_notes / max(counters.num_requests, 1)
        uses = uses_of(size, shared, since, int(generated * share))
        warm_up = num_notes // WARM_UP if num_forgotten else 0
        first = max(self._begun - num_forgotten, warm_up)
        capacities, hits = hit_curve(uses, first)
        hits += np.where(capacities > 0, parts[first:].sum(), 0)
        return WhatIf(
            capacity_blocks=self._capacity(),
            capacities=capacities / block_size,
            token_hit=hits / max(prompt[first:].sum(), 1),
            num_requests=counters.num_requests - self._begun,
            noted_requests=num_notes - first,
            measured=self._measured(),
            num_filling=int(np.count_nonzero(prompt[first:] > (self._capacity() - 1) * block_size)),
        )

    def _measured(self) -> float | None:
        """Return the share of prompt tokens that were found since the curve was begun."""
        counters = self._counters
        asked = counters.prompt_tokens - self._begun_tokens
        return (counters.hit_tokens - self._begun_hits) / asked if asked else None

    def _pack(self) -> None:
        """Pack the notes, and forget the oldest of too many."""
        self._packed.append(self._unpacked())
        self._notes = []
        while sum(map(len, self._packed)) > MAX_NOTES:
            del self._packed[0]

    def _unpacked(self) -> Notes:
        return np.array(self._notes, np.int64).reshape(-1, NOTE)

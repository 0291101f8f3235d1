"""The live curve: what any capacity would find, from a short note per request."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from quire.core.distances import hit_curve, uses_of
from quire.core.policies import Capacity
from quire.core.stats import Counters
from quire.core.whatif import WhatIf

Notes: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.int64]]
"""int64 [requests, NOTE]"""

NOTE = 3
"""Entries of a note: the tokens of a prompt; those that were found or, where some were forgotten or came from
elsewhere, minus all that had been used here; the number of the last request that used all of these."""

PACK_EVERY = 1 << 13
"""Requests after which their notes are packed: 24 bytes each instead of about 100."""

MAX_NOTES = 1 << 17
"""Requests that are remembered; of more, the oldest are forgotten."""

WARM_UP = 4
"""The first quarter of what is left then is not in the curve: too little is known of what was there before."""


class LiveCurve:
    """Makes a hit-rate curve of the latest requests, when asked.

    The tree knows of each node which request used it last, and of what was evicted too (`lost`). So three numbers
    per request, noted in line in `open`, are enough to see afterwards who shared how much of a prompt with whom,
    and what a larger or a smaller cache would have found (`distances`). What is noted is not counted as well:
    `count` does that when somebody asks.

    `notes`  of the latest requests, one after the other; those before are packed
    """

    def __init__(self, block_size: int, counters: Counters, capacity: Capacity) -> None:
        self._capacity = capacity
        self._block_size = block_size
        self._counters = counters
        self._begun = self._num_counted = 0
        self._packed: list[Notes] = []
        self.notes: list[int] = []

    def restart(self) -> None:
        """Begin the curve anew: it is of the requests from now on. Those before only tell what they left."""
        self._begun = self._counters.num_requests

    def pack(self) -> None:
        """Pack the notes, and forget the oldest of too many. Wants to be called every `PACK_EVERY` requests."""
        self.count()
        self._packed.append(self._unpacked(0))
        self.notes, self._num_counted = [], 0
        while sum(map(len, self._packed)) > MAX_NOTES:
            del self._packed[0]

    def count(self) -> None:
        """Add the requests that were noted since the last time to the counters; `open` leaves them to this."""
        prompt, found, _ = self._unpacked(self._num_counted).T
        self._num_counted += len(prompt)
        counters, missed = self._counters, self._counters.missed
        counters.prompt_tokens += prompt.sum().item()
        # Of those below 0 `open` has counted what was found.
        counters.hit_tokens += np.maximum(found, 0).sum().item()
        missed["last_token"] += len(prompt)
        missed["cold"] += counters.prompt_tokens - counters.hit_tokens - sum(missed.values())

    def what_if(self) -> WhatIf:
        """Return the curve of the requests that are remembered, or of those since it was begun anew."""
        self.count()
        counters, block_size = self._counters, self._block_size
        prompt, found, since = np.concatenate((*self._packed, self._unpacked(0))).T
        num_notes = len(prompt)
        num_forgotten = max(counters.num_requests - num_notes, 0)
        size = (prompt - 1) // block_size * block_size
        shared = np.minimum(np.abs(found), size) // block_size * block_size
        since -= np.where(since > 0, num_forgotten, 0)
        # Where an interrupt came between, a number may be one too high.
        since = np.minimum(since, np.arange(num_notes))
        generated = counters.computed_tokens + counters.hit_tokens - counters.prompt_tokens
        share = num_notes / max(counters.num_requests, 1)
        uses = uses_of(size, shared, since, int(generated * share))
        warm_up = num_notes // WARM_UP if num_forgotten else 0
        first = max(self._begun - num_forgotten, warm_up)
        capacities, hits = hit_curve(uses, first)
        return WhatIf(
            capacity_blocks=self._capacity(),
            capacities=capacities / block_size,
            token_hit=hits / max(prompt[first:].sum(), 1),
            num_requests=counters.num_requests - self._begun,
            noted_requests=num_notes - first,
        )

    def _unpacked(self, first: int) -> Notes:
        """Return the notes that are not packed, from one on."""
        return np.array(self.notes[NOTE * first :], np.int64).reshape(-1, NOTE)

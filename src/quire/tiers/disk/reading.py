"""Reading records from disk: neighbours by one call of the system, several calls at a time where that pays."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby

import msgspec

from quire.tiers.base import Answers, Buffers, Keys, Outcome, checked
from quire.tiers.disk.crew import Crew
from quire.tiers.disk.records import (
    HEADER_CHECKSUM,
    RUN_BYTES,
    DiskRecords,
    Spot,
    cached,
    runs_of,
)
from quire.tiers.disk.room import Clock

_HELPED_FROM = 64 << 10
"""Bytes of a record from which on several reads at once pay, past the page cache."""

_COPIED_BY_SEVERAL_FROM = 256 << 10
"""The same in the page cache, where a read is a copy: of less, the interpreter takes most of the time."""


class RecordReader(msgspec.Struct, frozen=True):
    """Reads the records of a call from their places.

    `note`   told what fails
    `drops`  whether a record is forgotten that is not what it should be: not where another process writes
    """

    _records: DiskRecords
    _crew: Crew
    _clock: Clock
    _note: Callable[[OSError], None]
    _drops: bool

    def get(self, keys: Keys, buffers: Buffers, until: float, answers: Answers) -> None:
        """Fill buffers and settle the answer of each key; where reading does not begin before `until`, as `TIMEOUT`."""
        pinned = self._records.pinned(keys)
        try:
            spots: dict[int, Spot] = {}
            for index, spot in enumerate(pinned):
                if spot is None:
                    answers.settle(index, Outcome.ABSENT)
                elif spot.slab.record_bytes != len(buffers[index]):
                    answers.settle(index, Outcome.FOREIGN)
                else:
                    spots[index] = spot
            self._read(spots, keys, buffers, until, answers)
            if answers.damaged and self._drops:
                damaged = filter(answers.claims_drop, list(answers.damaged))
                self._records.drop_read([spots[index] for index in damaged])
        finally:
            self._records.unpin(pinned)

    def _read(
        self, spots: dict[int, Spot], keys: Keys, buffers: Buffers, until: float, answers: Answers
    ) -> None:
        """Read the records at these spots, by index in the call."""
        indices, places = list(spots), list(spots.values())
        is_cached = cached(places)
        sizes = [len(buffers[index]) for index in indices]
        helpers = self._helpers(min(sizes, default=0), in_memory=all(is_cached))
        # Every thread has a run to read, if need be a short one.
        most_bytes = min(RUN_BYTES, sum(sizes) // (helpers + 1))
        runs = [
            list(part)
            for run in runs_of(places, most_bytes)
            for _, part in groupby(run, is_cached.__getitem__)
        ]

        def read(number: int) -> None:
            run = runs[number]
            first = places[run[0]]
            reading = first.slab.read_cached if is_cached[run[0]] else first.slab.read
            is_late = self._clock() > until
            is_whole = False
            if len(run) > 1 and not is_late:
                with suppress(OSError):  # one by one it is seen which fails
                    is_whole = reading(first.place, *(buffers[indices[at]] for at in run))
            for at in run:
                index, spot = indices[at], places[at]
                key, buffer = keys[index], buffers[index]
                try:
                    if is_late:
                        outcome = Outcome.TIMEOUT
                    elif is_whole or reading(spot.place, buffer):
                        outcome = self._outcome(spot, key, buffer)
                    else:
                        outcome = self._damaged
                except OSError as error:
                    self._note(error)
                    outcome = Outcome.ERROR
                answers.settle(index, outcome)

        self._crew.each(len(runs), read, helpers)

    def _helpers(self, smallest: int, *, in_memory: bool) -> int:
        """Return how many threads should help to read records of at least that size."""
        if in_memory:
            cores = os.cpu_count() or 1
            return min(self._crew.helpers, cores - 1) if smallest >= _COPIED_BY_SEVERAL_FROM else 0
        return self._crew.helpers if smallest >= _HELPED_FROM else 0

    def _outcome(self, spot: Spot, key: bytes, buffer: memoryview) -> Outcome:
        """Return the outcome of a place that was read as a whole; `HIT` is verified by who settles it."""
        if int.from_bytes(buffer[HEADER_CHECKSUM], "little") == spot.tag:
            return Outcome.HIT
        if self._drops and checked(key, buffer) is Outcome.FOREIGN:
            return Outcome.FOREIGN
        return self._damaged

    @property
    def _damaged(self) -> Outcome:
        """Outcome for a place that does not hold the wanted record; a writer may have reused it."""
        return Outcome.CORRUPT if self._drops else Outcome.ABSENT

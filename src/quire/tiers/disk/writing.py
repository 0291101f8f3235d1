"""Putting records on disk: places are taken, filled, and found, a batch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import msgspec

from quire.tiers.base import Buffers, Keys, Outcome
from quire.tiers.disk.crew import Crew
from quire.tiers.disk.files import is_full
from quire.tiers.disk.records import HEADER_CHECKSUM, RUN_BYTES, DiskRecords, Spot, runs_of
from quire.tiers.disk.room import Clock, DiskRoom
from quire.tiers.disk.slab import Slab

_BATCH_BYTES = 16 << 20
"""Records are found after so many bytes of a call were written, or at its end."""


class DiskWriter(msgspec.Struct, frozen=True):
    """Writes the records of a call into places of `room` and enters them in `records`.

    `note` is called with each error.
    """

    _records: DiskRecords
    _room: DiskRoom
    _crew: Crew
    _clock: Clock
    _note: Callable[[OSError], None]

    def put(self, keys: Keys, records: Buffers, until: float, done: list[Outcome]) -> None:
        """Keep records, each key once, in place of those of another size, and set `done[i]` for each.

        What follows one that is not kept is behind it in the prompt, of no use without it. Raises
        `OSError`, also where room takes longer than `until`, with what was not tried `SKIPPED`.
        """
        self._records.drop_other_sizes(keys, list(map(len, records)))
        newest, there = self._records.touch(keys)  # what is there stays: it is the newest
        oldest = newest - len(keys) + 1
        done[:] = [Outcome.PRESENT if each else Outcome.SKIPPED for each in there]
        waiting = [index for index, is_there in enumerate(there) if not is_there]
        left = Counter(map(len, map(records.__getitem__, waiting)))
        spare: dict[int, tuple[Slab | None, list[int]]] = {}
        batch: dict[int, Spot] = {}
        num_bytes, refused = 0, None
        try:
            for index in waiting:
                size = len(records[index])
                slab, places = spare.get(size, (None, []))
                if not places:
                    count = min(left[size], max(1, _BATCH_BYTES // size))
                    slab, places = self._room.reserve(size, count, oldest, until)
                    places.reverse()
                    spare[size] = slab, places
                if slab is None or not places:
                    refused = Outcome.FULL
                    break
                tag = int.from_bytes(records[index][HEADER_CHECKSUM], "little")
                batch[index] = Spot(slab, places.pop(), tag, newest - index, keys[index])
                left[size] -= 1
                num_bytes += size
                if num_bytes >= _BATCH_BYTES:
                    whole, batch, num_bytes = batch, {}, 0
                    refused = self._write(whole, records, until, done)
                    if refused:
                        break
        finally:
            with self._records.lock:
                for slab, places in spare.values():
                    if slab is not None and places:
                        slab.index.release(*places)
            refused = self._write(batch, records, until, done) or refused
        for index in waiting:
            if done[index] is Outcome.SKIPPED and refused:
                done[index] = refused

    def _write(
        self, batch: dict[int, Spot], records: Buffers, until: float, done: list[Outcome]
    ) -> Outcome | None:
        """Fill places, by index in the call, and let them be found, up to the first that fails: return how."""
        places, data = list(batch.values()), list(map(records.__getitem__, batch))
        runs = runs_of(places)
        failed: dict[int, Outcome] = {}

        def write(number: int) -> None:
            run = runs[number]
            if failed:  # by another thread, maybe behind this one: all that is not written fails
                failed[run.start] = next(iter(list(failed.values())))
                return
            if self._clock() > until:
                failed[run.start] = Outcome.TIMEOUT
                return
            slab = places[run.start].slab
            if len(run) > 1:
                with suppress(OSError):  # one by one it is seen which fails
                    slab.write(places[run.start].place, *data[run.start : run.stop])
                    return
            for at in run:
                try:
                    slab.write(places[at].place, data[at])
                except OSError as error:
                    failed[at] = self._outcome_of(error)
                    return

        # A run keeps the device busy, and the page cache takes one write at a time: more threads would only be in a model's way.
        are_large = min(map(len, data), default=0) >= RUN_BYTES
        is_helped = are_large and any(places[run.start].slab.goes_past_cache for run in runs)
        if is_helped:
            self._crew.each(len(runs), write, self._crew.helpers)
        else:
            for number in range(len(runs)):
                write(number)
        first = min(failed, default=len(places))
        outcome = failed.get(first)
        late: list[bool] = []
        try:
            late = self._records.commit(places[:first])
        except OSError as error:
            outcome = self._outcome_of(error)
        with self._records.lock:
            for written in places[first:]:
                written.slab.index.release(written.place)
        for index, is_late in zip(batch, late, strict=False):
            done[index] = Outcome.PRESENT if is_late else Outcome.STORED
        return outcome

    def _outcome_of(self, error: OSError) -> Outcome:
        self._note(error)
        return Outcome.FULL if is_full(error) else Outcome.ERROR

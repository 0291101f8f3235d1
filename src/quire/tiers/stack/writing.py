"""Writing to the tiers of a stack: queues of bounded size, and the order of a prompt's blocks.

What is offered to a tier either goes into its queue at once or is dropped; nobody waits. One thread per tier
writes the queue out, in order. Behind a record that a tier refused, nothing of the same chain is written to
it: a tail whose head is missing is found by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quire.tiers.base import Buffers, Keys, Outcome
from quire.tiers.format import tag_of_key
from quire.tiers.purging import Write
from quire.tiers.stack.lanes import Deadline
from quire.tiers.stack.member import Shared, StackMember, guarded

CHUNK_KEYS = 256
STORE_TIMEOUT_S = 10.0
"""The longest that one write of a batch may take; no request waits for it."""

MOST_TOUCHES = 64
"""Touches that wait for one tier, in calls; what exceeds it is forgotten."""

_KEPT = (Outcome.STORED, Outcome.PRESENT)


class Chain:
    """Records that were given together, and who still reads them: the caller, and queues.

    `is_prompt`  they are one prompt's, its head first; `broken_at` has the tiers that refused one
    `is_lent`    they stay whose they are: a queue takes copies
    `epoch`      that of `Shared` when they were made: what was purged since is not written
    """

    def __init__(
        self,
        shared: Shared,
        records: Buffers,
        *,
        is_prompt: bool = False,
        is_lent: bool = False,
        epoch: int | None = None,
    ) -> None:
        self.epoch = shared.epoch if epoch is None else epoch
        self.records = records
        self.is_prompt = is_prompt
        self.is_lent = is_lent
        self.broken_at: set[int] = set()
        self.num_holders = 1
        self._shared = shared

    def let_go(self) -> None:
        """Hold the records no more; the last holder gives them back."""
        with self._shared.lock:
            self.num_holders -= 1
            is_last = not self.num_holders
        if is_last and not self.is_lent:
            self._shared.give_back(self.records)

    def copied(self, indices: Sequence[int]) -> Chain:
        """Return a chain of copies, of the records with these indices only."""
        copies = self._shared.pool.take([len(self.records[index]) for index in indices])
        for copy, index in zip(copies, indices, strict=True):
            copy[:] = self.records[index]
        return Chain(self._shared, copies, epoch=self.epoch)


def write(
    shared: Shared, level: StackMember, chain: Chain, indices: Sequence[int], keys: Keys
) -> list[Outcome]:
    """Write records of a chain to a tier, on this thread, but none that was purged since they were made.

    Behind a refused one of a prompt, none stays.
    """
    under_way = Write([keys[index] for index in indices])
    try:
        shared.writes.begin(under_way)
        if not under_way.barred and under_way.tags.isdisjoint(shared.purged):
            return _write(shared, level, chain, indices, keys)
        own = [
            index
            for index in indices
            if tag_of_key(keys[index]) not in under_way.barred
            and shared.purged.get(tag_of_key(keys[index]), 0) <= chain.epoch
        ]
        outcomes = dict(zip(own, _write(shared, level, chain, own, keys), strict=True))
        return [outcomes.get(index, Outcome.SKIPPED) for index in indices]
    finally:
        under_way.is_over = True
        shared.writes.ended()


def _write(
    shared: Shared, level: StackMember, chain: Chain, indices: Sequence[int], keys: Keys
) -> list[Outcome]:
    if level.index in chain.broken_at:
        outcomes = [Outcome.SKIPPED] * len(indices)
        with shared.lock:
            level.meter.stores.update(outcomes)
        return outcomes
    wanting = [keys[index] for index in indices]
    records = [chain.records[index] for index in indices]
    began_s = shared.lanes.now()
    outcomes = _put(level, wanting, records)
    refused = next((at for at, each in enumerate(outcomes) if each not in _KEPT), len(indices))
    answers = list(outcomes)
    if chain.is_prompt:
        stranded = [at for at in range(refused, len(indices)) if outcomes[at] is Outcome.STORED]
        if stranded:
            lost = [wanting[at] for at in stranded]
            guarded(lambda: level.tier.delete(lost) or [], 0)
        for at in stranded:
            outcomes[at] = Outcome.SKIPPED
    took_s = max(0.0, shared.lanes.now() - began_s)
    with shared.lock:
        level.meter.stores.update(outcomes)
        level.meter.store_s += took_s
        for record, each in zip(records, outcomes, strict=True):
            if each is Outcome.STORED:
                level.meter.stored_bytes += len(record)
        level.answered("store", answers)
        if chain.is_prompt and refused < len(indices):
            chain.broken_at.add(level.index)
        if not level.answers_at_once:
            kept = [key for key, each in zip(wanting, outcomes, strict=True) if each in _KEPT]
            shared.whereabouts.mark(kept, level.index)
    return outcomes


def _put(level: StackMember, keys: list[bytes], records: list[memoryview]) -> list[Outcome]:
    """Put what the tier does not have. Where others write too it is asked first: that is cheaper."""
    tier, timeout_s = level.tier, STORE_TIMEOUT_S
    if tier.is_local:
        return guarded(lambda: tier.put_sealed(keys, records, timeout_s), len(keys))
    there: list[bool] = [False] * len(keys)

    def look() -> list[Outcome]:
        there[:], failures = tier.lookup(keys, timeout_s)
        return failures

    failures = guarded(look, 1)
    if failures:
        return failures[:1] * len(keys)
    missing = [at for at, is_there in enumerate(there) if not is_there]
    outcomes = [Outcome.PRESENT] * len(keys)
    if missing:
        wanting, lacking = [keys[at] for at in missing], [records[at] for at in missing]
        answers = guarded(lambda: tier.put_sealed(wanting, lacking, timeout_s), len(missing))
        for at, answer in zip(missing, answers, strict=True):
            outcomes[at] = answer
    return outcomes


class StoreQueue:
    """Records that wait to be written to one tier: at most `queue_bytes`, each key once.

    `waiting_bytes` is the sum over the records in `_waiting`, what is being written included.
    """

    def __init__(self, shared: Shared, level: StackMember) -> None:
        self._shared = shared
        self._level = level
        self._limit_bytes = int(level.settings.queue_bytes or shared.settings.queue_bytes)
        self._waiting: dict[bytes, int] = {}
        self._num_jobs = 0
        self._num_touches = 0
        self._idle = shared.lanes.signal()
        self._idle.set()
        self.waiting_bytes = 0
        self._usual_bytes = 0

    @property
    def room(self) -> int:
        """Records, of the size that the last ones had, that would be taken now. The lock is held."""
        level = self._level
        if not level.writes or not level.writing.allows or self._shared.is_closed:
            return 0
        return (self._limit_bytes - self.waiting_bytes) // max(self._usual_bytes, 1)

    @property
    def is_filling(self) -> bool:
        """Whether the tier is written to and its queue is more than half full. The lock is held."""
        return self._level.writing.allows and 2 * self.waiting_bytes > self._limit_bytes

    def has(self, keys: Keys) -> list[bool]:
        """Return the keys that wait, bool per key. The lock is held."""
        return [key in self._waiting for key in keys]

    def offer(self, chain: Chain, indices: Sequence[int], keys: Keys) -> list[Outcome]:
        """Take the records of a chain with these indices, in order, until one is refused.

        Returns, for each, `STORED` (it waits now, or did before) or `SKIPPED`.
        """
        level, parts = self._level, list[list[int]]()
        outcomes = [Outcome.SKIPPED] * len(indices)
        most, room = int(self._shared.settings.batch_bytes), 0
        with self._shared.lock:
            if not level.writes or self._shared.is_closed:
                return outcomes
            is_allowed = level.writing.allows or level.writing.take_trial()
            for at, index in enumerate(indices if is_allowed else ()):
                key, size = keys[index], len(chain.records[index])
                self._usual_bytes = size
                if key not in self._waiting:
                    if self.waiting_bytes + size > self._limit_bytes:
                        break
                    if not parts or size > room or len(parts[-1]) == CHUNK_KEYS:
                        parts.append([])
                        room = most
                    parts[-1].append(index)
                    room -= size
                    self._waiting[key] = size
                    self.waiting_bytes += size
                outcomes[at] = Outcome.STORED
            level.meter.dropped += outcomes.count(Outcome.SKIPPED)
            if not chain.is_lent:
                chain.num_holders += len(parts)
            self._num_jobs += len(parts)
            if parts:
                self._idle.clear()
        for part in parts:
            call = chain, part, keys
            if chain.is_lent:
                call = chain.copied(part), range(len(part)), [keys[index] for index in part]
            level.stores.submit(level, partial(self._write, *call), partial(self._forget, *call))
        return outcomes

    def touch(self, keys: Keys) -> None:
        """Tell the tier that a prompt was used, when it has time."""
        level = self._level

        def done() -> None:
            with self._shared.lock:
                self._num_touches -= 1

        def touch() -> None:
            guarded(lambda: level.tier.touch(keys) or [], 0)
            done()

        with self._shared.lock:
            if self._num_touches >= MOST_TOUCHES or not level.reading.allows:
                return
            self._num_touches += 1
        level.stores.submit(level, touch, done)

    def wait(self, deadline: Deadline) -> bool:
        """Return whether nothing waits any more, now or before the deadline."""
        return self._idle.wait(deadline.left_s)

    def count(self) -> tuple[int, int]:
        """Return the bytes that wait, by the counter and by counting. The lock is held."""
        return self.waiting_bytes, sum(self._waiting.values())

    # In the tier's lane

    def _write(self, chain: Chain, indices: Sequence[int], keys: Keys) -> None:
        write(self._shared, self._level, chain, indices, keys)
        self._forget(chain, indices, keys)

    def _forget(self, chain: Chain, indices: Sequence[int], keys: Keys) -> None:
        with self._shared.lock:
            for index in indices:
                self.waiting_bytes -= self._waiting.pop(keys[index], 0)
            self._num_jobs -= 1
            if not self._num_jobs:
                self._idle.set()
        chain.let_go()

"""Writing to the tiers of a stack: queues of bounded size, and the order of a prompt's blocks.

What is offered to a tier either goes into its queue at once or is dropped; nobody waits. One thread per tier
writes the queue out, in order. Behind a record that a tier refused, nothing of the same chain is written to
it: a tail whose head is missing is found by nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from quire.tiers.base import Buffers, Keys, Outcome, check_sealed
from quire.tiers.contents.batches import batches
from quire.tiers.format import tag_of_key
from quire.tiers.keys import TierKey
from quire.tiers.purging import Write
from quire.tiers.stack.lanes import Deadline
from quire.tiers.stack.member import Shared, StackMember, guarded
from quire.tiers.trust import check_signer

BATCH_KEYS = 256
"""The most records of a call of a tier, for reading as well."""
STORE_TIMEOUT_S = 10.0
"""The longest that one write of a batch may take; no request waits for it."""

MOST_TOUCHES = 64
"""Touches that wait for one tier, in calls; what exceeds it is forgotten."""

_KEPT = {Outcome.STORED, Outcome.PRESENT}


def check_own(keys: Keys, records: Buffers, key: TierKey | None) -> None:
    """Raise `RecordError` for a record not sealed under its key, or not signed with the tier key.

    The MAC is not computed again: the sealer has just signed it.
    """
    check_sealed(keys, records)
    if key is not None:
        check_signer(records, key)


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


class TierWriter:
    """The writer of one tier: at once where it is in memory, else from a queue, in the tier's lane.

    At most `queue_bytes` wait, each key once. `waiting_bytes` is the sum over the records in `_waiting`, what is being
    written included.
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
        self.give = self.write if level.in_memory else self.offer
        """Gives the tier the records of a chain with some indices; returns their outcomes."""

    def write(self, chain: Chain, indices: Sequence[int], keys: Keys) -> list[Outcome]:
        """Write records on this thread, but none that was purged since they were made.

        Behind a refused one of a prompt, none stays.
        """
        shared = self._shared
        write = Write(map(keys.__getitem__, indices))
        try:
            shared.writes.begin(write)
            if not write.barred and write.tags.isdisjoint(shared.purged):
                return self._write(chain, indices, keys)
            own = [
                index
                for index in indices
                if (tag := tag_of_key(keys[index])) not in write.barred
                and shared.purged.get(tag, 0) <= chain.epoch
            ]
            outcomes = dict(zip(own, self._write(chain, own, keys), strict=True))
            return [outcomes.get(index, Outcome.SKIPPED) for index in indices]
        finally:
            write.is_over = True
            shared.writes.ended()

    def _write(self, chain: Chain, indices: Sequence[int], keys: Keys) -> list[Outcome]:
        shared, level = self._shared, self._level
        if level.index in chain.broken_at:
            outcomes = [Outcome.SKIPPED] * len(indices)
            with shared.lock:
                level.meter.stores.update(outcomes)
            return outcomes
        wanting = list(map(keys.__getitem__, indices))
        records = list(map(chain.records.__getitem__, indices))
        began_s = shared.lanes.now()
        answers = outcomes = self._put(wanting, records)
        is_broken = chain.is_prompt and not _KEPT.issuperset(answers)
        if is_broken:
            outcomes = self._without_stranded(answers, wanting)
        took_s = max(0.0, shared.lanes.now() - began_s)
        kept: list[bytes] = []
        with shared.lock:
            level.meter.stores.update(outcomes)
            level.meter.store_s += took_s
            for key, record, each in zip(wanting, records, outcomes, strict=True):
                if each in _KEPT:
                    kept.append(key)
                if each is Outcome.STORED:
                    level.meter.stored_bytes += len(record)
            level.answered("store", answers)
            if is_broken:
                chain.broken_at.add(level.index)
            if not level.answers_at_once:
                shared.whereabouts.mark(kept, level.index)
        return outcomes

    def _without_stranded(self, answers: list[Outcome], keys: list[bytes]) -> list[Outcome]:
        """Delete what was stored of a prompt behind a refused record; return the outcomes."""
        outcomes = list(answers)
        refused = next(at for at, each in enumerate(answers) if each not in _KEPT)
        stranded = [at for at in range(refused, len(keys)) if answers[at] is Outcome.STORED]
        if stranded:
            lost = [keys[at] for at in stranded]
            guarded(lambda: self._level.tier.delete(lost) or [], 0)
        for at in stranded:
            outcomes[at] = Outcome.SKIPPED
        return outcomes

    def _put(self, keys: list[bytes], records: list[memoryview]) -> list[Outcome]:
        """Put what the tier does not have. Where others write too it is asked first: that is cheaper."""
        tier, timeout_s = self._level.tier, STORE_TIMEOUT_S
        if tier.is_local:
            return guarded(partial(tier.put_sealed, keys, records, timeout_s), len(keys))
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
            put = partial(tier.put_sealed, wanting, lacking, timeout_s)
            for at, answer in zip(missing, guarded(put, len(missing)), strict=True):
                outcomes[at] = answer
        return outcomes

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
        level, new, sizes = self._level, list[int](), list[int]()
        outcomes = [Outcome.SKIPPED] * len(indices)
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
                    new.append(index)
                    sizes.append(size)
                    self._waiting[key] = size
                    self.waiting_bytes += size
                outcomes[at] = Outcome.STORED
            most = int(self._shared.settings.batch_bytes)
            parts = list(batches(new, sizes, most, BATCH_KEYS))
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
            level.stores.submit(
                level, partial(self._write_and_forget, *call), partial(self._forget, *call)
            )
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

    def wait_for(self, keys: Keys, deadline: Deadline) -> bool:
        """Return whether none of these keys waits any more, now or before the deadline."""
        with self._shared.lock:
            if not self._waiting or not any(self.has(keys)):
                return True
        done = self._shared.lanes.signal()
        self._level.stores.submit(self._level, done.set, done.set)  # behind all that waits now
        return done.wait(deadline.left_s)

    def count(self) -> tuple[int, int]:
        """Return the bytes that wait, by the counter and by counting. The lock is held."""
        return self.waiting_bytes, sum(self._waiting.values())

    # In the tier's lane

    def _write_and_forget(self, chain: Chain, indices: Sequence[int], keys: Keys) -> None:
        self.write(chain, indices, keys)
        self._forget(chain, indices, keys)

    def _forget(self, chain: Chain, indices: Sequence[int], keys: Keys) -> None:
        with self._shared.lock:
            for index in indices:
                self.waiting_bytes -= self._waiting.pop(keys[index], 0)
            self._num_jobs -= 1
            if not self._num_jobs:
                self._idle.set()
        chain.let_go()

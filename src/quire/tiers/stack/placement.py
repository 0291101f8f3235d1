"""Placement of records in tiers: write policies, promotion, demotion, nothing twice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.tiers.base import Buffers, Keys, Outcome
from quire.tiers.stack.lanes import Deadline
from quire.tiers.stack.member import Shared, StackMember
from quire.tiers.stack.writing import Chain, TierWriter

Bits: TypeAlias = NDArray[np.uint8]
"""A bit per tier for each key, uint8 [keys]."""

HEAD_KEYS = 8
"""So many of a prompt's keys are looked for first."""

SECOND = 2
"""Uses from which on `second_use` writes."""

_WORTH = {Outcome.STORED: 3, Outcome.PRESENT: 2, Outcome.FULL: 1}
"""The better outcome of a key that several tiers were given is the one worth more; any other is worth 0."""


class Placer:
    """Decides for every record which tiers get it, and hands it to them.

    A tier gets a record only if it is not known to have it, and has no such record waiting.
    """

    def __init__(self, shared: Shared, levels: Sequence[StackMember]) -> None:
        self._shared = shared
        self._levels = levels
        self.writers = [TierWriter(shared, level) for level in levels]
        self._at_once = [each for each in levels if each.settings.write != "back"]
        self.counts_uses = any(level.settings.write == "second_use" for level in levels)

    def wanted(self, keys: Keys) -> Bits:
        """Return the tiers that would take each key now, a bit for each tier.

        A tier above one that has the key does not: it gets the record when that is read. Where reading it does not pay,
        it does.
        """
        bits = np.zeros(len(keys), np.uint8)
        below = np.zeros(len(keys), np.bool_)
        for level, writer in zip(self._levels[::-1], self.writers[::-1], strict=True):
            # Without its head a tail is of no use: who has none of the head is given all.
            has = self._has(level, keys[:HEAD_KEYS])
            if len(has) < len(keys):
                is_all = level.settings.write == "through" and not has.any()
                has = np.zeros(len(keys), np.bool_) if is_all else self._has(level, keys)
            if level.writes and level.settings.write != "back":
                lacks = ~(has | below)
                if level.settings.write == "second_use":
                    lacks &= self._is_used_again(keys)
                if not level.in_memory:
                    with self._shared.lock:
                        room = writer.room
                    lacks[np.flatnonzero(lacks)[room:]] = False
                bits |= lacks.astype(np.uint8) << np.uint8(level.index)
            if level.index and self._gives(level):
                with self._shared.lock:
                    below |= has & (self._shared.refused.get(keys) == 0)
        return bits

    def store(self, keys: Keys, records: Buffers, wanted: Bits | None = None) -> list[Outcome]:
        """Give a prompt's records to all tiers that are written at once, or to those that want them."""
        chain = Chain(self._shared, records, is_prompt=True)
        return self._give(self._at_once, keys, chain, wanted)

    def store_evicted(self, keys: Keys, records: Buffers) -> list[Outcome]:
        """Put blocks that the device evicted into the fastest tier, and into those not written `back`."""
        writing = [level for level in self._levels if level.writes]
        levels = [
            each for at, each in enumerate(writing) if not at or each.settings.write != "back"
        ]
        return self._give(levels, keys, Chain(self._shared, records))

    def lacking_below(self, above: StackMember, keys: list[bytes]) -> list[int]:
        """Return the indices of the victims of a tier that the next written one lacks."""
        below = self._below(above, keys)
        return [] if below is None else np.flatnonzero(self._lacks(below, keys)).tolist()

    def demote(self, above: StackMember, keys: list[bytes], records: list[memoryview]) -> None:
        """Put records that a tier evicts into the next written one, unless it has them. Copies.

        With a tier key, nothing goes on that others have put there: the next one may be this process's memory.
        """
        trust = above.tier.trust
        if trust is not None and not above.in_memory:
            own = [at for at, record in enumerate(records) if trust.judge(record) is Outcome.HIT]
            keys, records = [keys[at] for at in own], [records[at] for at in own]
        below = self._below(above, keys)
        if below is not None and keys:
            self._give([below], keys, Chain(self._shared, records, is_lent=True))

    def _below(self, above: StackMember, gone: list[bytes]) -> StackMember | None:
        """Return the next tier that is written; what is gone from above is known to be."""
        if not above.answers_at_once:
            with self._shared.lock:
                self._shared.whereabouts.clear(gone, above.index)
        return next((each for each in self._levels[above.index + 1 :] if each.writes), None)

    def promote(
        self, below: StackMember, keys: list[bytes], records: list[memoryview], epoch: int
    ) -> None:
        """Copy records that a read found in a slower tier into the fastest one.

        `epoch` is that in which the read began. The records stay the caller's.
        """
        top = self._levels[0]
        if below.index and top.writes and self._shared.settings.promote:
            self._give([top], keys, Chain(self._shared, records, is_lent=True, epoch=epoch))

    def count_use(self, keys: Keys) -> None:
        """Count a use of each key, and tell the tiers."""
        if self.counts_uses:
            with self._shared.lock:
                self._shared.uses.count(keys)
        for level, writer in zip(self._levels, self.writers, strict=True):
            if level.answers_at_once:
                level.tier.touch(keys)
            else:
                writer.touch(keys)

    @property
    def is_filling(self) -> bool:
        """Whether queued records of a tier should be written before more are made. The lock is held."""
        return any(writer.is_filling for writer in self.writers)

    def drain(self, deadline: Deadline, keys: Keys | None = None) -> bool:
        """Return whether nothing, or none of these keys, waits to be written any more, now or before the deadline."""
        if keys is None:
            return all(writer.wait(deadline) for writer in self.writers)
        return all(writer.wait_for(keys, deadline) for writer in self.writers)

    def _lacks(self, level: StackMember, keys: Keys) -> NDArray[np.bool_]:
        """Return the gaps of a tier: keys that it should have, has not as far as is known, and is not about to get."""
        lacks = ~self._has(level, keys)
        return lacks & self._is_used_again(keys) if level.settings.write == "second_use" else lacks

    def _has(self, level: StackMember, keys: Keys) -> NDArray[np.bool_]:
        """Return the keys that a tier has as far as is known, or is about to get."""
        # A tier that answers at once knows what it has; nothing is remembered of it.
        there = np.array(level.tier.contains(keys), np.bool_) if level.answers_at_once else None
        with self._shared.lock:
            has = _has_bit(level, self._shared.whereabouts.get(keys)) if there is None else there
            if self.writers[level.index].waiting_bytes:
                has |= np.array(self.writers[level.index].has(keys), np.bool_)
        return has

    def _is_used_again(self, keys: Keys) -> NDArray[np.bool_]:
        with self._shared.lock:
            return self._shared.uses.get(keys) >= SECOND

    def _gives(self, level: StackMember) -> bool:
        """Return whether tiers above get what is read from a tier, which is in service."""
        top = self._levels[0]
        return level.reading.allows and top.writes and self._shared.settings.promote

    def _give(
        self, levels: Sequence[StackMember], keys: Keys, chain: Chain, wanted: Bits | None = None
    ) -> list[Outcome]:
        outcomes = [Outcome.SKIPPED] * len(keys)
        # The fastest last: what it lets go to make room is then on its way to the others already.
        for level in reversed(levels):
            if not level.writes or self._shared.is_closed:
                continue
            counts_uses, indices = level.settings.write == "second_use", list(range(len(keys)))
            if wanted is not None:
                indices = np.flatnonzero(_has_bit(level, wanted)).tolist()
            elif counts_uses or not level.in_memory:  # memory says itself what it has
                indices = np.flatnonzero(self._lacks(level, keys)).tolist()
            told: dict[int, Outcome] = {}
            if wanted is None and not counts_uses:
                told = dict.fromkeys(range(len(keys)), Outcome.PRESENT)
            if indices:
                given = self.writers[level.index].give(chain, indices, keys)
                told.update(zip(indices, given, strict=True))
            for index, outcome in told.items():
                if _WORTH.get(outcome, 0) >= _WORTH.get(outcomes[index], 0):
                    outcomes[index] = outcome
        chain.let_go()
        return outcomes


def _has_bit(level: StackMember, bits: Bits) -> NDArray[np.bool_]:
    return (bits >> np.uint8(level.index)) & np.uint8(1) != 0

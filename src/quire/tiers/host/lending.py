"""Slots of an arena that others write their records into, so that storing them needs no copy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.tiers.host.arena import Arena, Shelf


@dataclass(slots=True)
class _Loan:
    """A slot that was given out, and the view that it was given as; published, or still reserved."""

    view: object
    shelf: Shelf
    slot: int
    is_published: bool = False


class Lending:
    """Slots that are lent, at most `limit_bytes` of them. Not thread-safe: its owner locks.

    reserved   from `lend` on: nobody finds the slot
    published  from `publish` on: found, and leased, so that it does not make room while others read it
    free       after `take_back`, where it was not published; else a slot like all others
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._loans: dict[int, _Loan] = {}
        self._by_slot: dict[tuple[int, int], _Loan] = {}

    def has_room(self, size: int) -> bool:
        """Return whether one more slot of this size may be lent."""
        return self.num_bytes + size <= self.limit_bytes

    def lend(self, shelf: Shelf, slot: int) -> memoryview:
        """Lend a reserved slot. The memory is known again by the array that it is a view of."""
        view = shelf.view(slot)
        loan = _Loan(view, shelf, slot)
        self._loans[id(view)] = self._by_slot[shelf.size, slot] = loan
        self.num_bytes += shelf.size
        return view.data

    def is_free(self, record: memoryview) -> bool:
        """Return whether a record lies in a lent slot that holds no other one yet."""
        loan = self._loan(record)
        return loan is not None and not loan.is_published and len(record) == loan.shelf.size

    def publish(
        self, record: memoryview, key: bytes, arena: Arena, stamp: int | None = None
    ) -> None:
        """Let a record be found where it lies; as just used, unless a stamp says when."""
        loan = self._loans[id(record.obj)]
        arena.publish(loan.shelf, loan.slot, key, stamp)
        loan.shelf.index.lease([loan.slot], math.inf)
        loan.is_published = True

    def withdraw(self, shelf: Shelf, slot: int) -> bool:
        """Forget the record of a slot if it is lent, and return whether it is; its bytes stay."""
        loan = self._by_slot.get((shelf.size, slot))
        if loan is None:
            return False
        shelf.index.unpublish(slot)
        loan.is_published = False
        return True

    def take_back(self, record: memoryview) -> None:
        """End a loan; twice, and for other memory, nothing."""
        loan = self._loan(record)
        if loan is None:
            return
        index = loan.shelf.index
        del self._loans[id(loan.view)], self._by_slot[loan.shelf.size, loan.slot]
        self.num_bytes -= loan.shelf.size
        if loan.is_published:
            index.end_leases([loan.slot])
        else:
            index.release(loan.slot)

    def _loan(self, record: memoryview) -> _Loan | None:
        return self._loans.get(id(record.obj))

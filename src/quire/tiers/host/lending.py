"""Places of an arena that others write their records into, so that storing them needs no copy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire.tiers.host.arena import Arena, Shelf


@dataclass(slots=True)
class _Loan:
    """A place that was given out, and the view that it was given as; published, or still reserved."""

    view: object
    shelf: Shelf
    place: int
    is_published: bool = False
    leased_until: float = -math.inf


class Lending:
    """Places that are lent, at most `limit_bytes` of them. Not thread-safe: its owner locks.

    reserved   from `lend` on: nobody finds the place
    published  from `publish` on: found, and leased, so that it does not make room while others read it
    free       after `take_back`, where it was not published; else a place like all others
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._loans: dict[int, _Loan] = {}
        self._by_place: dict[tuple[int, int], _Loan] = {}

    def room(self, size: int) -> int:
        """Return the number of places of this size that may still be lent."""
        return (self.limit_bytes - self.num_bytes) // size

    def lend(self, shelf: Shelf, places: Sequence[int]) -> list[memoryview]:
        """Lend reserved places. Their memory is known again by the arrays that these are views of."""
        lent: list[memoryview] = []
        for place in places:
            view = shelf.view(place)
            loan = _Loan(view, shelf, place)
            self._loans[id(view)] = self._by_place[shelf.size, place] = loan
            lent.append(view.data)
        self.num_bytes += len(places) * shelf.size
        return lent

    def is_free(self, record: memoryview) -> bool:
        """Return whether a record lies in a lent place that holds no other one yet."""
        loan = self._loan(record)
        return loan is not None and not loan.is_published and len(record) == loan.shelf.size

    def publish(
        self,
        records: Sequence[memoryview],
        keys: Sequence[bytes],
        arena: Arena,
        stamps: Sequence[int],
    ) -> None:
        """Let records be found where they lie."""
        loans = [self._loans[id(record.obj)] for record in records]
        for shelf in {loan.shelf.size: loan.shelf for loan in loans}.values():
            own = [at for at, loan in enumerate(loans) if loan.shelf is shelf]
            places = [loans[at].place for at in own]
            arena.publish(shelf, places, [keys[at] for at in own], [stamps[at] for at in own])
            shelf.index.lease(places, math.inf)
        for loan in loans:
            loan.is_published = True

    def withdraw(self, shelf: Shelf, place: int) -> bool:
        """Forget the record of a place if it is lent, and return whether it is; its bytes stay."""
        loan = self._by_place.get((shelf.size, place))
        if loan is None:
            return False
        shelf.index.unpublish(place)
        loan.is_published, loan.leased_until = False, -math.inf
        return True

    def lease(self, shelf: Shelf, place: int, until: float) -> None:
        """Note that the record of a place, if it is lent, is leased until then by others, too."""
        loan = self._by_place.get((shelf.size, place))
        if loan is not None:
            loan.leased_until = max(loan.leased_until, until)

    def take_back(self, records: Iterable[memoryview]) -> None:
        """End loans; twice, and for other memory, nothing."""
        for loan in filter(None, map(self._loan, records)):
            self._end(loan)

    def _end(self, loan: _Loan) -> None:
        index = loan.shelf.index
        del self._loans[id(loan.view)], self._by_place[loan.shelf.size, loan.place]
        self.num_bytes -= loan.shelf.size
        if loan.is_published:
            index.end_leases([loan.place])
            if loan.leased_until > -math.inf:
                index.lease([loan.place], loan.leased_until)
        else:
            loan.shelf.view(loan.place)[:] = 0  # what was there may have been purged meanwhile
            index.release(loan.place)

    def _loan(self, record: memoryview) -> _Loan | None:
        return self._loans.get(id(record.obj))

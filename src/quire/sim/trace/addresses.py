"""Ids of any kind become addresses: small numbers that tables can be indexed with."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeAlias

import numpy as np

from quire.sim.trace.numbering import Chains, Ints, Numbering, chains_of
from quire.sim.trace.schemas import RUN_ROWS, NamesRow

Name: TypeAlias = int | str | tuple[str, int | str]

DIRECT_IDS = 1 << 25
"""Ids below are their own addresses: an entry of a table that nobody touches costs no memory."""

SPREAD = 16
"""So are ids below this many times the number of different ids."""


class Addresses:
    """The addresses of the ids of a file: the ids themselves, or numbers by first appearance."""

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._names: _Names | None = None

    def chains(self, rows: list[Any], num_ids: Ints, *, local: bool) -> Chains:
        """Return the ids of rows as runs of addresses.

        `num_ids`: int64 [rows]. `local`: an id means something only within the session of its row.
        """
        if isinstance(rows[0], RUN_ROWS) and not local:
            found = self._direct_runs(rows)
            if found is not None:
                return found
        offsets = np.concatenate(([0], num_ids.cumsum()))
        ids = self._direct_ids(rows) if not local and not isinstance(rows[0], RUN_ROWS) else None
        if ids is None:
            ids = self._named(_names_of(rows, local=local), int(offsets[-1]))
        return chains_of(ids, offsets)

    def _direct_ids(self, rows: list[Any]) -> Ints | None:
        if self._names is not None or isinstance(rows[0], NamesRow):
            return None
        try:
            ids = np.fromiter(chain.from_iterable([row.hash_ids for row in rows]), np.int64)
        except OverflowError:
            return None
        return ids if self._fit(ids, ids) else None

    def _direct_runs(self, rows: list[Any]) -> Chains | None:
        if self._names is not None:
            return None
        counts = np.array([len(row.hash_runs) for row in rows], np.int64)
        every = chain.from_iterable([row.hash_runs for row in rows])
        try:
            runs = np.fromiter(chain.from_iterable(every), np.int64).reshape(-1, 2)
        except OverflowError:
            return None
        first = np.ascontiguousarray(runs[:, 0])
        if not self._fit(first, first + runs[:, 1]):
            return None
        return Chains(first, first + runs[:, 1], np.concatenate(([0], counts.cumsum())))

    def _fit(self, low: Ints, high: Ints) -> bool:
        if not len(low):
            return True
        limit = max(DIRECT_IDS, SPREAD * self._numbering.num_ids)
        return bool(low.min() >= 0 and high.max() < limit)

    def _named(self, names: Iterable[Name], count: int) -> Ints:
        if self._names is None:
            known = self._numbering.known().tolist()
            self._names = _Names(zip(known, known, strict=True))
            self._names.next = self._numbering.room() if known else 0
        return np.fromiter(map(self._names.__getitem__, names), np.int64, count)


class _Names(dict[Any, int]):
    """Addresses by id; an unknown id gets the next one."""

    next = 0

    def __missing__(self, name: Any) -> int:
        address = self[name] = self.next
        self.next = address + 1
        return address


def _names_of(rows: list[Any], *, local: bool) -> Iterable[Any]:
    ids: list[Iterable[Any]]
    if isinstance(rows[0], RUN_ROWS):
        ids = [
            chain.from_iterable([range(first, first + length) for first, length in row.hash_runs])
            for row in rows
        ]
    else:
        ids = [row.hash_ids for row in rows]
    if local:
        return (
            (row.session_id, id_) for row, every in zip(rows, ids, strict=True) for id_ in every
        )
    return chain.from_iterable(ids)

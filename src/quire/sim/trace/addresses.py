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
    """The addresses of the ids of a file: the ids themselves, or numbers by first appearance.

    Of last, partial blocks, which are left out:

    `num_partial_references`  how many had an id
    `num_partial`             different ids of these that never stood for a full block
    `partial_reused_tokens`   tokens in those whose id had been one before
    """

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._names: _Names | None = None
        self._partial: set[int] = set()
        self.num_partial_references = 0
        self.partial_reused_tokens = 0

    @property
    def num_partial(self) -> int:
        """Different ids that were only seen as a last, partial block."""
        partial = np.fromiter(self._partial, np.int64, len(self._partial))
        return int(np.count_nonzero(~self._numbering.knows(partial)))

    def chains(
        self, rows: list[Any], num_ids: Ints, partial_tokens: Ints, *, local: bool
    ) -> Chains:
        """Return the ids of rows as runs of addresses, without those of partial blocks.

        `num_ids`: int64 [rows]. `partial_tokens`: int64 [rows], tokens in the last block where that
        is a partial one with an id, else 0. `local`: an id means something only within the
        session of its row.
        """
        partial = partial_tokens > 0
        if isinstance(rows[0], RUN_ROWS) and not local:
            found = self._direct_runs(rows)
            if found is not None:
                return self._full_runs(found, partial_tokens)
        offsets = np.concatenate(([0], num_ids.cumsum()))
        ids = self._direct_ids(rows) if not local and not isinstance(rows[0], RUN_ROWS) else None
        if ids is None:
            ids = self._named(_names_of(rows, local=local), int(offsets[-1]))
        cut = offsets[1:][partial] - 1
        self._note_partial(ids[cut], partial_tokens[partial])
        if len(cut):
            keep = np.ones(len(ids), bool)
            keep[cut] = False
            ids = ids[keep]
            offsets = np.concatenate(([0], (num_ids - partial).cumsum()))
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

    def _full_runs(self, found: Chains, partial_tokens: Ints) -> Chains:
        partial = partial_tokens > 0
        if not partial.any():
            return found
        end = found.end.copy()
        last = found.bounds[1:][partial] - 1
        end[last] -= 1
        self._note_partial(end[last], partial_tokens[partial])
        keep = end > found.first
        number = np.concatenate(([0], keep.cumsum()))
        return Chains(found.first[keep], end[keep], number[found.bounds])

    def _named(self, names: Iterable[Name], count: int) -> Ints:
        if self._names is None:
            known = self._numbering.known().tolist()
            self._names = _Names(zip(known, known, strict=True))
            self._names.next = self._numbering.room() if known else 0
        return np.fromiter(map(self._names.__getitem__, names), np.int64, count)

    def _note_partial(self, addresses: Ints, tokens: Ints) -> None:
        self.num_partial_references += len(addresses)
        for address, count in zip(addresses.tolist(), tokens.tolist(), strict=True):
            if address in self._partial:
                self.partial_reused_tokens += count
            self._partial.add(address)


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

"""Block ids as a file has them become dense, chained ids, numbered by first appearance."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.errors import TraceError
from quire_sim.columns import Column
from quire_sim.trace.rows import Runs, add_run
from quire_sim.trace.schemas import RUN_ROWS

Bools: TypeAlias = np.ndarray[tuple[int], np.dtype[np.bool]]

Run: TypeAlias = tuple[int, int]
"""(first, length) of numbers that rise by one."""

MAX_IDS = 2**31 - 3

PAGE = 128
"""Ids of runs become addresses so many at a time."""


class Addresses:
    """Ids of any kind as small numbers, by which tables can be indexed.

    Ids one by one are numbered by first appearance, ids in runs page by page, so that runs stay
    runs.
    """

    def __init__(self) -> None:
        self._pages: dict[int, int] = {}
        self._names: dict[Any, int] = {}

    def runs_of(self, row: Any, *, local: bool) -> list[Run]:
        """Return the ids of a row as runs of addresses.

        `local`: an id means something only within the session of its row.
        """
        runs: list[Run] = []
        if not isinstance(row, RUN_ROWS):
            names: Iterable[Any] = row.hash_ids
        elif local:
            ids = (range(first, first + length) for first, length in row.hash_runs)
            names = ((row.session_id, id_) for id_ in chain.from_iterable(ids))
        else:
            return self.of_runs(row.hash_runs)
        known = self._names
        for name in names:
            add_run(runs, known.setdefault(name, len(known)), 1)
        return runs

    def of_runs(self, ids: Iterable[Run]) -> list[Run]:
        """Return runs of ids, which mean the same in all rows, as runs of addresses."""
        runs: list[Run] = []
        pages = self._pages
        for start, length in ids:
            first, end = start, start + length
            while first < end:
                page, low = divmod(first, PAGE)
                step = min(end - first, PAGE - low)
                add_run(runs, pages.setdefault(page, len(pages)) * PAGE + low, step)
                first += step
        return runs


class _Edge(msgspec.Struct, eq=False):
    """Addresses from `first` on, each after the one before, which have the ids from `id` on.

    `odd`  which of them had another one before them at first, bool [length]; None: none
    """

    first: int
    length: int
    id: int
    odd: Bools | None
    children: dict[int, _Edge]


class Numbering:
    """The ids given out so far: a prefix tree of addresses, its edges runs that rise by one.

    Where every address keeps one predecessor, each has one place in the tree; elsewhere the tree
    tells prefixes apart.

    `num_ids`         ids given out: 0 to num_ids - 1
    `num_violations`  references so far to an address that follows another than at first
    """

    def __init__(self, source: str) -> None:
        self.num_ids = 0
        self.num_violations = 0
        self._source = source
        self._root = _Edge(0, 0, 0, None, {})
        self._before = Column(0, np.int32)  # by address: 0, or the one before it at first, + 2

    def renumber(self, prompt: Iterable[Run]) -> Runs:
        """Return a prompt in dense ids, int32 [num_runs, 2]. Raises `TraceError` for too many."""
        edge, at = self._root, 0
        found: list[Run] = []
        for start, count in prompt:
            first, length = start, count
            while length:
                if at == edge.length:
                    edge, at = edge.children.get(first) or self._grow(edge, first, length), 0
                elif first != edge.first + at:
                    _split(edge, at)
                    continue
                step = min(length, edge.length - at)
                if edge.odd is not None:
                    self.num_violations += int(np.count_nonzero(edge.odd[at : at + step]))
                add_run(found, edge.id + at, step)
                first, length, at = first + step, length - step, at + step
        return np.array(found, np.int32).reshape(-1, 2)

    def _grow(self, edge: _Edge, first: int, length: int) -> _Edge:
        """Add a run behind an edge, with new ids."""
        end = first + length
        seen = self._before.upto(end)[first:end]
        before = np.arange(first + 1, end + 1)
        before[0] = edge.first + edge.length + 1  # 1 at the root
        new = seen == 0
        seen[new] = before[new]
        odd = seen != before
        child = _Edge(first, length, self.num_ids, odd if odd.any() else None, {})
        edge.children[first] = child
        self.num_ids += length
        check_room(self._source, self.num_ids)
        return child


def check_room(source: str, num_ids: int) -> None:
    """Raise `TraceError` for more ids than can be given out."""
    if num_ids > MAX_IDS:
        raise TraceError(
            f"{source}: more than {MAX_IDS:,} different blocks; cut the trace in parts"
        )


def _split(edge: _Edge, at: int) -> None:
    odd = None if edge.odd is None else edge.odd[at:]
    rest = _Edge(edge.first + at, edge.length - at, edge.id + at, odd, edge.children)
    edge.length, edge.children = at, {rest.first: rest}

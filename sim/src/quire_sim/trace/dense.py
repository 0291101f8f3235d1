"""Traces whose ids are dense and chained in the file, as quire writes them: read in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

import numpy as np

from quire_sim.columns import Column
from quire_sim.trace.numbering import Run, check_room
from quire_sim.trace.rows import Runs

NO_HEAD = 2**31 - 1
"""Stands behind the last head: no id is as large."""


class DenseIds:
    """The ids seen so far: dense from 0 to `num_ids` - 1, each with one predecessor.

    An id follows the one before it, or is a head. The predecessors of heads are stored, eight bytes a head.
    `_heads` rise; the predecessor of one is the end of a run, 0 at the beginning of prompts.
    """

    def __init__(self, source: str) -> None:
        self.num_ids = 0
        self._source = source
        self._num_heads = 0
        self._heads = Column(NO_HEAD, np.int32)
        self._follows = Column(0, np.int32)

    def runs_of(self, prompts: Sequence[Sequence[Run]]) -> list[Runs] | None:
        """Return the runs of each prompt; None, and nothing changes, where ids are not dense or not chained.

        Raises `TraceError` for too many ids.
        """
        counts = np.fromiter(map(len, prompts), np.int64, len(prompts))
        numbers = list(chain.from_iterable(chain.from_iterable(prompts)))
        try:
            first, length = np.array(numbers, np.int64).reshape(-1, 2).T
        except OverflowError:
            return None
        stops = counts.cumsum()
        begins = np.zeros(len(first), np.bool)
        begins[(stops - counts)[counts > 0]] = True
        end = first + length
        follows = np.where(begins, 0, np.concatenate(([0], end[:-1])))
        reach = np.maximum.accumulate(np.concatenate(([self.num_ids], end)))
        if np.any(first > reach[:-1]) or np.any(first < 0):
            return None
        check_room(self._source, int(reach[-1]))
        is_head = (first == reach[:-1]) & (first != follows)
        num_heads = self._num_heads + int(np.count_nonzero(is_head))
        heads, before = (each.upto(num_heads + 1) for each in (self._heads, self._follows))
        heads[self._num_heads : num_heads] = first[is_head]
        before[self._num_heads : num_heads] = follows[is_head]
        at = heads[: num_heads + 1].searchsorted(first)
        is_head = heads[at] == first
        right = (np.where(is_head, before[at], first) == follows) & (end <= heads[at + is_head])
        if not right.all():
            heads[self._num_heads : num_heads] = NO_HEAD
            return None
        self._num_heads, self.num_ids = num_heads, int(reach[-1])
        begins |= first != follows
        if not begins.all():
            starts = np.flatnonzero(begins)
            first, length = first[starts], np.add.reduceat(length, starts)
            stops = np.concatenate(([0], begins.cumsum()))[stops]
        runs = np.stack((first, length), axis=1).astype(np.int32)
        bounds = [0, *stops.tolist()]
        return [runs[low:high] for low, high in pairwise(bounds)]

    def paths(self) -> Iterator[list[Run]]:
        """Yield a prompt that ends with each head's ids, in their order: who reads them all knows all ids."""
        heads = [0, *self._heads.values[: self._num_heads].tolist()]
        follows = [0, *self._follows.values[: self._num_heads].tolist()]
        starts = np.array(heads)
        for head, stop in zip(heads, [*heads[1:], self.num_ids], strict=True):
            path: list[Run] = []
            end, at = stop, head
            while end:
                number = int(starts.searchsorted(at, side="right")) - 1
                path.append((heads[number], end - heads[number]))
                end = follows[number]
                at = end - 1
            yield path[::-1]

"""The attention work of a step, divided into tasks for threads."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from quire.kernels.attention.runs import Ints, Tables

Shapes = tuple[tuple[int, ...], ...]

MANY = (16, 32, 48, 64)
"""Queries, rows times query heads of one kv head, that stand side by side: the least of these that has room for all."""

FEW = 8
"""Queries up to which they are attended one after another."""
FEW_BESIDE_TILES = 4
"""The same where tiles multiply those side by side."""

MIN_TASK_KEYS = 512
"""Keys of a part below which threads do not divide it."""

ENDLESS = 2**31 - 1
"""Where a part ends that grows with its request: at the last row that reads it."""


class Parts(NamedTuple):
    """Ranges of positions of one table each, and the rows that read them.

    Every row reads each position that it sees once over all parts.

    rows         int64 [n]  the rows of the parts
    tables       int64 [P]  the request whose table it is
    rows_starts  int64 [P]  the first place in `rows`
    num_rows     int64 [P]
    starts       int64 [P]  the first position
    stops        int64 [P]  the end of the positions; of a part that grows, as it is now
    grows        bool [P]
    """

    rows: Ints
    tables: Ints
    rows_starts: Ints
    num_rows: Ints
    starts: Ints
    stops: Ints
    grows: np.typing.NDArray[np.bool_]


class Work(NamedTuple):
    """The tasks of a step, as compiled code reads them.

    block_size
    tables         int32 [R, blocks]
    position       int64 [N]     of each row
    seen_from      int64 [N]     the first position that it sees
    rows           int64 [n]     the rows of the parts, part after part
    tasks          int64 [T, 10] table, first place in `rows`, number of rows, first query, queries
                                 at once (of few, or one of `MANY`), first key, end of keys, first
                                 row of the partial results, first kv head and how many; the
                                 largest task first
    merged         int64 [m]     the rows of partial results, by row of the step
    merged_starts  int64 [N + 1] where those of a row begin in `merged`
    """

    block_size: int
    tables: Tables
    position: Ints
    seen_from: Ints
    rows: Ints
    tasks: Ints
    merged: Ints
    merged_starts: Ints


class SentWork(NamedTuple):
    """The arrays of `Work` and the slots of new rows, as int32 in one device buffer.

    If its arrays have more room than a step needs, padding follows that is never read: tasks without rows, rows
    without parts, and new rows that go nowhere (-1).

    many, few  the tasks of more queries at once than the least of `MANY`, and the others
    """

    flat: torch.Tensor
    tables: torch.Tensor
    position: torch.Tensor
    seen_from: torch.Tensor
    rows: torch.Tensor
    merged: torch.Tensor
    merged_starts: torch.Tensor
    slots: torch.Tensor
    many: torch.Tensor
    few: torch.Tensor

    @classmethod
    def room(cls, shapes: Shapes, device: torch.device) -> "SentWork":
        """Return room for arrays of these shapes."""
        # Each begins at 16 bytes: for other addresses Triton compiles other kernels.
        starts = [0, *accumulate(-(-prod(shape) // 4) * 4 for shape in shapes)]
        flat = torch.empty(starts.pop(), dtype=torch.int32, device=device)
        parts = zip(starts, shapes, strict=True)
        return cls(flat, *(flat[start : start + prod(shape)].view(shape) for start, shape in parts))

    def take(self, arrays: Sequence[Ints | Tables]) -> None:
        """Send the arrays of a step."""
        flat = np.zeros(len(self.flat), np.int32)
        for name, array, there in zip(self._fields[1:], arrays, self[1:], strict=True):
            start = int(there.storage_offset())
            part = flat[start : start + there.numel()].reshape(there.shape)
            if name in ("merged_starts", "slots"):
                part[:] = array[-1] if name == "merged_starts" else -1
            part[tuple(map(slice, array.shape))] = array
        self.flat.copy_(torch.from_numpy(flat))  # pyright: ignore[reportUnknownMemberType]


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the numbers of several ranges, one after another."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def tasks(parts: Parts, group: int, kv_heads: int, num_threads: int, few: int) -> tuple[Ints, Ints]:
    """Return tasks, int64 [T, 10] as in `Work`, and the row of the step of each partial result.

    A part with many queries is divided by these, the last of which stand with as few others as can be; one with few,
    and most of the keys of a step, by its keys, each piece with partial results of its own. One thread attends all kv
    heads of few queries, and reads whole blocks then, where that is a small part of what a thread does.
    """
    queries, keys = parts.num_rows * group, parts.stops - parts.starts
    most = MANY[-1]
    tiles = -(-queries // most)
    before_last = (tiles - 1) * most
    last_tile = np.array(MANY)[np.searchsorted(MANY, queries - before_last)]
    last_tile = np.where(queries > few, last_tile, few)
    work = keys * (before_last + last_tile)
    share = int(work.sum()) * kv_heads // (2 * num_threads) + 1
    pieces = np.minimum(-(-work // (tiles * share)), -(-keys // MIN_TASK_KEYS))
    pieces = np.where(tiles * kv_heads < 2 * num_threads, np.maximum(pieces, 1), 1)
    length = -(-keys // pieces)

    of_piece = np.repeat(np.arange(len(pieces)), pieces)
    piece = _places(pieces)
    start = parts.starts[of_piece] + piece * length[of_piece]
    stop = np.minimum(start + length[of_piece], parts.stops[of_piece])
    last = piece == pieces[of_piece] - 1
    stop = np.where(last & parts.grows[of_piece], ENDLESS, stop)
    num_rows = parts.num_rows[of_piece]
    merged = parts.rows[ranges(parts.rows_starts[of_piece], num_rows)]
    partial = np.cumsum(num_rows) - num_rows

    of_tile = np.repeat(np.arange(len(of_piece)), tiles[of_piece])
    part = of_piece[of_tile]
    tile = _places(tiles[of_piece])
    at_once = np.where(tile < tiles[part] - 1, most, last_tile[part])
    size = at_once * length[part]
    whole = (at_once == few) & (4 * num_threads * size <= size.sum())
    parted = np.where(whole, 1, kv_heads)
    heads = kv_heads // parted
    order = np.argsort(-size * heads, kind="stable")
    of_task = np.repeat(order, parted[order])
    found = np.empty((len(of_task), 10), np.int64)
    of_tiles = (
        *(each[part] for each in (parts.tables, parts.rows_starts, parts.num_rows)),
        *(tile * most, at_once),
        *(each[of_tile] for each in (start, stop, partial)),
    )
    for column, each in enumerate(of_tiles):
        found[:, column] = each[of_task]
    found[:, 8] = _places(parted[order])
    found[:, 9] = heads[of_task]
    return found, merged


def _places(counts: Ints) -> Ints:
    """Return 0, 1, ... below each count, one after another."""
    ends = counts.cumsum()
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)

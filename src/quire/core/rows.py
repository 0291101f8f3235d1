"""Rows: the lengths, block tables and unpublished tokens of all open sequences, as arrays."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from quire.core.blocks import GAP
from quire.core.sparse import SparseGroup
from quire.core.tokens import INT32, TOKEN_BYTES, IntArray
from quire.core.tree import PrefixTree

MIN_EXTENT = 64
"""The shortest extent of a row, in blocks."""

MIN_ARENA = 1 << 16
"""Entries below which the arena never shrinks: 256 KiB per group, of which only what is used takes memory."""


class Rows:
    """Lengths, block tables and unpublished tokens of all open sequences, one row each.

    They are arrays so that a decode step is a few vector operations over the batch. The
    memoryviews beside them read and write single items four times faster than NumPy does.

    The block tables of a group lie in one arena, each in an extent of its own, a power of two
    long, at the same place in every group. Block i of a row is entry `offset[row] + i`, for
    `ends[row] - sizes[row] <= i < ends[row]`. An extent that is given back waits for a row that
    needs one of its size; when the arena is full, or its rows use less than a quarter of it, they
    move together into a new one. So what tables take follows the sequences that are open:

        sum(sizes) + what waits == top <= arena_size
        the arena is the smallest one, or at most four times as large as sum(sizes)

    `computed`, `capacity`  int32 [rows], tokens
    `flat[group]`           int32 [arena], block ids; of a recurrent group [rows], its state, -1 for none
    `offset`, `ends`        int32 [rows], entries of the arena and blocks; `sizes` those of the extent
    `numbers`               int32 [4, rows], these four together
    `tails`                 int32 [rows, block_size], tokens computed that fill no block yet
    `windows`, `states`     the windowed and the recurrent groups; `token_groups` indexes all
                            but the recurrent ones
    `version`, `epoch`      count the calls that changed a length or moved a row, and those that took a sequence away
                            or back, so that a `DecodeBatch` knows when to look
    """

    interrupted = ""

    def __init__(self, tree: PrefixTree, cut_off: Callable[[str, BaseException], None]) -> None:
        self.cut_off = cut_off
        self.tree = tree  # kept alive: sequences read their tokens from it
        self.block_size = tree.block_bytes // TOKEN_BYTES
        num_groups = len(tree.pools)
        self.version = self.epoch = 0
        self.num_rows = 64
        self.unused = list(range(self.num_rows - 1, -1, -1))
        self.windows, self.states = tree.windows, tree.states
        without = {state.index for state in self.states}
        self.token_groups = tuple(g for g in range(num_groups) if g not in without)
        self.numbers = np.zeros((4, self.num_rows), dtype=INT32)
        self.tails = np.zeros((self.num_rows, self.block_size), dtype=INT32)
        self.sizes = [0] * self.num_rows
        sizes = [MIN_ARENA if g in self.token_groups else self.num_rows for g in range(num_groups)]
        self.flat_tables = [np.zeros(size, INT32) for size in sizes]
        self.arena_size = MIN_ARENA
        self.top = 0
        self.waiting: defaultdict[int, list[int]] = defaultdict(list)  # by size, where they start
        self._view()

    @property
    def num_used(self) -> int:
        """Entries of the arena in the extents of rows."""
        return self.top - sum(size * len(starts) for size, starts in self.waiting.items())

    def take(self) -> int:
        """Return an unused row, with both lengths 0, no blocks and no states."""
        if not self.unused:
            self._add_rows()
        row = self.unused.pop()
        for state in self.states:
            self.flat[state.index][row] = GAP
        return row

    def give_back(self, row: int) -> None:
        """Mark a row unused."""
        self.computed[row] = self.capacity[row] = 0
        size = self.sizes[row]
        if size:
            self.waiting[size].append(self.offset[row] + self.ends[row] - size)
            self.sizes[row] = self.ends[row] = 0
            if self.arena_size > MIN_ARENA and 4 * self.num_used < self.arena_size:
                self._rebuild(0)
        self.unused.append(row)
        self.version += 1
        self.epoch += 1

    def standing(self, row: int) -> tuple[SparseGroup, ...]:
        """Return the groups in which the sequence of a row guards the node where it stands.

        A snapshot is guarded until it was copied: then the sequence has a state of its own.
        """
        if not self.states:
            return self.windows
        waits = any(self.flat[state.index][row] == GAP for state in self.states)
        return self.tree.sparse if waits else self.windows

    def widen(self, row: int, num_blocks: int) -> None:
        """Make a row long enough for so many blocks."""
        if num_blocks > self.ends[row]:
            self.place(row, self.ends[row] - self.sizes[row], num_blocks)

    def place(self, row: int, first: int, num_blocks: int) -> None:
        """Give a row an extent for blocks [first, num_blocks), and what stood in the one it had."""
        had, length = self.sizes[row], num_blocks - first
        size = 1 << (length - 1).bit_length() if length > MIN_EXTENT else MIN_EXTENT
        waiting = self.waiting.get(size)
        if not waiting and self.top + size > self.arena_size:
            self._rebuild(size - had)
            waiting = None
        if waiting:
            offset = waiting.pop() - first
        else:
            offset, self.top = self.top - first, self.top + size
        if had:
            self.waiting[had].append(self.offset[row] + self.ends[row] - had)
            self._move(row, self.flat_tables, offset)
            self.version += 1
        self.sizes[row] = size
        self.offset[row] = offset
        self.ends[row] = first + size

    def slots(self, group: int, row: int, start: int, stop: int) -> memoryview[int]:
        """View the table entries [start, stop) of a row, of a recurrent group its state [0, 1).

        Valid until a row is widened or given back.
        """
        base = self.offset[row] if group in self.token_groups else row
        return self.flat[group][base + start : base + stop]

    def tail(self, row: int, num_tokens: int) -> bytes:
        """Return the first unpublished tokens of a row as key bytes."""
        base = row * self.block_size * TOKEN_BYTES
        return self.tail_bytes[base : base + num_tokens * TOKEN_BYTES].tobytes()

    def write_tail(self, row: int, at: int, key: memoryview[int] | bytes) -> None:
        """Write unpublished tokens of a row from index `at` on."""
        base = (row * self.block_size + at) * TOKEN_BYTES
        self.tail_bytes[base : base + len(key)] = key

    def _move(self, row: int, tables: list[IntArray], offset: int) -> None:
        """Copy the extent of a row out of these tables to where it begins `offset` entries from now on."""
        end, had_offset = self.ends[row], self.offset[row]
        start = end - self.sizes[row]
        for group in self.token_groups:
            run = tables[group][had_offset + start : had_offset + end]
            self.flat_tables[group][offset + start : offset + end] = run
        self.offset[row] = offset

    def _rebuild(self, num_more: int) -> None:
        """Move all extents together, to the start of an arena that they and so many entries more fill to a half at most."""
        size = MIN_ARENA
        while size < 2 * (self.num_used + num_more):
            size *= 2
        old = self.flat_tables
        self.flat_tables = [
            np.zeros(size, INT32) if g in self.token_groups else t for g, t in enumerate(old)
        ]
        self.arena_size, self.top = size, 0
        for row, length in enumerate(self.sizes):
            if length:
                self._move(row, old, self.top + length - self.ends[row])
                self.top += length
        self.waiting.clear()
        self.version += 1
        self._view()

    def _add_rows(self) -> None:
        """Double the number of rows."""
        more = self.num_rows
        self.unused[:0] = range(2 * more - 1, more - 1, -1)
        self.numbers = np.hstack((self.numbers, np.zeros_like(self.numbers)))
        self.tails = np.vstack((self.tails, np.zeros_like(self.tails)))
        self.sizes += [0] * more
        for state in self.states:
            table = self.flat_tables[state.index]
            self.flat_tables[state.index] = np.hstack((table, np.zeros_like(table)))
        self.num_rows += more
        self._view()

    def _view(self) -> None:
        self.computed_array, self.capacity_array, self.offset_array, self.ends_array = self.numbers
        views: list[memoryview[int]] = [row.data for row in self.numbers]
        self.computed, self.capacity, self.offset, self.ends = views
        self.flat_tails = self.tails.reshape(-1)
        self.tail_bytes: memoryview[int] = self.flat_tails.data.cast("B")
        self.flat: list[memoryview[int]] = [table.data for table in self.flat_tables]

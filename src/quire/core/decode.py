"""Decode steps: one token for every sequence of a batch, in a few vector operations."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import NamedTuple

import numpy as np

from quire.core.blocks import BlockPool
from quire.core.publish import Publisher
from quire.core.sequence import IntArray, Rows, Sequence
from quire.core.tokens import INT32, TOKEN_BYTES, TokenIds, check_sign, key_of
from quire.errors import CommitError, SequenceError, TokensError


class BlockTables(NamedTuple):
    """Block tables of a batch, int32, in both common shapes; they cover reserved room too.

    `padded`          [n, max_blocks], filled up with the pad value
    `num_blocks`      [n]
    `lengths`         [n], tokens: computed and reserved
    `indptr`          [n + 1]; the blocks of sequence i are indices[indptr[i]:indptr[i + 1]]
    `indices`         [sum(num_blocks)]
    `last_block_len`  [n], tokens in the last block, 1 to block_size (0 without a block)
    """

    padded: IntArray
    num_blocks: IntArray
    lengths: IntArray
    indptr: IntArray
    indices: IntArray
    last_block_len: IntArray


class DecodeBatch:
    """Sequences that decode together. Made by `CacheManager.batch`; stays valid while all of
    them are open. `rows` are their rows, as a slice where they are consecutive.
    """

    __slots__ = ("row_ids", "rows", "sequences", "version")

    def __init__(self, sequences: tuple[Sequence, ...], row_ids: IntArray, version: int) -> None:
        self.sequences = sequences
        self.row_ids = row_ids
        self.version = version
        first, n = int(row_ids[0]) if len(row_ids) else 0, len(row_ids)
        in_order = bool((row_ids == np.arange(first, first + n)).all())
        self.rows: slice | IntArray = slice(first, first + n) if in_order else row_ids

    def __len__(self) -> int:
        return len(self.sequences)

    def __repr__(self) -> str:
        return f"<DecodeBatch of {len(self)} sequences>"


class DecodeSteps:
    """The two halves of a decode step over the arrays of `Rows`."""

    def __init__(
        self,
        rows: Rows,
        pools: tuple[BlockPool, ...],
        publisher: Publisher,
        reserve_one: Callable[[Sequence, int], None],
        make_room: Callable[[int], None],
    ) -> None:
        self._rows = rows
        self._pools = pools
        self._publisher = publisher
        self._reserve_one = reserve_one
        self._make_room = make_room
        self._size = np.int32(rows.block_size)

    def batch(self, seqs: Items[Sequence]) -> DecodeBatch:
        """Make a batch of open sequences whose prompts are computed."""
        sequences = tuple(seqs)
        rows = self._rows
        for seq in sequences:
            if seq.rows is not rows or seq.state != "open":
                raise SequenceError(f"{seq!r} is not an open sequence of this manager")
            if seq.prompt_len > rows.computed[seq.row]:
                msg = (
                    f"{seq!r} has {seq.prompt_len - seq.computed} prompt tokens to compute; "
                    "reserve and commit them before it decodes"
                )
                raise SequenceError(msg)
        row_ids = np.fromiter((seq.row for seq in sequences), INT32, len(sequences))
        if len(np.unique(row_ids)) != len(row_ids):
            raise SequenceError("a sequence stands twice in the batch")
        return DecodeBatch(sequences, row_ids, rows.version)

    def reserve(self, batch: DecodeBatch) -> None:
        """Room for one more token in each, all or nothing."""
        self._check(batch)
        if any(pool.shared for pool in self._pools):
            self._reserve_with_copies(batch)
            return
        rows, size = self._rows, self._size
        computed = rows.computed_array[batch.rows]
        capacity = rows.capacity_array[batch.rows]
        at_edge = computed % size == 0
        np.logical_and(at_edge, computed == capacity, out=at_edge)
        (starved,) = at_edge.nonzero()
        num_new = len(starved)
        if num_new:
            self._make_room(num_new)
            columns = computed[starved] // size
            rows.widen(int(columns.max()) + 1)
            row_ids = batch.row_ids[starved]
            for table, pool in zip(rows.tables, self._pools, strict=True):
                table[row_ids, columns] = pool.allocate(num_new)
        rows.capacity_array[batch.rows] = np.maximum(capacity, computed + 1)

    def commit(self, batch: DecodeBatch, token_ids: TokenIds) -> None:
        """One token of KV in each; blocks that filled up are published."""
        self._check(batch)
        rows, size = self._rows, self._size
        key = key_of(token_ids)
        if len(key) != len(batch) * TOKEN_BYTES:
            msg = f"{len(key) // TOKEN_BYTES} tokens for a batch of {len(batch)}; one for each"
            raise TokensError(msg)
        check_sign(key)
        computed = rows.computed_array[batch.rows]
        capacity = rows.capacity_array[batch.rows]
        if not (computed < capacity).all():
            row = int((computed >= capacity).argmax())
            raise CommitError(f"{batch.sequences[row]!r} has no room reserved for a token")
        if self._publisher.copies_waiting:
            for seq in batch.sequences:
                self._publisher.check_copies(seq)
        tokens = np.frombuffer(key, INT32)
        in_tail = computed % size
        rows.tails[batch.row_ids, in_tail] = tokens
        rows.computed_array[batch.rows] = computed + 1
        (full,) = (in_tail == size - 1).nonzero()
        self._publisher.count(len(batch))
        for index in full.tolist():
            seq = batch.sequences[index]
            self._publisher.publish(seq, memoryview(rows.tail(seq.row, int(size))), 1)

    def _check(self, batch: DecodeBatch) -> None:
        if batch.version == self._rows.version:
            return
        for seq, row in zip(batch.sequences, batch.row_ids, strict=True):
            if seq.state != "open" or seq.row != row:
                raise SequenceError(f"{seq!r} left the batch; make a new one of those still open")
        batch.version = self._rows.version

    def _reserve_with_copies(self, batch: DecodeBatch) -> None:
        """The same where shared blocks are copied first: one by one, all or nothing."""
        needed = [0] * len(self._pools)
        rows, size = self._rows, self._rows.block_size
        shared = [dict(pool.shared) for pool in self._pools]
        for seq in batch.sequences:
            computed = rows.computed[seq.row]
            if rows.capacity[seq.row] > computed:
                continue
            for group, left in enumerate(shared):
                if not computed % size:
                    needed[group] += 1
                    continue
                block = rows.slots(group, seq.row, computed // size, computed // size + 1)[0]
                if left.get(block, 1) > 1:
                    left[block] -= 1
                    needed[group] += 1
        self._make_room(max(needed))
        for seq in batch.sequences:
            self._reserve_one(seq, 1)


def block_tables(rows: Rows, seqs: Items[Sequence], group: int, pad: int) -> BlockTables:
    """Copy the block tables of open sequences out of the rows of one layer group."""
    size = rows.block_size
    row_ids = np.fromiter((seq.row for seq in seqs), INT32, len(seqs))
    lengths = rows.capacity_array[row_ids]
    num_blocks = -(-lengths // size)
    width = int(num_blocks.max()) if len(num_blocks) else 0
    padded = rows.tables[group][row_ids, :width]
    held = np.arange(width, dtype=INT32) < num_blocks[:, None]
    indices = padded[held]
    padded[~held] = pad
    indptr = np.zeros(len(row_ids) + 1, dtype=INT32)
    np.cumsum(num_blocks, out=indptr[1:])
    last_block_len = lengths - np.maximum(num_blocks - 1, 0) * size
    return BlockTables(padded, num_blocks, lengths, indptr, indices, last_block_len)

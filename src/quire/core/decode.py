"""Decode steps: one token for every sequence of a batch, in a few vector operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from operator import add
from typing import NamedTuple, NoReturn

import numpy as np

from quire.core.kernel import Kernel
from quire.core.publish import check_copies, publish_last_blocks
from quire.core.room import make_room
from quire.core.rows import Rows
from quire.core.sequence import Sequence
from quire.core.sparse import sparse_at
from quire.core.take import needs, reserve, stale_slots
from quire.core.tokens import (
    INT32,
    TOKEN_BYTES,
    IndexArray,
    IntArray,
    TokenIds,
    check_sign,
    key_of,
)
from quire.errors import CommitError, ConfigError, SequenceError, TokensError

BLOCKS_AHEAD = 32
"""So many more blocks fit into the extent of every sequence of a batch when one was full."""

NO_BLOCK = -(2**31)
"""Stands in tables where there is no block: no id, and no index that NumPy or torch would take, as -1 is."""


class BlockTables(NamedTuple):
    """Block tables of a batch, int32, in both common shapes; they cover reserved room too.

    `padded`          [n, max_blocks], filled up with the pad value; `NO_BLOCK` unless another is given
    `num_blocks`      [n]
    `lengths`         [n], tokens: computed and reserved
    `indptr`          [n + 1]; the blocks of sequence i are indices[indptr[i]:indptr[i + 1]]
    `indices`         [sum(num_blocks)]; in a windowed group with the pad value behind the window
    `last_block_len`  [n], tokens in the last block, 1 to block_size (0 without a block)
    """

    padded: IntArray
    num_blocks: IntArray
    lengths: IntArray
    indptr: IntArray
    indices: IntArray
    last_block_len: IntArray


class DecodeBatch:
    """Sequences that decode together. Made by `CacheManager.batch`.

    It stays valid while all of them are open. From step to step it knows where each sequence
    stands, and looks again only when `Rows.version` says that another call changed one:

    `next_token`  [n], where in the flat tails the next token goes
    `tail_end`    [n], where in the flat tails the sequence's row ends
    `next_slot`   [n], where in the flat block tables the next block's id goes
    `at_edge`     indices of the sequences whose blocks are all full
    `room`        tokens that every one of them has reserved
    `uneven`      whether some have reserved more, must copy their last block before they write, or were `resumed`
    `blocks_left` blocks that fit into the extent of every one of them beside those it has
    """

    next_token: IndexArray
    next_slot: IndexArray
    at_edge: IndexArray
    version = epoch = -1
    room = blocks_left = 0
    uneven = resumed = False

    def __init__(self, sequences: tuple[Sequence, ...], row_ids: IntArray, owner: Rows) -> None:
        self.owner = owner
        self.seqs = sequences
        self.row_ids = row_ids
        self.tail_end: IndexArray = (row_ids.astype(np.intp) + 1) * owner.block_size
        first, n = int(row_ids[0]) if len(row_ids) else 0, len(row_ids)
        in_order = bool((row_ids == np.arange(first, first + n)).all())
        self.all_rows: slice | IntArray = slice(first, first + n) if in_order else row_ids

    def __len__(self) -> int:
        return len(self.seqs)

    def __repr__(self) -> str:
        return f"<DecodeBatch of {len(self)} sequences>"


def make_batch(kernel: Kernel, seqs: Items[Sequence]) -> DecodeBatch:
    """Make a batch of open sequences whose prompts are computed."""
    try:
        sequences = tuple(seqs)
    except (TypeError, NotImplementedError):  # a memoryview of many dimensions
        raise SequenceError(f"a batch is made of sequences, got {seqs!r}") from None
    rows = kernel.rows
    for seq in sequences:
        if type(seq) is not Sequence or seq.rows is not rows or seq.state != "open":
            raise SequenceError(f"{seq!r} is not an open sequence of this manager")
        if seq.script.key:
            _refuse_prefill(seq)
    row_ids = [seq.row for seq in sequences]
    if len(set(row_ids)) != len(row_ids):
        raise SequenceError("a sequence stands twice in the batch")
    return DecodeBatch(sequences, np.array(row_ids, INT32), rows)


def reserve_step(kernel: Kernel, batch: DecodeBatch) -> None:
    """Room for one more token in each, all or nothing."""
    rows = kernel.rows
    if batch.owner is not rows or batch.version != rows.version:
        _look(kernel, batch)
    if batch.room:
        return
    if batch.uneven:
        _reserve_one_by_one(kernel, batch)
        return
    num_new = len(batch.at_edge)
    if num_new:
        for group in rows.token_groups:
            if kernel.pools[group].num_free < num_new:
                make_room(kernel, needs(kernel, num_new, ()))
        if not batch.blocks_left:
            for seq in batch.seqs:  # for many blocks, so that it is not asked at each step
                rows.widen(seq.row, seq.num_blocks + BLOCKS_AHEAD)
            _look(kernel, batch)
        batch.blocks_left -= 1
        slots = batch.next_slot[batch.at_edge]
        for group in rows.token_groups:
            rows.flat_tables[group][slots] = kernel.pools[group].take(num_new)
        batch.next_slot[batch.at_edge] = slots + 1
    rows.capacity_array[batch.all_rows] += 1
    batch.room = 1
    batch.version = rows.version = rows.version + 1


def commit_step(kernel: Kernel, batch: DecodeBatch, token_ids: TokenIds) -> None:
    """One token of KV in each; blocks that filled up are published."""
    rows = kernel.rows
    if batch.owner is not rows or batch.version != rows.version:
        _look(kernel, batch)
    key = key_of(token_ids)
    if len(key) != len(batch.seqs) * TOKEN_BYTES:
        raise TokensError(f"{len(key) // TOKEN_BYTES} tokens for a batch of {len(batch)}; one each")
    check_sign(key)
    if kernel.copies:
        for seq in batch.seqs:
            check_copies(kernel, seq)
    if not batch.room:
        full = next(seq for seq in batch.seqs if seq.computed == seq.capacity)
        raise CommitError(f"{full!r} has no room reserved for a token; reserve_step first")
    next_token = batch.next_token
    rows.flat_tails[next_token] = np.frombuffer(key, INT32)
    rows.computed_array[batch.all_rows] += 1
    next_token += 1
    full = (next_token == batch.tail_end).nonzero()[0]
    if len(full):
        next_token[full] -= rows.block_size
        indices: list[int] = full.tolist()
        publish_last_blocks(kernel, [batch.seqs[index] for index in indices])
    kernel.counters.computed_tokens += len(batch.seqs)
    batch.at_edge = full
    batch.room -= 1
    batch.version = rows.version = rows.version + 1


def _look(kernel: Kernel, batch: DecodeBatch) -> None:
    """Read where the sequences stand; raise `SequenceError` if one has left."""
    rows = kernel.rows
    if batch.owner is not rows:
        raise SequenceError(f"{batch!r} belongs to another manager")
    if batch.epoch != rows.epoch:
        row_ids: list[int] = batch.row_ids.tolist()
        for seq, row in zip(batch.seqs, row_ids, strict=True):
            if seq.state != "open" or seq.row != row:
                raise SequenceError(f"{seq!r} left the batch; make a new one of those still open")
            if seq.script.key:
                _refuse_prefill(seq)
        batch.resumed = any(seq.pending is not None for seq in batch.seqs)
        batch.epoch = rows.epoch
    computed = rows.computed_array[batch.all_rows]
    capacity = rows.capacity_array[batch.all_rows]
    room = capacity - computed
    in_tail = computed % rows.block_size
    batch.next_token = batch.tail_end - rows.block_size + in_tail
    batch.at_edge = (in_tail == 0).nonzero()[0]
    num_blocks = -(-capacity // rows.block_size)
    batch.next_slot = (rows.offset_array[batch.all_rows] + num_blocks).astype(np.intp)
    left = rows.ends_array[batch.all_rows] - num_blocks
    batch.blocks_left = int(left.min()) if len(left) else 0
    batch.room = int(room.min()) if len(room) else 1
    batch.uneven = batch.resumed or bool((room != batch.room).any())
    if rows.states or any(pool.shared for pool in kernel.pools):
        batch.uneven |= any(stale_slots(kernel, seq) for seq in batch.seqs)
    batch.version = rows.version


def _refuse_prefill(seq: Sequence) -> NoReturn:
    msg = (
        f"{seq!r} has {seq.known_end - seq.computed} tokens of its prompt, or from before "
        "a suspend, to compute; reserve and commit them before it decodes"
    )
    raise SequenceError(msg)


def _reserve_one_by_one(kernel: Kernel, batch: DecodeBatch) -> None:
    """Reserve where sequences differ or share blocks that must be copied first."""
    rows, needed = kernel.rows, [0] * len(kernel.pools)
    starved = [seq for seq in batch.seqs if seq.capacity == seq.computed]
    if len(starved) == 1:  # what it holds itself may make room
        reserve(kernel, starved.pop(), 1)
    copied: Counter[tuple[int, int]] = Counter()
    for seq in starved:
        stale = stale_slots(kernel, seq)
        needed = [*map(add, needed, needs(kernel, int(seq.computed % rows.block_size == 0), stale))]
        copied.update((g, rows.slots(g, seq.row, slot, slot + 1)[0]) for g, slot in stale)
    for (group, block), count in copied.items():
        if kernel.pools[group].shared.get(block) == count:  # the last holder writes in place
            needed[group] -= 1
    make_room(kernel, needed)
    for seq in starved:
        reserve(kernel, seq, 1)
    batch.resumed = False


def block_tables(rows: Rows, seqs: Items[Sequence], group: int, pad: int) -> BlockTables:
    """Copy the block tables of open sequences out of the rows of one layer group."""
    if type(pad) is not int or not -(2**31) <= pad < 2**31:
        raise ConfigError(f"pad must be an int32, got {pad!r}")
    size, window, table = rows.block_size, sparse_at(rows.windows, group), rows.flat_tables[group]
    lengths, starts, num_blocks = extents(rows, seqs, group)
    padded = np.full((len(seqs), int(num_blocks.max(initial=0))), pad, INT32)
    runs = [table[:0]]
    tables = zip(seqs, padded, starts.tolist(), num_blocks.tolist(), strict=True)
    for seq, into, start, count in tables:
        run = into[:count]
        run[:] = table[start : start + count]
        if window is not None:
            run[window.num_sinks : window.first_read(seq.computed)] = pad
        runs.append(run)
    indptr = np.cumsum([0, *num_blocks.tolist()], dtype=INT32)
    last_len = ((lengths - 1) % size + 1) * (num_blocks > 0)
    return BlockTables(padded, num_blocks, lengths, indptr, np.concatenate(runs), last_len)


def extents(rows: Rows, seqs: Items[Sequence], group: int) -> tuple[IntArray, IntArray, IntArray]:
    """Return the capacity, start in the group's flat table and number of blocks of each sequence."""
    for seq in seqs:
        seq.fill()
    row_ids = np.fromiter((seq.row for seq in seqs), INT32, len(seqs))
    lengths = rows.capacity_array[row_ids]
    if group in rows.token_groups:
        return lengths, rows.offset_array[row_ids], -(-lengths // rows.block_size)
    return lengths, row_ids, (rows.flat_tables[group][row_ids] >= 0).astype(INT32)

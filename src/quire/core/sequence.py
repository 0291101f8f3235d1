"""Sequences: running requests, their three lengths and their rows in the block tables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec
import numpy as np

from quire.core.blocks import GAP
from quire.core.groups import check_group
from quire.core.hints import NO_HINT, PENDING, Hint, Session
from quire.core.node import Node
from quire.core.policies import Visit
from quire.core.radix import PrefixTree
from quire.core.scope import MediaTable, Scope
from quire.core.sparse import SparseGroup
from quire.core.states import StateGroup
from quire.core.terms import Terms
from quire.core.tokens import INT32, TOKEN_BYTES, IntArray, Key, array_of
from quire.core.windows import WindowGroup


class Sequence(msgspec.Struct, gc=False, eq=False):
    """One running request: `published <= computed <= capacity`, in tokens.

    The first `published` tokens lie in blocks of the prefix tree, on the path to `node`;
    the rest of the table is the sequence's own. Made by `CacheManager.open` and `fork`;
    all changes go through the manager.

    `number`       of the manager's requests, from 1; 0 for what is restored
    `num_cached`   tokens that `open` (or the last `resume`) found, no compute needed
    `num_foreign`  of these, the last ones that came from elsewhere and were not used here before
    `prompt_len`   tokens of the prompt given at open
    `known`        key bytes of the tokens from `known_start` on that commits must repeat, empty
                   once they are computed: what of the prompt was not cached, and after `resume`
                   what was computed before
    `terms`        on which its blocks are kept, run by run; ends where nothing is published
    `hint`         what its caller foresees of the blocks it stores, `session` whose turn it is
    `visit`        what a policy that watches requests was told of it
    `private_key`  key bytes of full blocks that are not published, by its terms
    `branch`       the length up to which other prompts share its tokens, as known at open
    `unfilled`     blocks at the head of its row that are not read from the tree yet: a fork
                   reads them when its table is first asked for
    `drafts`       parents of the tokens drafted at length `drafted_at`
    `state`        "open", "suspended" or "closed"
    """

    rows: Rows
    row: int
    root: Node
    node: Node
    scope: Scope
    prompt_len: int = 0
    priority: int = 0
    keep_for: float = 0.0
    number: int = 0
    num_cached: int = 0
    num_foreign: int = 0
    known: bytes = b""
    known_start: int = 0
    resume_key: bytes = b""
    raw_prompt: bytes = b""
    terms: Terms | None = None
    private_key: bytes = b""
    branch: int = 0
    unfilled: int = 0
    drafts: tuple[int, ...] = ()
    drafted_at: int = 0
    hint: Hint = NO_HINT
    session: Session | None = None
    visit: Visit | None = None
    state: str = "open"

    @property
    def outlook(self) -> float:
        """The outlook of the nodes that it stores, while it runs."""
        return PENDING if self.hint.reuse == "never" or self.hint.ttl_s is not None else 0.0

    @property
    def published(self) -> int:
        """Tokens in blocks that other requests can find."""
        return self.node.end * self.rows.block_size

    @property
    def computed(self) -> int:
        """Tokens whose KV exists."""
        return self.rows.computed[self.row] if self.state == "open" else 0

    @property
    def capacity(self) -> int:
        """Tokens that have room: computed ones and reserved ones."""
        return self.rows.capacity[self.row] if self.state == "open" else 0

    @property
    def num_blocks(self) -> int:
        """Blocks in the table, reserved ones included."""
        return -(-self.capacity // self.rows.block_size)

    @property
    def tokens(self) -> IntArray:
        """The computed tokens, int32, as a copy (those to recompute while suspended)."""
        key = self.token_bytes() if self.state == "open" else self.resume_key
        return array_of(self.without_media(key, 0))

    @property
    def known_end(self) -> int:
        """Tokens that are known in advance."""
        return self.known_start + len(self.known) // TOKEN_BYTES

    def without_media(self, key: bytes, start: int) -> bytes:
        """Return key bytes from token `start` on with placeholder tokens in place of media."""
        if not self.raw_prompt:
            return key
        tokens = array_of(key)
        in_media = np.flatnonzero(tokens < 0)
        tokens[in_media] = array_of(self.raw_prompt)[in_media + start]
        return tokens.tobytes()

    def token_bytes(self) -> bytes:
        """Return the computed tokens as key bytes: the path's, then the unpublished ones."""
        tail = self.rows.tail(self.row, self.computed % self.rows.block_size)
        return b"".join([*(node.key for node in self.node.path()), self.private_key, tail])

    def block_ids(self, group: int = 0) -> IntArray:
        """Return the block table of one layer group, int32 [num_blocks], as a copy.

        In a windowed group -1 stands for the blocks behind the window of the next token. A
        recurrent group has one block, the state that the sequence works on, from its first
        `reserve` on, and none before.
        """
        rows = self.rows
        check_group(group, len(rows.tables))
        rows.fill(self)
        table = rows.tables[group][self.row, : self.num_blocks].copy()
        for window in rows.windows:
            if window.index == group:
                table[window.num_sinks : window.first_of(self.computed)] = GAP
        for state in rows.states:
            if state.index == group:
                has_state = self.state == "open" and rows.tables[group][self.row, 0] != GAP
                return rows.tables[group][self.row, : int(has_state)].copy()
        return table

    def priority_at(self, start: int) -> int:
        """Return the priority of the blocks from `start` on."""
        return self.priority if self.terms is None else self.terms.at(start).priority

    def keep_for_at(self, start: int) -> float:
        """Return the retention of the blocks from `start` on, in seconds."""
        return self.keep_for if self.terms is None else self.terms.at(start).keep_for

    def __repr__(self) -> str:
        if self.state != "open":
            return f"<Sequence {self.state}>"
        return (
            f"<Sequence {self.published} published <= {self.computed} computed <= "
            f"{self.capacity} capacity, {self.num_cached} were cached>"
        )


class Observer(Protocol):
    """Told of every request of a manager, and never asked: a recorder, a meter.

    It must not raise: `open` and `close` do not expect it.
    """

    def opened(self, seq: Sequence, key: Key, media: MediaTable) -> None:
        """A request was opened; `key` is its prompt, valid during this call."""

    def closed(self, seq: Sequence) -> None:
        """A request or a fork is about to be closed."""


class Rows:
    """Lengths, block tables and unpublished tokens of all open sequences, one row each.

    They are arrays so that a decode step is a few vector operations over the batch. The
    memoryviews beside them read and write single items four times faster than NumPy does.

    `computed`, `capacity`  int32 [rows], tokens
    `tables[group]`         int32 [rows, width], block ids; `flat[group]` the same, 1-D
    `tails`                 int32 [rows, block_size], tokens computed that fill no block yet
    `windows`, `states`     the windowed and the recurrent groups; `token_groups` indexes all
                            but the recurrent ones, whose tables have one entry, -1 for none
    `version`, `epoch`      count the calls that changed a length, and those that took a
                            sequence away or back, so that a `DecodeBatch` knows when to look
    """

    def __init__(self, block_size: int, num_groups: int, tree: PrefixTree) -> None:
        self.tree = tree  # kept alive: sequences read their tokens from it
        self.block_size = block_size
        self.version = self.epoch = 0
        self.width = 64
        self.num_rows = 64
        self.unused = list(range(self.num_rows - 1, -1, -1))
        self.computed_array = np.zeros(self.num_rows, dtype=INT32)
        self.capacity_array = np.zeros(self.num_rows, dtype=INT32)
        self.tails = np.zeros((self.num_rows, block_size), dtype=INT32)
        self.tables = [np.zeros((self.num_rows, self.width), INT32) for _ in range(num_groups)]
        self.windows = tuple(each for each in tree.sparse if isinstance(each, WindowGroup))
        self.states = tuple(each for each in tree.sparse if isinstance(each, StateGroup))
        without = {state.index for state in self.states}
        self.token_groups = tuple(g for g in range(num_groups) if g not in without)
        self._view()

    def take(self) -> int:
        """Return an unused row, with both lengths 0 and no states."""
        if not self.unused:
            self._resize(2 * self.num_rows, self.width)
        row = self.unused.pop()
        for state in self.states:
            self.flat[state.index][row * self.width] = GAP
        return row

    def give_back(self, row: int) -> None:
        """Mark a row unused."""
        self.computed[row] = self.capacity[row] = 0
        self.unused.append(row)
        self.version += 1
        self.epoch += 1

    def standing(self, seq: Sequence) -> tuple[SparseGroup, ...]:
        """Return the groups in which a sequence guards the node where it stands.

        A snapshot is guarded until it was copied: then the sequence has a state of its own.
        """
        if not self.states:
            return self.windows
        waits = any(self.flat[state.index][seq.row * self.width] == GAP for state in self.states)
        return self.tree.sparse if waits else self.windows

    def widen(self, num_blocks: int) -> None:
        """Make every row long enough for so many blocks."""
        width = self.width
        while width < num_blocks:
            width *= 2
        if width > self.width:
            self._resize(self.num_rows, width)

    def slots(self, group: int, row: int, start: int, stop: int) -> memoryview[int]:
        """View the table entries [start, stop) of a row; valid until the next `widen`."""
        base = row * self.width
        return self.flat[group][base + start : base + stop]

    def fill(self, seq: Sequence) -> None:
        """Read the head of a fork's row from the tree, unless it was read before."""
        if not seq.unfilled:
            return
        for node in seq.node.path():
            stop = min(node.end, seq.unfilled)
            for group in self.token_groups if node.start < stop else ():
                ids = node.blocks[group][: stop - node.start]
                self.slots(group, seq.row, node.start, stop)[:] = memoryview(ids)
        seq.unfilled = 0

    def tail(self, row: int, num_tokens: int) -> bytes:
        """Return the first unpublished tokens of a row as key bytes."""
        base = row * self.block_size * TOKEN_BYTES
        return self.tail_bytes[base : base + num_tokens * TOKEN_BYTES].tobytes()

    def write_tail(self, row: int, at: int, key: memoryview[int] | bytes) -> None:
        """Write unpublished tokens of a row from index `at` on."""
        base = (row * self.block_size + at) * TOKEN_BYTES
        self.tail_bytes[base : base + len(key)] = key

    def _resize(self, num_rows: int, width: int) -> None:
        self.unused[:0] = range(num_rows - 1, self.num_rows - 1, -1)
        self.computed_array = _grown(self.computed_array, num_rows)
        self.capacity_array = _grown(self.capacity_array, num_rows)
        self.tails = _grown(self.tails, num_rows, self.block_size)
        self.tables = [_grown(table, num_rows, width) for table in self.tables]
        self.num_rows, self.width = num_rows, width
        self.version += 1
        self._view()

    def _view(self) -> None:
        self.computed: memoryview[int] = self.computed_array.data
        self.capacity: memoryview[int] = self.capacity_array.data
        self.flat_tails = self.tails.reshape(-1)
        self.tail_bytes: memoryview[int] = self.flat_tails.data.cast("B")
        self.flat_tables = [table.reshape(-1) for table in self.tables]
        self.flat: list[memoryview[int]] = [table.data for table in self.flat_tables]


def _grown(array: IntArray, *shape: int) -> IntArray:
    """Return a larger copy, zero where it is new (and untouched, so that it costs no memory)."""
    grown = np.zeros(shape, dtype=INT32)
    grown[tuple(slice(size) for size in array.shape)] = array
    return grown


def media_numbers(tree: PrefixTree, sequences: Iterable[Sequence]) -> set[int]:
    """Return the media numbers that stand in the keys of blocks and sequences."""
    keys: list[bytes | bytearray] = [node.key for node in tree.nodes()]
    for seq in sequences:
        keys += [seq.known, seq.token_bytes() if seq.state == "open" else seq.resume_key]
    live: set[int] = set()
    for key in keys:
        tokens = np.frombuffer(key, INT32)
        live.update(np.unique(tokens[tokens < 0]).tolist())
    return live

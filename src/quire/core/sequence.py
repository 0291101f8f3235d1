"""Sequences: running requests and their three lengths."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import msgspec
import numpy as np

from quire.core.blocks import GAP
from quire.core.groups import check_group
from quire.core.node import Node
from quire.core.policy import ENDLESS
from quire.core.rows import Rows
from quire.core.sparse import sparse_at
from quire.core.stats import Missed
from quire.core.terms import ORDINARY, Terms
from quire.core.tokens import TOKEN_BYTES, IntArray, array_of
from quire.interrupts import mutating
from quire.scope import Scope


class Script(msgspec.Struct, gc=False, eq=False):
    """The tokens that a sequence's commits must repeat, and the facts of its prompt.

    `prompt_len`  tokens of the prompt given at open
    `start`       tokens before what is known
    `key`         key bytes of the known tokens from `start` on: the part of the prompt that was not cached and,
                  after `resume`, what was computed before; empty once computed. While suspended: all tokens
    `raw`         the prompt's key bytes with the placeholders of its media, if it has any
    `media`       the numbers of these media, of each of which the sequence is a user
    `branch`      the length up to which other prompts share its tokens, as known at open
    """

    prompt_len: int
    start: int = 0
    key: bytes = b""
    raw: bytes = b""
    media: dict[int, int] = {}
    branch: int = 0


class Pending(msgspec.Struct, eq=False):
    """State of a sequence until its next successful `reserve`.

    `missed`  the miss to count then: why the hit ends or, for a resumed sequence, the tokens to recompute
    `source`  the one-block run below its node that the end of its table still reads, and that is copied
              then; None for a hit of whole blocks
    """

    missed: Missed
    source: Node | None = None


class Sequence(msgspec.Struct, eq=False):
    """One running request: `published <= computed <= capacity`, in tokens.

    The first `published` tokens lie in blocks of the prefix tree, on the path to `node`;
    the rest of the table is the sequence's own. Made by `CacheManager.open` and `fork`;
    all changes go through the manager. The garbage collector sees it, unlike nodes: a manager that
    is dropped while requests run goes with them.

    `number`       of the manager's requests, from 1, given as it is counted; 0 for what is restored
    `num_cached`   tokens that `open` (or the last `resume`) found, no compute needed
    `script`       what commits must repeat, and what is known of the prompt
    `terms`        on which the blocks that it stores are kept
    `store_until`  blocks from this one on are not published
    `private_key`  key bytes of full blocks that are not published, from `store_until` on
    `unfilled`     blocks at the head of its row that are not read from the tree yet: a fork
                   reads them when its table is first asked for
    `pending`      its state until its next successful `reserve`; None after that
    `state`        "open", "suspended" or "closed"
    """

    rows: Rows
    row: int
    root: Node
    node: Node
    scope: Scope
    script: Script
    terms: Terms = ORDINARY
    number: int = 0
    num_cached: int = 0
    store_until: int = ENDLESS
    private_key: bytes = b""
    unfilled: int = 0
    pending: Pending | None = None
    state: str = "open"

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt given at open."""
        return self.script.prompt_len

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
        key = self.token_bytes() if self.state == "open" else self.script.key
        return array_of(self.without_media(key, 0))

    @property
    def known_end(self) -> int:
        """Tokens that are known in advance."""
        return self.script.start + len(self.script.key) // TOKEN_BYTES

    def without_media(self, key: bytes, start: int) -> bytes:
        """Return key bytes from token `start` on with placeholder tokens in place of media."""
        if not self.script.raw:
            return key
        tokens = array_of(key)
        in_media = np.flatnonzero(tokens < 0)
        tokens[in_media] = array_of(self.script.raw)[in_media + start]
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
        check_group(group, len(rows.flat))
        self.fill()
        if group not in rows.token_groups:
            state = np.array(rows.slots(group, self.row, 0, int(self.state == "open")))
            return state[state != GAP]
        table = np.array(rows.slots(group, self.row, 0, self.num_blocks))
        window = sparse_at(rows.windows, group)
        if window is not None:
            table[window.num_sinks : window.first_read(self.computed)] = GAP
        return table

    def fill(self) -> None:
        """Read the head of a fork's row from the tree, unless it was read before."""
        if self.unfilled:
            self._fill()

    @mutating
    def _fill(self) -> None:
        self.rows.place(self.row, 0, self.rows.ends[self.row])
        self.read_table(self.rows.token_groups, self.unfilled)
        self.unfilled = 0

    def read_table(self, groups: Items[int], stop: int) -> None:
        """Read the table of these groups from the tree, up to block `stop` and as far as it is published."""
        for node in self.node.path():
            start, end = node.start, min(node.end, stop)
            for group in groups if start < end else ():
                ids = node.blocks[group][: end - start]
                self.rows.slots(group, self.row, start, end)[:] = memoryview(ids)

    @property
    def cut_off(self) -> Callable[[str, BaseException], None]:
        """The manager's handler for an exception, other than a refusal, that leaves a call of this sequence."""
        return self.rows.cut_off

    def __repr__(self) -> str:
        if self.rows.interrupted:
            return "<Sequence of before a reset>"
        if self.state != "open":
            return f"<Sequence {self.state}>"
        return (
            f"<Sequence {self.published} published <= {self.computed} computed <= "
            f"{self.capacity} capacity, {self.num_cached} were cached>"
        )

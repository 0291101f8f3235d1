"""Drafts: speculated tokens in the room of a sequence, as a tree, of which one path is accepted.

A chain needs no handle: `reserve` room for it, `commit` what is accepted, `truncate` the rest.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from operator import index
from typing import NamedTuple, SupportsIndex

from quire.config import check_count
from quire.core import publish, take
from quire.core.manager import CacheManager
from quire.core.rows import Rows
from quire.core.sequence import Drafted, Sequence
from quire.core.tokens import TOKEN_BYTES, TokenIds, key_of
from quire.errors import DraftError
from quire.interrupts import mutating
from quire.ops.rollback import go_back


class TokenMove(NamedTuple):
    """The KV of one token, to be copied to another place of the same group, in all its layers."""

    group: int
    src_block: int
    src_offset: int
    dst_block: int
    dst_offset: int


class Draft:
    """Tokens drafted behind a sequence: draft i follows draft `parents[i]`, or the sequence for -1.

    Draft i is written to token position `seq.computed + i`. They wait until `accept`, or until the
    sequence goes on without them: `truncate`, `suspend`, `close`, or a commit.
    """

    def __init__(
        self, manager: CacheManager, seq: Sequence, parents: Items[int], drafted: Drafted
    ) -> None:
        self.seq = seq
        self.parents = tuple(parents)
        self._manager = manager
        self._drafted = drafted

    @property
    def is_waiting(self) -> bool:
        """Whether a path can still be accepted."""
        kernel, seq = self._manager.kernel, self.seq
        waits = kernel.drafts.get(seq.row) is self._drafted
        return waits and self._drafted.computed == kernel.rows.computed[seq.row]

    def accept(self, path: Items[int], token_ids: TokenIds) -> list[TokenMove]:
        """Commit the drafts of a path, each one's parent before it, and drop the others.

        Returns the copies that bring the KV of accepted tokens together: do them at once,
        every source read before any destination is written. A recurrent state has gone on to
        the end of the draft: bring it back to the accepted length before the planned copies
        are done. Raises `DraftError` and what `commit` raises.
        """
        return _accept(self._manager, self, path, token_ids)


@mutating
def draft(manager: CacheManager, seq: Sequence, parents: Items[int] | int) -> Draft:
    """Reserve room for drafted tokens: a tree by its parents, or a chain by its length.

    Raises `DraftError`, `OutOfBlocks`, `ConfigError`, `SequenceError`.
    """
    manager.check_open(seq)
    tree = _check_parents(manager.kernel.rows, seq, parents)
    take.reserve(manager.kernel, seq, len(tree))
    drafted = manager.kernel.drafts[seq.row] = Drafted(seq.computed, len(tree))
    return Draft(manager, seq, tree, drafted)


@mutating
def _accept(
    manager: CacheManager, draft: Draft, path: Items[int], token_ids: TokenIds
) -> list[TokenMove]:
    kernel, seq = manager.kernel, draft.seq
    manager.check_open(seq)
    key = key_of(token_ids)
    steps = _check_path(draft, path, len(key) // TOKEN_BYTES)
    key = publish.checked(kernel, seq, key)
    planned = _moves(kernel.rows, seq, steps)
    if steps:
        publish.commit(kernel, seq, key)
    go_back(kernel, seq, seq.computed)
    return planned


def _check_parents(rows: Rows, seq: Sequence, parents: Items[int] | int) -> Items[int]:
    """Return the parents of a draft, -1 for those that follow the sequence.

    Raises `DraftError` for anything but a tree in which parents stand before their children.
    """
    if rows.capacity[seq.row] > rows.computed[seq.row]:
        room = rows.capacity[seq.row] - rows.computed[seq.row]
        msg = f"{room} tokens are reserved already; truncate(manager, seq, seq.computed) before a draft"
        raise DraftError(msg)
    if type(parents) is int and parents > 0:
        return range(-1, check_count("a draft", parents) - 1)
    if not isinstance(parents, tuple | list) or not parents:
        msg = f"a draft is a number of tokens, or a list of their parents, got {parents!r}"
        raise DraftError(msg)
    tree: list[int] = []
    for at, parent in enumerate(parents):
        try:
            is_before = -1 <= index(parent) < at
        except TypeError:
            is_before = False
        if not is_before:
            msg = f"draft {at} has the parent {parent!r}; a parent is a draft before it, or -1"
            raise DraftError(msg)
        tree.append(index(parent))
    if rows.states and tree != list(range(-1, len(tree) - 1)):
        msg = (
            "a draft tree needs one state per branch, and a recurrent group has one per sequence; "
            "draft a chain, or fork the sequence for each branch"
        )
        raise DraftError(msg)
    return tree


def _check_path(draft: Draft, path: Items[int], num_tokens: int) -> list[int]:
    """Return an accepted path as a list; raise `DraftError` if it was not drafted."""
    seq, parents = draft.seq, draft.parents
    if not draft.is_waiting:
        msg = f"{seq!r} has no draft at its {seq.computed} computed tokens; call draft first"
        raise DraftError(msg)
    if not isinstance(path, tuple | list):
        raise DraftError(f"a path is a list of draft indices, got {path!r}")
    before = -1
    for at in path:
        known = isinstance(at, SupportsIndex) and 0 <= index(at) < len(parents)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not known or parents[index(at)] != before:
            msg = (
                f"accepted draft {at!r} does not follow {before} in the draft "
                f"{list(parents)} (parents, -1 for the sequence itself)"
            )
            raise DraftError(msg)
        before = index(at)
    if len(path) != num_tokens:
        raise DraftError(f"{num_tokens} tokens for a path of {len(path)} drafts; one for each")
    return [index(at) for at in path]


def _moves(rows: Rows, seq: Sequence, path: list[int]) -> list[TokenMove]:
    """Return the copies that bring the accepted drafts to consecutive positions."""
    computed, size = rows.computed[seq.row], rows.block_size
    planned: list[TokenMove] = []
    for group in rows.token_groups:
        table = rows.slots(group, seq.row, 0, -(-rows.capacity[seq.row] // size))
        for to, at in enumerate(path):
            if to != at:
                src, src_offset = divmod(computed + at, size)
                dst, dst_offset = divmod(computed + to, size)
                planned.append(TokenMove(group, table[src], src_offset, table[dst], dst_offset))
    return planned

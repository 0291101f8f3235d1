"""Drafts: speculated tokens in the room of a sequence, and which of them are accepted."""

from __future__ import annotations

from collections.abc import Sequence as Items
from operator import index
from typing import NamedTuple, SupportsIndex

from quire0.core.rows import Rows
from quire0.core.sequence import Sequence
from quire.errors import DraftError


class TokenMove(NamedTuple):
    """Copy the KV of one token to another place of the same group, in all its layers."""

    group: int
    src_block: int
    src_offset: int
    dst_block: int
    dst_offset: int


def check_parents(rows: Rows, seq: Sequence, parents: Items[int] | int) -> list[int]:
    """Return the parents of a draft, -1 for those that follow the sequence.

    Raises `DraftError` for anything but a tree in which parents stand before their children.
    """
    if rows.capacity[seq.row] > rows.computed[seq.row]:
        room = rows.capacity[seq.row] - rows.computed[seq.row]
        msg = f"{room} tokens are reserved already; truncate(seq, seq.computed) before a draft"
        raise DraftError(msg)
    if type(parents) is int and parents > 0:
        return list(range(-1, parents - 1))
    if not isinstance(parents, tuple | list) or not parents:
        msg = f"a draft is a number of tokens, or a list of their parents, got {parents!r}"
        raise DraftError(msg)
    tree: list[int] = []
    for at, parent in enumerate(parents):
        if not isinstance(parent, SupportsIndex) or not -1 <= index(parent) < at:  # pyright: ignore[reportUnnecessaryIsInstance]
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


def drafted(rows: Rows, seq: Sequence) -> bool:
    """Whether drafts wait to be accepted, at the length that the sequence has now."""
    computed = rows.computed[seq.row]
    return (
        len(seq.drafts) > 0
        and seq.drafted_at == computed
        and rows.capacity[seq.row] >= computed + len(seq.drafts)
    )


def check_settled(rows: Rows, seq: Sequence, what: str) -> None:
    """Raise `DraftError` where drafts wait and a state of a recurrent group may have gone on with them."""
    if rows.states and drafted(rows, seq):
        msg = (
            f"{what} of a sequence with {len(seq.drafts)} drafts: the state of a recurrent group has gone "
            f"on with them and is not that of its {rows.computed[seq.row]} tokens; accept first, or "
            "truncate(seq, seq.computed)"
        )
        raise DraftError(msg)


def check_path(rows: Rows, seq: Sequence, path: Items[int], num_tokens: int) -> list[int]:
    """Return an accepted path as a list; raise `DraftError` if it was not drafted."""
    parents, computed = seq.drafts, rows.computed[seq.row]
    if not drafted(rows, seq):
        msg = f"{seq!r} has no draft at its {computed} computed tokens; call draft first"
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


def moves(rows: Rows, seq: Sequence, path: list[int]) -> list[TokenMove]:
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

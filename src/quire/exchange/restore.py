"""Restoring: a prefix whose bytes come from elsewhere enters the tree as if it had been computed.

prompt           |== matched: its tokens are in the tree ==|== not in the tree ==|
full group        b  b  b  b  b  b  b  b  b  b  b  b  b  b   +  +  +  +  +
sliding group     .  .  .  .  b  b  b  .  .  .  .  .  .  .   .  .  .  +  +        + brought
recurrent group                     *                                    +        . a gap
                                    accepted                             end

A request could start at `accepted`. Brought back is what a hit at `end` needs beside what is there;
whatever else the sparse groups lack becomes a gap, which no lookup passes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Self

import numpy as np

from quire.core import publish
from quire.core.blocks import GAP
from quire.core.give import let_go
from quire.core.groups import as_int
from quire.core.interrupts import mutating
from quire.core.manager import NO_SCOPE, CacheManager
from quire.core.media import MediaItem
from quire.core.node import Match, Node, Terms
from quire.core.room import make_room
from quire.core.scope import Scope
from quire.core.sequence import Script, Sequence
from quire.core.tokens import TOKEN_BYTES, Key, TokenIds, check_sign, key_of
from quire.errors import ConfigError, CopyError, InvariantError, OutOfBlocks, SequenceError
from quire.exchange.resident import held_places, required_blocks, room_beside

if TYPE_CHECKING:
    import numpy.typing as npt

    Places = npt.NDArray[np.bool_]

Brought = Mapping[int, Items[int]]
"""Per layer group, rising: which blocks of a prefix come back. Number i of a recurrent group is the
state after block i."""


class Restore:
    """Blocks given out for a prefix that comes back: write them, `commit`, and leave the `with` block.

    `blocks[group]`  ids, one for each place in what was asked for

    Nothing is findable before `commit`. Without one the blocks go back. Used once. While it is open
    no block is moved: `compact` and a `resize` that shrinks are refused.
    """

    def __init__(
        self, blocks: dict[int, list[int]], commit: Callable[[], None], close: Callable[[], None]
    ) -> None:
        self.blocks = blocks
        self._commit = commit
        self._close: Callable[[], None] | None = close

    def commit(self) -> None:
        """Declare that all bytes are in place; a request finds the prefix from now on."""
        if self._close is None:
            raise SequenceError("this restore was closed; begin another one")
        self._commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._close is not None:
            self._close()
            self._close = None


@mutating
def restore(
    manager: CacheManager,
    tokens: TokenIds,
    end: int,
    brought: Brought,
    scope: Scope | None = None,
    *,
    media: Items[MediaItem] = (),
) -> Restore:
    """Give out blocks for the parts of a prompt's first `end` blocks that come back.

    `brought` is what is not here of what a hit of so many blocks needs, and may name more. All or nothing: raises `OutOfBlocks`, `CopyError` while
    copies wait to be taken, `ConfigError` where a hit would lack something or a block is here
    already, and what `probe` raises.
    """
    root, key = manager.read(key_of(tokens), scope, media)
    end, brought = as_int("end", end), _as_places(brought)
    num_bytes = end * manager.kernel.tree.block_bytes
    if not 0 < num_bytes <= len(key):
        raise ConfigError(
            f"{end} blocks of {manager.block_size} of a prompt of {len(key) // TOKEN_BYTES} tokens; "
            "restore at least one, and what the prompt has"
        )
    key = key[:num_bytes]
    match = manager.kernel.tree.match(root, key, len(key))
    accepted = manager.kernel.lookup.accepted(match).num_bytes // manager.kernel.tree.block_bytes
    _check_brought(manager, match, (accepted, end), brought)
    if manager.kernel.copies:
        raise CopyError("planned copies wait; call take_copies() and do them before a restore")
    held = tuple(held_places(manager, match, group) for group in range(len(manager.pools)))
    manager.kernel.pins.release_expired()
    needed = [len(brought.get(group, ())) for group in range(len(manager.pools))]
    for state in manager.kernel.rows.states:
        needed[state.index] = 1
    room = room_beside(manager, match, accepted, held)
    for pool, wanted, available in zip(manager.pools, needed, room, strict=True):
        if wanted > available:
            what = f"restoring {end} blocks leaves room for {available} blocks"
            raise pool.shortage(what, wanted, "restore less, or close sequences")
    if media:
        key = manager.kernel.tree.media.encode(key_of(tokens), media)[:num_bytes]
    else:
        check_sign(key[match.num_bytes :])
    return _begin(manager, match, key, scope, (accepted, needed, brought))


@mutating
def hold(manager: CacheManager, seq: Sequence) -> Callable[[], None]:
    """Keep what an open sequence has published where it is, until what this returns is called, once.

    Nothing of it is evicted meanwhile, even when the sequence is closed, except in groups that
    are not full attention, and no block is moved: `compact` and a `resize` that shrinks are refused.
    Raises `SequenceError`.
    """
    manager.check_open(seq)
    anchor, name = seq.node, object()
    _lock_path(manager, anchor)
    manager.kernel.anchors[id(name)] = anchor

    return partial(_release, manager, name)


@mutating
def _release(manager: CacheManager, name: object) -> None:
    if not manager.interrupted and id(name) in manager.kernel.anchors:
        _unlock_path(manager, manager.kernel.anchors.pop(id(name)))


def _lock_path(manager: CacheManager, anchor: Node) -> None:
    manager.kernel.tree.lock_path(anchor)
    manager.kernel.tree.stand(anchor, manager.kernel.tree.sparse)


def _unlock_path(manager: CacheManager, anchor: Node) -> None:
    manager.kernel.tree.leave(anchor, manager.kernel.tree.sparse)
    manager.kernel.tree.unlock_path(anchor)


def _begin(
    manager: CacheManager,
    match: Match,
    key: Key,
    scope: Scope | None,
    wanted: tuple[int, list[int], Brought],
) -> Restore:
    accepted, needed, brought = wanted
    tree, rows = manager.kernel.tree, manager.kernel.rows
    root = manager.kernel.tree.root(scope or NO_SCOPE)
    if match.node.parent is None:
        match.node = root
    anchor = tree.node_at(match)
    _lock_path(manager, anchor)
    end = len(key) // tree.block_bytes
    size = manager.block_size
    seq = Sequence(rows, rows.take(), root, root, scope or NO_SCOPE, Script(end * size))
    if len(manager.kernel.tree.media):
        seq.script.media = manager.kernel.tree.media.hold(key)
    _stand_at(manager, seq, anchor, accepted)
    if anchor.mark is not None:  # not above its parent, and its parent's owner's
        seq.terms = Terms(min(anchor.mark.priority, 0), owner=anchor.mark.owner)
    manager.sequences[id(seq)] = seq
    root.locks += 1
    manager.kernel.anchors[id(seq)] = anchor
    try:
        make_room(manager.kernel, needed)
    except OutOfBlocks:
        _end_restore(manager, seq, anchor)
        raise
    rows.widen(seq.row, end)
    start = seq.node.end
    blocks: dict[int, list[int]] = {}
    for group in rows.token_groups:
        places = array("i", brought.get(group, ()))
        ids = blocks[group] = tree.pools[group].take(len(places)).tolist()
        row = rows.slots(group, seq.row, start, end)
        row[:] = memoryview(array("i", [GAP]) * (end - start))
        for place, block in zip(places, ids, strict=True):
            row[place - start] = block
    if start and rows.states:
        tree.leave(seq.node, rows.states)
    for state in rows.states:
        (block,) = state.pool.take(1)
        rows.flat[state.index][seq.row] = block
        blocks[state.index] = [block] if brought.get(state.index) else []
    rows.capacity[seq.row] = end * manager.block_size
    rows.version += 1
    return Restore(
        blocks,
        partial(_commit_restored, manager, seq, anchor, key[start * tree.block_bytes :], blocks),
        partial(_end_restore, manager, seq, anchor),
    )


def _stand_at(manager: CacheManager, seq: Sequence, anchor: Node, end: int) -> None:
    """Put a sequence at a boundary of a locked path, as `open` does, without counting a use."""
    tree, rows, node = manager.kernel.tree, manager.kernel.rows, anchor
    while node.parent is not None and node.start >= end:
        node = node.parent
    if node.end > end:
        node = tree.split(node, end - node.start)
    seq.node = node
    rows.widen(seq.row, end + 1)
    for each in node.path():
        tree.lock(each)
        for group in rows.token_groups:
            rows.slots(group, seq.row, each.start, each.end)[:] = memoryview(each.blocks[group])
    tree.stand(node, tree.sparse)
    rows.computed[seq.row] = rows.capacity[seq.row] = end * manager.block_size
    seq.num_cached = seq.script.start = end * manager.block_size


@mutating
def _commit_restored(
    manager: CacheManager, seq: Sequence, anchor: Node, key: Key, blocks: dict[int, list[int]]
) -> None:
    rows, row = manager.kernel.rows, seq.row
    if seq.rows is not rows:
        raise SequenceError("this restore was begun before a reset; begin another one")
    if seq.node.end == seq.prompt_len // manager.block_size:
        raise SequenceError("this restore was committed already")
    publish.restore(manager.kernel, seq, key, len(key) // manager.kernel.tree.block_bytes)
    if seq.node.end < anchor.end:
        raise InvariantError(f"{anchor!r} left the tree while it was locked")
    for state in rows.states:
        slot = rows.flat[state.index]
        if blocks[state.index] and state.block_at(seq.node, seq.node.end - 1) == GAP:
            state.keep(seq.node, slot[row], passing=False)
            slot[row] = GAP
    if rows.states and any(rows.flat[s.index][row] == GAP for s in rows.states):
        manager.kernel.tree.stand(seq.node, rows.states)
    rows.version += 1


@mutating
def _end_restore(manager: CacheManager, seq: Sequence, anchor: Node) -> None:
    if manager.interrupted or manager.kernel.anchors.pop(id(seq), None) is None:
        return  # all was given up
    tree, rows = manager.kernel.tree, manager.kernel.rows
    start = seq.node.end
    for group in rows.token_groups:
        ids = [b for b in rows.slots(group, seq.row, start, seq.num_blocks) if b != GAP]
        tree.pools[group].give_back(memoryview(array("i", ids)))
    rows.capacity[seq.row] = start * manager.block_size
    let_go(manager.kernel, seq, manager.kernel.now())
    _unlock_path(manager, anchor)
    seq.state = "closed"
    manager.kernel.tree.media.release(seq.script.media)
    seq.root.locks -= 1
    del manager.sequences[id(seq)]


# -- what is there ---------------------------------------------------------------------


def _as_places(brought: Brought) -> dict[int, list[int]]:
    """Return what comes back in plain integers; raise `ConfigError` unless it names blocks by group."""
    try:
        return {index(group): [index(at) for at in places] for group, places in brought.items()}
    except (AttributeError, TypeError):
        msg = "what comes back is a map of layer groups to blocks, {0: [3, 4]} for instance"
        raise ConfigError(f"{msg}; got {brought!r}") from None


def _check_brought(
    manager: CacheManager, match: Match, ends: tuple[int, int], brought: Brought
) -> None:
    """Raise `ConfigError` unless what comes back is missing here, and a hit then lacks nothing."""
    accepted, end = ends
    if accepted >= end:
        raise ConfigError(f"a request finds {accepted} blocks already; {end} restore nothing")
    unknown = [group for group in brought if not 0 <= group < len(manager.pools)]
    if unknown:
        raise ConfigError(f"layer group {unknown[0]}; there are 0 to {len(manager.pools) - 1}")
    for group in range(len(manager.pools)):
        places, held = (
            list(brought.get(group, ())),
            np.flatnonzero(held_places(manager, match, group)),
        )
        wanted = required_blocks(manager, group, end)
        rising = all(one < two for one, two in pairwise(places))
        if places and not (rising and accepted <= places[0] and places[-1] < end):
            raise ConfigError(
                f"blocks {places[:8]} of group {group}; those that come back rise, and lie "
                f"from {accepted}, which a request finds, to {end - 1}"
            )
        here = set(held.tolist())
        twice = [at for at in places if at in here]
        if twice:
            raise ConfigError(f"block {twice[0]} of group {group} is here already")
        given = here.union(places)
        lacks = [at for at in wanted if at not in given]
        if lacks:
            raise ConfigError(
                f"a hit of {end} blocks needs block {lacks[0]} of group {group}, which is "
                "neither here nor brought"
            )
        recurrent = any(state.index == group for state in manager.kernel.rows.states)
        if places and recurrent and places != wanted:
            raise ConfigError(
                f"of recurrent group {group} only the state at the end comes back, {wanted}"
            )

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
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from operator import gt, index
from typing import Self

import numpy as np

from quire.config import as_int
from quire.core.blocks import GAP
from quire.core.give import forget, let_go
from quire.core.holds import Hold
from quire.core.kernel import Kernel
from quire.core.manager import NO_SCOPE, CacheManager
from quire.core.node import Match
from quire.core.publish import enter
from quire.core.room import make_room
from quire.core.sequence import Script, Sequence
from quire.core.terms import Terms
from quire.core.tokens import (
    TOKEN_BYTES,
    BoolArray,
    Key,
    TokenIds,
    check_sign,
    key_of,
)
from quire.errors import ConfigError, CopyError, InvariantError, OutOfBlocks, SequenceError
from quire.exchange.residency import held_places, required_blocks, room_beside
from quire.interrupts import mutating
from quire.media import MediaItem
from quire.scope import Scope

Brought = Mapping[int, Items[int]]
"""Per layer group, rising: which blocks of a prefix come back. Number i of a recurrent group is the
state after block i."""


class Restore:
    """Blocks given out for a prefix that comes back: write them, `commit`, and leave the `with` block.

    `blocks[group]`  ids, one for each place in what was asked for

    Nothing is findable before `commit`. Without one the blocks go back. Used once. While it is open
    no block is moved: a `resize` that shrinks is refused.
    """

    def __init__(
        self,
        manager: CacheManager,
        seq: Sequence,
        kept: Hold,
        key: Key,
        blocks: dict[int, list[int]],
    ) -> None:
        self.blocks = blocks
        self.cut_off = manager.cut_off
        self._manager = manager
        self._seq = seq
        self._kept = kept
        self._key = key
        self._open = True

    @mutating
    def commit(self) -> None:
        """Declare that all bytes are in place; a request finds the prefix from now on."""
        if not self._open:
            raise SequenceError("this restore was closed; begin another one")
        seq, kernel = self._seq, self._manager.kernel
        if seq.rows is not kernel.rows:
            raise SequenceError("this restore was begun before a reset; begin another one")
        if seq.published == seq.prompt_len:
            raise SequenceError("this restore was committed already")
        _publish(kernel, seq, self._key)
        if seq.node.end < self._kept.node.end:
            raise InvariantError(f"{self._kept.node!r} left the tree while it was locked")
        self._keep_states(kernel)
        kernel.rows.version += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._close()
            self._open = False

    @mutating
    def _close(self) -> None:
        manager = self._manager
        if (
            not manager.interrupted and id(self._kept) in manager.kernel.holds.all
        ):  # else all was given up
            _end(manager.kernel, self._seq, self._kept)

    def _keep_states(self, kernel: Kernel) -> None:
        """Keep the states that came back as snapshots at the end of the prefix."""
        rows, node, row = kernel.rows, self._seq.node, self._seq.row
        for state in rows.states:
            slot = rows.flat[state.index]
            if self.blocks[state.index] and state.block_at(node, node.end - 1) == GAP:
                state.keep(node, slot[row], passing=False)
                slot[row] = GAP
        if any(rows.flat[state.index][row] == GAP for state in rows.states):
            kernel.tree.stand(node, rows.states)


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
    root, key = manager.read_whole(tokens, scope, media)
    end, brought = as_int("end", end), _as_places(brought)
    num_bytes = end * manager.kernel.tree.block_bytes
    if not 0 < num_bytes <= len(key):
        raise ConfigError(
            f"{end} blocks of {manager.block_size} of a prompt of {len(key) // TOKEN_BYTES} tokens; "
            "restore at least one, and what the prompt has"
        )
    key = key[:num_bytes]
    match = manager.kernel.tree.match(root, key, len(key))
    accepted = manager.kernel.lookup.lowered(match).num_blocks
    held = tuple(held_places(manager, match, group) for group in range(len(manager.pools)))
    _check_brought(manager, (accepted, end), brought, held)
    if manager.kernel.copies:
        raise CopyError("planned copies wait; call take_copies() and do them before a restore")
    needed = [len(brought.get(group, ())) for group in range(len(manager.pools))]
    for state in manager.kernel.rows.states:
        needed[state.index] = 1
    room = room_beside(manager, match, accepted, held)
    if any(map(gt, needed, room)):
        expired = Counter(each.node for each in manager.kernel.holds.expired())
        room = room_beside(manager, match, accepted, held, expired)
    for pool, wanted, available in zip(manager.pools, needed, room, strict=True):
        if wanted > available:
            what = f"restoring {end} blocks leaves room for {available} blocks"
            raise pool.shortage(what, wanted, "restore less, or close sequences")
    manager.kernel.holds.let_go_expired()
    if media:
        key = manager.kernel.tree.media.encode(key_of(tokens), media)[:num_bytes]
    else:
        check_sign(key[match.num_blocks * manager.kernel.tree.block_bytes :])
    return _begin(manager, match, key, scope, (accepted, needed, brought))


@mutating
def hold(manager: CacheManager, seq: Sequence) -> Callable[[], None]:
    """Keep what an open sequence has published where it is, until what this returns is called, once.

    Nothing of it is evicted meanwhile, even when the sequence is closed, except in groups that
    are not full attention, and no block is moved: a `resize` that shrinks is refused.
    Raises `SequenceError`.
    """
    manager.check_open(seq)
    made = Hold(seq.node)
    manager.kernel.holds.add(made)
    return partial(_release, manager, made)


@mutating
def _release(manager: CacheManager, made: Hold) -> None:
    if not manager.interrupted:  # else all was given up
        manager.kernel.holds.let_go(made)


def _begin(
    manager: CacheManager,
    match: Match,
    key: Key,
    scope: Scope | None,
    wanted: tuple[int, list[int], Brought],
) -> Restore:
    """Lock what matches, put a sequence at the accepted boundary below it, and give it the blocks."""
    start, needed, brought = wanted
    kernel, tree, rows = manager.kernel, manager.kernel.tree, manager.kernel.rows
    root = tree.root(scope or NO_SCOPE)
    if match.node.parent is None:
        match.node = root
    anchor = tree.cut(match.last, match.num_blocks)
    kept = Hold(anchor)
    kernel.holds.add(kept)
    node = anchor.holding(start - 1)
    if node.end > start:
        node = tree.split(node, start - node.start)
    end, size = len(key) // tree.block_bytes, manager.block_size
    seq = Sequence(rows, rows.take(), root, node, scope or NO_SCOPE, Script(end * size))
    seq.num_cached = seq.script.start = start * size
    seq.unfilled = start
    if len(tree.media):
        seq.script.media = dict.fromkeys(tree.media.counts(key), 1)
        tree.media.use(seq.script.media)
    if anchor.mark is not None:  # not above its parent, and its parent's owner's
        seq.terms = Terms(min(anchor.mark.priority, 0), owner=anchor.mark.owner)
    rows.place(seq.row, start, end)
    rows.computed[seq.row] = rows.capacity[seq.row] = start * size
    tree.hold(node, tree.sparse)
    manager.sequences[id(seq)] = seq
    root.locks += 1
    try:
        make_room(kernel, needed)
    except OutOfBlocks:
        _end(kernel, seq, kept)
        raise
    blocks = _give_out(kernel, seq, brought)
    return Restore(manager, seq, kept, key[start * tree.block_bytes :], blocks)


def _give_out(kernel: Kernel, seq: Sequence, brought: Brought) -> dict[int, list[int]]:
    """Take the blocks that come back, and a state of each recurrent group; the rest of the table is gaps."""
    rows, start, end = kernel.rows, seq.node.end, seq.prompt_len // kernel.rows.block_size
    blocks: dict[int, list[int]] = {}
    for group in rows.token_groups:
        places = brought.get(group, ())
        ids = blocks[group] = kernel.pools[group].take(len(places)).tolist()
        table = rows.slots(group, seq.row, start, end)
        table[:] = memoryview(array("i", [GAP]) * (end - start))
        for place, block in zip(places, ids, strict=True):
            table[place - start] = block
    if rows.states:
        kernel.tree.leave(seq.node, rows.states)  # it works on states of its own from here
    for state in rows.states:
        (block,) = state.pool.take(1)
        rows.flat[state.index][seq.row] = block
        blocks[state.index] = [block] if brought.get(state.index) else []
    rows.capacity[seq.row] = seq.prompt_len
    rows.version += 1
    return blocks


def _publish(kernel: Kernel, seq: Sequence, key: Key) -> None:
    """Enter the restored blocks into the tree; blocks missing from sparse tables become gaps."""
    kernel.rows.computed[seq.row] = seq.script.start = seq.prompt_len
    num_new = enter(kernel, seq, key, len(key) // kernel.tree.block_bytes)
    for window in kernel.rows.windows if num_new else ():
        window.find_gaps(seq.node, num_new)
    kernel.counters.restored_blocks += num_new


def _end(kernel: Kernel, seq: Sequence, kept: Hold) -> None:
    """Give back uncommitted blocks, and all locks."""
    rows, start = kernel.rows, seq.node.end
    for group in rows.token_groups:
        table = rows.slots(group, seq.row, start, seq.num_blocks)
        kernel.pools[group].drop_hold(table)
    rows.capacity[seq.row] = seq.published
    let_go(kernel, seq)
    kernel.holds.let_go(kept)
    forget(kernel, seq)


# -- what may be asked for -------------------------------------------------------------


def _as_places(brought: Brought) -> dict[int, list[int]]:
    """Return what comes back in plain integers; raise `ConfigError` unless it names blocks by group."""
    try:
        return {index(group): [index(at) for at in places] for group, places in brought.items()}
    except (AttributeError, TypeError):
        msg = "what comes back is a map of layer groups to blocks, {0: [3, 4]} for instance"
        raise ConfigError(f"{msg}; got {brought!r}") from None


def _check_brought(
    manager: CacheManager, ends: tuple[int, int], brought: Brought, held: Items[BoolArray]
) -> None:
    """Raise `ConfigError` unless what comes back is missing here, and a hit then lacks nothing."""
    accepted, end = ends
    if accepted >= end:
        raise ConfigError(f"a request finds {accepted} blocks already; {end} restore nothing")
    unknown = [group for group in brought if not 0 <= group < len(held)]
    if unknown:
        raise ConfigError(f"layer group {unknown[0]}; there are 0 to {len(held) - 1}")
    recurrent = {state.index for state in manager.kernel.rows.states}
    for group, there in enumerate(held):
        places, here = list(brought.get(group, ())), set(np.flatnonzero(there).tolist())
        wanted = required_blocks(manager, group, end)
        rising = places == sorted(set(places))
        if places and not (rising and accepted <= places[0] and places[-1] < end):
            raise ConfigError(
                f"blocks {places[:8]} of group {group}; those that come back rise, and lie "
                f"from {accepted}, which a request finds, to {end - 1}"
            )
        if twice := here.intersection(places):
            raise ConfigError(f"block {min(twice)} of group {group} is here already")
        if lacks := set(wanted) - here - set(places):
            raise ConfigError(
                f"a hit of {end} blocks needs block {min(lacks)} of group {group}, which is "
                "neither here nor brought"
            )
        if places and group in recurrent and places != wanted:
            raise ConfigError(
                f"of recurrent group {group} only the state at the end comes back, {wanted}"
            )

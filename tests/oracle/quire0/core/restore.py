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
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from quire0.core.blocks import GAP
from quire0.core.hashing import block_hashes
from quire0.core.hints import set_outlooks
from quire0.core.interrupts import mutating
from quire0.core.node import Match, Node
from quire0.core.requests import Requests
from quire0.core.scope import MediaItem, Scope
from quire0.core.sequence import Sequence
from quire0.core.sparse import Standing, SparseGroup
from quire0.core.store import NO_SCOPE
from quire0.core.tokens import TOKEN_BYTES, Key, TokenIds, check_sign, key_of
from quire0.core.windows import WindowGroup
from quire.errors import ConfigError, CopyError, InvariantError, OutOfBlocks, SequenceError

if TYPE_CHECKING:
    import numpy.typing as npt

    Places = npt.NDArray[np.bool_]

Brought = Mapping[int, Items[int]]
"""Per layer group, rising: which blocks of a prefix come back. Number i of a recurrent group is the
state after block i."""


class Residency(msgspec.Struct, frozen=True):
    """What a manager holds of a prompt, and what it could take of it.

    `matched`   blocks whose tokens are in the tree
    `accepted`  blocks that a request would find
    `held`      per layer group, bool [matched]: which of these blocks (or states after them) are
                there
    `room`      per layer group, blocks that could be had beside what is found; never too many
    `digests`   names of all whole blocks of the prompt, see `block_hashes`
    """

    matched: int
    accepted: int
    held: tuple[Places, ...]
    room: tuple[int, ...]
    digests: list[bytes]


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


class Restores(Requests):
    """Prefixes that come back, beside the requests that are computed."""

    def residency(
        self, tokens: TokenIds, scope: Scope | None = None, media: Items[MediaItem] = ()
    ) -> Residency:
        """Return what is here of a prompt, at least one token of it left to compute. Changes nothing.

        Raises what `probe` raises.
        """
        key, root = self._read(key_of(tokens), scope, media)
        size = self.block_size
        limit = (len(key) // TOKEN_BYTES - 1) // size * self.tree.block_bytes
        match = self.tree.match(root, key, limit)
        matched = match.num_bytes // self.tree.block_bytes
        accepted = self.lookup.accepted(match).num_bytes // self.tree.block_bytes
        held = tuple(self._held(match, group) for group in range(len(self.groups)))
        if media:
            named = self.digests.named(scope or NO_SCOPE)
            digests = block_hashes(tokens, size, named, tuple(media))
        else:
            digests = self._digests(match, key, scope)
        return Residency(matched, accepted, held, self._room_beside(match, accepted, held), digests)

    def required(self, group: int, end: int) -> list[int]:
        """Return which blocks (or states) of a group a hit of `end` blocks needs, rising."""
        for sparse in self.tree.sparse:
            if sparse.index == group:
                return required(sparse, end)
        return list(range(end))

    @mutating
    def restore(
        self,
        tokens: TokenIds,
        end: int,
        brought: Brought,
        scope: Scope | None = None,
        media: Items[MediaItem] = (),
    ) -> Restore:
        """Give out blocks for the parts of a prompt's first `end` blocks that come back.

        `brought` is what is not here of what a hit of so many blocks needs, and may name more. All or nothing: raises `OutOfBlocks`, `CopyError` while
        copies wait to be taken, `ConfigError` where a hit would lack something or a block is here
        already, and what `probe` raises.
        """
        key, root = self._read(key_of(tokens), scope, media)
        num_bytes = end * self.tree.block_bytes
        if not 0 < num_bytes <= len(key):
            raise ConfigError(
                f"{end} blocks of {self.block_size} of a prompt of {len(key) // TOKEN_BYTES} tokens; "
                "restore at least one, and what the prompt has"
            )
        key = key[:num_bytes]
        match = self.tree.match(root, key, len(key))
        accepted = self.lookup.accepted(match).num_bytes // self.tree.block_bytes
        self._check_brought(match, (accepted, end), brought)
        if self.copies:
            raise CopyError("planned copies wait; call take_copies() and do them before a restore")
        held = tuple(self._held(match, group) for group in range(len(self.groups)))
        self.pins.release_expired()
        needed = [len(brought.get(group, ())) for group in range(len(self.groups))]
        for state in self.rows.states:
            needed[state.index] = 1
        room = self._room_beside(match, accepted, held)
        for pool, wanted, available in zip(self.groups, needed, room, strict=True):
            if wanted > available:
                what = f"restoring {end} blocks leaves room for {available} blocks"
                raise pool.shortage(what, wanted, "restore less, or close sequences")
        if media:
            key = self.media.encode(key_of(tokens), media)[:num_bytes]
        else:
            check_sign(key[match.num_bytes :])
        return self._begin(match, key, scope, accepted, (needed, brought))

    @mutating
    def hold(self, seq: Sequence) -> Callable[[], None]:
        """Keep what an open sequence has published where it is, until what this returns is called, once.

        Nothing of it is evicted meanwhile, even when the sequence is closed, except in groups that
        are not full attention, and no block is moved: `compact` and a `resize` that shrinks are refused.
        Raises `SequenceError`.
        """
        self._check_open(seq)
        anchor, name = seq.node, object()
        self._lock_path(anchor)
        self.anchors[id(name)] = anchor

        return partial(self._release, name)

    @mutating
    def _release(self, name: object) -> None:
        if not self.interrupted and id(name) in self.anchors:
            self._unlock_path(self.anchors.pop(id(name)))

    def _lock_path(self, anchor: Node) -> None:
        for node in anchor.path():
            self.tree.lock(node)
        self.tree.stand(anchor, self.tree.sparse)

    def _unlock_path(self, anchor: Node) -> None:
        self.tree.leave(anchor, self.tree.sparse)
        node = anchor
        while node.parent is not None:
            self.tree.unlock(node)
            node = node.parent  # after: the policy may have cut the node

    def _begin(
        self,
        match: Match,
        key: Key,
        scope: Scope | None,
        accepted: int,
        wanted: tuple[list[int], Brought],
    ) -> Restore:
        needed, brought = wanted
        tree, rows = self.tree, self.rows
        root = self.tree.root(scope or NO_SCOPE)
        if match.node.parent is None:
            match.node = root
        anchor = tree.cut(match)
        self._lock_path(anchor)
        end = len(key) // tree.block_bytes
        seq = Sequence(rows, rows.take(), root, root, scope or NO_SCOPE, end * self.block_size)
        if len(self.media):
            seq.media = self.media.hold(key)
        self._stand_at(seq, anchor, accepted)
        seq.priority = min(anchor.priority, 0) if anchor.parent is not None else 0
        self._adopt(seq)
        self.anchors[id(seq)] = anchor
        try:
            self._make_room(needed)
        except OutOfBlocks:
            self._end_restore(seq, anchor)
            raise
        rows.widen(seq.row, end)
        start = seq.node.end
        blocks: dict[int, list[int]] = {}
        for group in rows.token_groups:
            places = array("i", brought.get(group, ()))
            ids = blocks[group] = tree.pools[group].allocate(len(places)).tolist()
            row = rows.slots(group, seq.row, start, end)
            row[:] = memoryview(array("i", [GAP]) * (end - start))
            for place, block in zip(places, ids, strict=True):
                row[place - start] = block
        if start and rows.states:
            tree.leave(seq.node, rows.states)
        for state in rows.states:
            (block,) = state.pool.allocate(1)
            rows.flat[state.index][seq.row] = block
            blocks[state.index] = [block] if brought.get(state.index) else []
        rows.capacity[seq.row] = end * self.block_size
        rows.version += 1
        return Restore(
            blocks,
            partial(self._commit_restored, seq, anchor, key[start * tree.block_bytes :], blocks),
            partial(self._end_restore, seq, anchor),
        )

    def _stand_at(self, seq: Sequence, anchor: Node, end: int) -> None:
        """Put a sequence at a boundary of a locked path, as `open` does, without counting a use."""
        tree, rows, node = self.tree, self.rows, anchor
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
        rows.computed[seq.row] = rows.capacity[seq.row] = end * self.block_size
        seq.num_cached = seq.known_start = end * self.block_size

    @mutating
    def _commit_restored(
        self, seq: Sequence, anchor: Node, key: Key, blocks: dict[int, list[int]]
    ) -> None:
        rows, row = self.rows, seq.row
        if seq.rows is not rows:
            raise SequenceError("this restore was begun before a reset; begin another one")
        if seq.node.end == seq.prompt_len // self.block_size:
            raise SequenceError("this restore was committed already")
        self._publisher.restore(seq, key, len(key) // self.tree.block_bytes)
        if seq.node.end < anchor.end:
            raise InvariantError(f"{anchor!r} left the tree while it was locked")
        for state in rows.states:
            slot = rows.flat[state.index]
            if blocks[state.index] and state.snapshot(seq.node, seq.node.end) is None:
                state.keep(seq.node, slot[row], passing=False)
                slot[row] = GAP
        if rows.states and any(rows.flat[s.index][row] == GAP for s in rows.states):
            self.tree.stand(seq.node, rows.states)
        rows.version += 1

    @mutating
    def _end_restore(self, seq: Sequence, anchor: Node) -> None:
        if self.interrupted or self.anchors.pop(id(seq), None) is None:
            return  # all was given up
        tree, rows = self.tree, self.rows
        start = seq.node.end
        for group in rows.token_groups:
            ids = [b for b in rows.slots(group, seq.row, start, seq.num_blocks) if b != GAP]
            tree.pools[group].free(memoryview(array("i", ids)))
        rows.capacity[seq.row] = start * self.block_size
        now = self._visit_time()
        if self.sessions.hinted:
            set_outlooks(seq, seq.node, now)
        self._rollback.let_go(seq, now)
        self._unlock_path(anchor)
        seq.state = "closed"
        self.media.release(seq.media)
        seq.root.locks -= 1
        del self.sequences[id(seq)]

    # -- what is there ---------------------------------------------------------------------

    def _nodes(self, match: Match) -> list[tuple[Node, int]]:
        """Return the nodes of a match and how many blocks of each belong to it."""
        nodes = [(node, node.num_blocks) for node in match.node.path()]
        if match.edge is not None and match.into:
            nodes.append((match.edge, match.into // self.tree.block_bytes))
        return nodes

    def _held(self, match: Match, group: int) -> Places:
        matched = match.num_bytes // self.tree.block_bytes
        sparse = next((each for each in self.tree.sparse if each.index == group), None)
        held = np.full(matched, sparse is None)
        for node, num_blocks in self._nodes(match) if sparse is not None else ():
            start = node.start
            if isinstance(sparse, WindowGroup):
                ids = np.array(node.blocks[group][:num_blocks], dtype=np.int32)
                held[start : start + num_blocks] = ids != GAP
            elif sparse is not None:
                ends = [end for end, _ in sparse.held(node) if end <= start + num_blocks]
                held[np.array(ends, dtype=np.int64) - 1] = True
        return held

    def _room_beside(
        self, match: Match, accepted: int, held: tuple[Places, ...]
    ) -> tuple[int, ...]:
        """Return what each group can give once the match is referenced."""
        room = [pool.num_available for pool in self.groups]
        taken = sum(num_blocks for node, num_blocks in self._nodes(match) if not node.locks)
        for group, _ in self.tree.full:
            room[group] -= taken
        matched = len(held[0])
        last = match.edge if match.edge is not None and match.into else match.node
        standing = []
        for end in sorted({accepted, matched} - {0}):
            node = last
            while node.parent is not None and end <= node.start:
                node = node.parent
            standing.append(Standing({}, {}, node, end))
        for sparse in self.tree.sparse:
            needed = {*required(sparse, accepted), *required(sparse, len(held[sparse.index]))}
            there = sum(bool(held[sparse.index][at]) for at in sorted(needed))
            room[sparse.index] -= min(there, sum(map(sparse.would_guard, standing)))
        return tuple(max(num_blocks, 0) for num_blocks in room)

    def _digests(self, match: Match, key: Key, scope: Scope | None) -> list[bytes]:
        digests: list[bytes] = []
        for node, num_blocks in self._nodes(match):
            digests += self.digests.of(node)[:num_blocks]
        parent = digests[-1] if digests else self.digests.root(scope or NO_SCOPE)
        return digests + self.digests.beyond(parent, key[match.num_bytes :])

    def _check_brought(self, match: Match, ends: tuple[int, int], brought: Brought) -> None:
        """Raise `ConfigError` unless what comes back is missing here, and a hit then lacks nothing."""
        accepted, end = ends
        if accepted >= end:
            raise ConfigError(f"a request finds {accepted} blocks already; {end} restore nothing")
        unknown = [group for group in brought if not 0 <= group < len(self.groups)]
        if unknown:
            raise ConfigError(f"layer group {unknown[0]}; there are 0 to {len(self.groups) - 1}")
        for group in range(len(self.groups)):
            places, held = list(brought.get(group, ())), np.flatnonzero(self._held(match, group))
            required = self.required(group, end)
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
            lacks = [at for at in required if at not in given]
            if lacks:
                raise ConfigError(
                    f"a hit of {end} blocks needs block {lacks[0]} of group {group}, which is "
                    "neither here nor brought"
                )
            recurrent = any(state.index == group for state in self.rows.states)
            if places and recurrent and places != required:
                raise ConfigError(
                    f"of recurrent group {group} only the state at the end comes back, {required}"
                )


def required(group: SparseGroup, end: int) -> list[int]:
    """Return which blocks (or states) a hit of `end` blocks needs of a sparse group, rising."""
    if not end:
        return []
    if isinstance(group, WindowGroup):
        first = group.first(end)
        return [*range(min(group.num_sinks, first, end)), *range(first, end)]
    return [end - 1]

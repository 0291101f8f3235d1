"""Residency: the blocks of a prompt in a manager, those that a hit needs, and the room for them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

import msgspec
import numpy as np

from quire.config import check_count
from quire.core.groups import check_group
from quire.core.manager import NO_SCOPE, CacheManager
from quire.core.node import Match, Node
from quire.core.room import room_left
from quire.core.sparse import Standing, sparse_at
from quire.core.tokens import TOKEN_BYTES, BoolArray, Key, TokenIds
from quire.exchange.digests import Digests
from quire.exchange.hashing import block_hashes
from quire.media import MediaItem
from quire.scope import Scope

NOTHING: Mapping[Node, int] = {}


class Residency(msgspec.Struct, frozen=True):
    """The blocks of a prompt that a manager holds, and the room it has for the rest.

    `matched`   blocks whose tokens are in the tree
    `accepted`  blocks that a request would find
    `held`      per layer group, bool [matched]: which of these blocks (or states after them) are
                there
    `room`      per layer group, blocks that could be had beside the found ones; never too many
    `digests`   names of all whole blocks of the prompt, see `block_hashes`
    """

    matched: int
    accepted: int
    held: tuple[BoolArray, ...]
    room: tuple[int, ...]
    digests: list[bytes]


def residency(
    manager: CacheManager,
    tokens: TokenIds,
    scope: Scope | None = None,
    media: Items[MediaItem] = (),
) -> Residency:
    """Return the residency of a prompt, at least one token of which is left to compute. Changes nothing.

    Raises what `probe` raises.
    """
    root, key = manager.read_whole(tokens, scope, media)
    size = manager.block_size
    limit = (len(key) // TOKEN_BYTES - 1) // size * manager.kernel.tree.block_bytes
    match = manager.kernel.tree.match(root, key, limit)
    matched = match.num_blocks
    accepted = manager.kernel.lookup.lowered(match).num_blocks
    held = tuple(held_places(manager, match, group) for group in range(len(manager.pools)))
    known = manager.kernel.watchers.find(Digests)
    if media or known is None:
        named = known.named(scope or NO_SCOPE) if known is not None else scope
        digests = block_hashes(tokens, size, named, tuple(media))
    else:
        digests = _digests(manager, known, match, key, scope)
    return Residency(matched, accepted, held, room_beside(manager, match, accepted, held), digests)


def required_blocks(manager: CacheManager, group: int, end: int) -> list[int]:
    """Return which blocks (or states) of a group a hit of `end` blocks needs, rising. Raises `ConfigError`."""
    check_group(group, len(manager.pools))
    if type(end) is int and end == 0:
        return []
    end = check_count("end", end)
    sparse = sparse_at(manager.kernel.tree.sparse, group)
    return sparse.required(end) if sparse is not None else list(range(end))


def held_places(manager: CacheManager, match: Match, group: int) -> BoolArray:
    """Return which of a match's blocks (or states after them) a group holds, bool [matched]."""
    sparse = sparse_at(manager.kernel.tree.sparse, group)
    if sparse is None:
        return np.full(match.num_blocks, fill_value=True)
    held = np.full(match.num_blocks, fill_value=False)
    for node, _ in match.nodes():
        ends = [end for end, _ in sparse.held(node) if end <= match.num_blocks]
        held[np.array(ends, dtype=np.int64) - 1] = True
    return held


def room_beside(
    manager: CacheManager,
    match: Match,
    accepted: int,
    held: tuple[BoolArray, ...],
    gone: Mapping[Node, int] = NOTHING,
) -> tuple[int, ...]:
    """Return what each group can give once the match is referenced, and stood at where it ends and at `accepted`.

    Of a sparse group, that takes what both need and is there, or, where others hold some of it already, less. `gone`:
    so many holds at some nodes count as let go.
    """
    before = room_left(manager.kernel, None, gone)
    room = room_left(manager.kernel, match, gone)
    for sparse in manager.kernel.tree.sparse:
        index = sparse.index
        needed = {*sparse.required(accepted), *sparse.required(match.num_blocks)}
        taken = sum(bool(held[index][at]) for at in sorted(needed))
        if not gone:
            more = before[index] - room[index]
            if 0 < accepted < match.num_blocks:
                node = match.last.holding(accepted - 1)
                more += sparse.would_guard(Standing({}, {}, node, accepted))
            taken = min(taken, more)
        room[index] = before[index] - taken
    return tuple(max(num_blocks, 0) for num_blocks in room)


def _digests(
    manager: CacheManager, known: Digests, match: Match, key: Key, scope: Scope | None
) -> list[bytes]:
    digests: list[bytes] = []
    for node, num_blocks in match.nodes():
        digests += known.of(node)[:num_blocks]
    parent = digests[-1] if digests else known.root(scope or NO_SCOPE)
    return digests + known.beyond(parent, key[match.num_blocks * manager.kernel.tree.block_bytes :])

"""Memory: how full the groups are, and capacity between groups."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import msgspec
import numpy as np

from quire.config import check_count
from quire.core.blocks import GAP, BlockCopy, BlockPool
from quire.core.groups import check_group
from quire.core.manager import CacheManager
from quire.core.room import let_go_expired, make_room
from quire.core.sparse import sparse_at
from quire.core.tokens import BoolArray, IntArray
from quire.errors import ConfigError, CopyError
from quire.interrupts import mutating
from quire.ops.pins import all_pins, check_pins


class Usage(msgspec.Struct, frozen=True):
    """The occupancy of one layer group, in blocks unless the name says otherwise.

    free + active + cached == num_blocks
    """

    num_blocks: int
    free: int
    active: int
    cached: int

    @property
    def utilisation(self) -> float:
        """Share of the blocks that are held, cached ones included, 0 to 1."""
        return 1 - self.free / self.num_blocks


def usage(manager: CacheManager, group: int = 0) -> Usage:
    """Return the occupancy of a group. Raises `ConfigError`."""
    check_group(group, len(manager.pools))
    pool = manager.pools[group]
    return Usage(pool.num_blocks, pool.num_free, pool.num_active, pool.num_cached)


@mutating
def resize(manager: CacheManager, num_blocks: Mapping[str, int]) -> None:
    """Change the number of blocks of named groups, for instance to move memory between them.

    Where a pool shrinks, cached blocks are evicted and held ones moved to ids below the
    new end: take the copies and do them, then shrink the tensors. Where it grows, grow the
    tensors first. All or nothing: raises `OutOfBlocks` when active blocks do not fit,
    `CopyError` while copies wait to be taken or, where a pool shrinks, a restore or hold
    is open; `ConfigError`.
    """
    names = [spec.name for spec in manager.settings.groups]
    if not isinstance(num_blocks, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        msg = (
            f"new sizes are given by group, {{{names[0]!r}: 1000}} for instance, got {num_blocks!r}"
        )
        raise ConfigError(msg)
    unknown = [name for name in num_blocks if name not in names]
    if unknown:
        raise ConfigError(f"no layer groups {unknown}; there are {', '.join(names)}")
    wanted = [
        check_count(f"num_blocks of {name!r}", num_blocks.get(name, pool.num_blocks))
        for name, pool in zip(names, manager.pools, strict=True)
    ]
    shrinking = [max(pool.num_blocks - n, 0) for pool, n in zip(manager.pools, wanted, strict=True)]
    _refuse_waiting_copies(manager)
    if any(shrinking):
        _refuse_open_handles(manager)
    check_pins(manager, wanted)
    let_go_expired(manager.kernel, shrinking)
    make_room(manager.kernel, shrinking)
    for group, new in enumerate(wanted):
        if new != manager.pools[group].num_blocks:
            _resize_pool(manager, group, new)
    groups = zip(manager.settings.groups, wanted, strict=True)
    resized = tuple(msgspec.structs.replace(spec, num_blocks=n) for spec, n in groups)
    manager.settings = msgspec.structs.replace(manager.settings, groups=resized)


def _refuse_waiting_copies(manager: CacheManager) -> None:
    if manager.kernel.copies:
        msg = (
            f"{len(manager.kernel.copies.peek())} planned copies wait; call take_copies() and do them "
            "before blocks are moved"
        )
        raise CopyError(msg)


def _refuse_open_handles(manager: CacheManager) -> None:
    """Refuse while a restore or hold is open: its owner copies blocks by their present ids."""
    num_open = len(manager.kernel.holds.all) - len(all_pins(manager.kernel))
    if num_open:
        msg = (
            f"{num_open} restores or holds are open, whose owners copy to and from "
            "blocks by their ids; leave the restores and release the holds before blocks are moved"
        )
        raise CopyError(msg)


def _resize_pool(manager: CacheManager, group: int, num_blocks: int) -> None:
    pool = manager.pools[group]
    held, renamed = _moved_together(pool, num_blocks)
    pool.resize(num_blocks, held, renamed)
    moved: list[int] = (renamed != np.arange(len(renamed))).nonzero()[0].tolist()
    if moved:
        _rename(manager, group, renamed)
    num_tokens = manager.block_size if group in manager.kernel.rows.token_groups else 1
    for src in moved:
        manager.kernel.copies.plan(BlockCopy(group, src, int(renamed[src]), num_tokens))


def _moved_together(pool: BlockPool, num_blocks: int) -> tuple[BoolArray, IntArray]:
    """Plan to have all held blocks below `num_blocks`.

    Returns which blocks are held then, and where each old id has gone, to itself where it stays.
    """
    held = _held(pool, max(num_blocks, pool.num_blocks))
    moved = num_blocks + held[num_blocks:].nonzero()[0]
    places = (~held[:num_blocks]).nonzero()[0][: len(moved)]
    renamed = np.arange(pool.num_blocks, dtype=np.int32)
    renamed[moved] = places
    held[moved] = False
    held[places] = True
    return held[:num_blocks], renamed


def _held(pool: BlockPool, num_blocks: int) -> BoolArray:
    """Return which ids below `num_blocks` are held, bool [num_blocks]."""
    held = np.zeros(num_blocks, dtype=np.bool_)
    held[: pool.num_blocks] = True
    held[pool.free_ids()] = False
    return held


def _rename(manager: CacheManager, group: int, renamed: IntArray) -> None:
    """Point everything that names a block of this group to where it has gone."""
    rows = manager.kernel.rows
    for seq in manager.sequences.values():
        seq.fill()
    names = np.append(renamed, GAP).astype(np.int32)  # names[GAP] is GAP
    tree = manager.kernel.tree
    state = sparse_at(tree.states, group)
    for node in tree.nodes():
        if state is not None:
            state.rename(node, renamed)
        else:
            ids = node.blocks[group]
            ids[:] = array("i", names[np.array(ids, dtype=np.int32)].tolist())
    for seq in manager.sequences.values():
        if seq.state != "open":
            continue
        num_blocks = seq.num_blocks if group in rows.token_groups else 1
        table = np.asarray(rows.slots(group, seq.row, 0, num_blocks))
        stale = table >= len(renamed)  # behind a window, from before the pool shrank
        table[stale] = GAP
        table[:] = names[table]

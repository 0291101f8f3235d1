"""The invariants of the core, verified from scratch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from quire.core.radix import Node
from quire.errors import InvariantError

if TYPE_CHECKING:
    from quire.core.manager import CacheManager


def check(manager: CacheManager) -> None:
    """Recount everything that is kept incrementally; raise `InvariantError` on a difference."""
    _check_tree(manager)
    _check_locks(manager)
    _check_policies(manager)
    _check_sequences(manager)
    for group in range(len(manager.groups)):
        _check_owners(manager, group)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)


def _check_tree(manager: CacheManager) -> None:
    size = manager.tree.block_bytes
    for root in manager.tree.roots.values():
        _require(root.parent is None and root.end == 0, "a root is below something")
        _check_children(root, size)
    for node in manager.tree.nodes():
        name = f"node ending at block {node.end}"
        _require(len(node.key) > 0 and len(node.key) % size == 0, f"{name}: partial key")
        run = len(node.key) // size
        _require(all(len(ids) == run for ids in node.blocks), f"{name}: blocks != tokens")
        _require(len(node.blocks) == len(manager.groups), f"{name}: a group is missing")
        _require(node.end == node.start + run, f"{name}: end != start + {run}")
        _require(node.hashes is None or len(node.hashes) <= run, f"{name}: too many hashes")
        _check_children(node, size)


def _check_children(node: Node, size: int) -> None:
    for first, child in node.children.items():
        _require(child.parent is node, "a child with another parent")
        _require(bytes(child.key[:size]) == first, "a child under another block's bytes")
        _require(
            child.priority <= node.priority or node.parent is None,
            "a child of higher priority than its parent",
        )
    if node.by_token is not None:
        indexed = [first for token in sorted(node.by_token) for first in node.by_token[token]]
        _require(indexed == sorted(node.children), "the index of children is out of date")


def _check_locks(manager: CacheManager) -> None:
    locks: Counter[int] = Counter()
    pins: Counter[int] = Counter()
    for seq in manager.sequences.values():
        locks[id(seq.root)] += 1
        if seq.state == "open":
            locks.update(id(node) for node in seq.node.path())
    for pin in manager.pins.held.values():
        path = [id(node) for node in pin.node.path()]
        locks.update(path)
        pins.update(path)
    pinned = 0
    for node in [*manager.tree.roots.values(), *manager.tree.nodes()]:
        counted = (locks[id(node)], pins[id(node)])
        _require(
            (node.locks, node.pins) == counted,
            f"node ending at block {node.end}: {node.locks} locks, {node.pins} pins; the holders "
            f"are {counted}",
        )
        pinned += len(node.blocks[0]) if node.pins else 0
    _require(manager.pins.num_blocks == pinned, f"pinned blocks are {pinned}")
    _require(pinned <= manager.pins.budget, "pins above the budget")


def _check_policies(manager: CacheManager) -> None:
    order = list(manager.tree.evictor.order())
    held = Counter(id(node) for node in order)
    _require(max(held.values(), default=0) <= 1, "a node stands twice in the policies")
    place = {id(node): index for index, node in enumerate(order)}
    nodes = {id(node): node for node in manager.tree.nodes()}
    _require(all(each in nodes for each in held), "a policy holds a node that is gone")
    for node in nodes.values():
        if node.evictable:
            _require(id(node) in held, "an evictable node that no policy holds")
        if node.locks:
            _require(id(node) not in held, "a policy holds a referenced node")
        parent = node.parent
        if parent is not None and id(parent) in held and id(node) in held:
            _require(place[id(node)] < place[id(parent)], "a parent goes before its child")
    victim = manager.tree.evictor.victim()
    _require(victim is None or victim.evictable, "the victim is not evictable")
    cached = sum(len(node.blocks[0]) for node in nodes.values() if not node.locks)
    _require((victim is None) == (cached == 0), "cached blocks and no victim")


def _check_sequences(manager: CacheManager) -> None:
    rows, size = manager.rows, manager.block_size
    used: set[int] = set()
    for seq in manager.sequences.values():
        if seq.state != "open":
            _require(seq.node is seq.root, "a suspended sequence references blocks")
            continue
        _require(seq.row not in used and seq.row not in rows.unused, "a row with two owners")
        used.add(seq.row)
        lengths = (seq.published, seq.computed, seq.capacity)
        _require(list(lengths) == sorted(lengths), f"published <= computed <= capacity: {lengths}")
        _require(seq.published == seq.computed // size * size, "a full block is not published")
        for group in range(len(manager.groups)):
            path = [block for node in seq.node.path() for block in node.blocks[group]]
            table = seq.block_ids(group).tolist()
            _require(table[: len(path)] == path, "a table differs from the tree")
    _require(len(used) + len(rows.unused) == rows.num_rows, "a row was lost")


def _check_owners(manager: CacheManager, group: int) -> None:
    """Free + active + cached == num_blocks, and every block has the holders that are counted."""
    pool = manager.groups[group]
    free: list[int] = pool.free_ids().tolist()
    in_tree = [block for node in manager.tree.nodes() for block in node.blocks[group]]
    private: Counter[int] = Counter()
    for seq in manager.sequences.values():
        if seq.state == "open":
            private.update(seq.block_ids(group)[seq.node.end :].tolist())
    owners: Counter[int] = Counter(free) + Counter(in_tree) + Counter(list(private))
    twice = [block for block, count in owners.items() if count > 1]
    _require(not twice, f"blocks {twice[:8]} have two owners")
    lost = pool.num_blocks - len(owners)
    _require(not lost, f"{lost} blocks of group {group} belong to nobody")
    shared = {block: count for block, count in private.items() if count > 1}
    _require(shared == pool.shared, f"shared blocks are {shared}, counted {pool.shared}")
    cached = sum(len(n.blocks[group]) for n in manager.tree.nodes() if not n.locks)
    _require(pool.num_cached == cached, f"{cached} blocks are cached, counted {pool.num_cached}")
    for copy in manager.copies.peek():
        if copy.group == group:
            _require(copy.dst in private, f"a copy into block {copy.dst}, which nobody owns")

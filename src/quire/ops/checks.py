"""The invariants of a manager, verified from scratch."""

from __future__ import annotations

from collections import Counter

from quire.core.blocks import GAP
from quire.core.manager import CacheManager
from quire.core.media import MAX_MEDIA
from quire.core.node import Node
from quire.core.rows import MIN_ARENA, Rows
from quire.core.sparse import sparse_at
from quire.core.tree import MAX_GONE, PrefixTree
from quire.errors import InvariantError
from quire.interrupts import mutating
from quire.ops.pins import all_pins, pin_budget, pinned_nodes


@mutating
def check(manager: CacheManager) -> None:
    """Recount everything that pools, tree, policies and sequences keep incrementally.

    O(blocks + tokens); raises `InvariantError` with what is broken.
    """
    _check_tree(manager)
    _check_locks(manager)
    _check_lent(manager)
    _check_policies(manager)
    _check_sequences(manager)
    _check_media(manager)
    check_rows(manager.kernel.rows)
    for group in range(len(manager.pools)):
        _check_owners(manager, group)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)


def _check_tree(manager: CacheManager) -> None:
    size = manager.kernel.tree.block_bytes
    for root in manager.kernel.tree.roots.values():
        _require(root.parent is None and root.end == 0, "a root is below something")
        _check_children(manager.kernel.tree, root)
    for node in manager.kernel.tree.nodes():
        name = f"node ending at block {node.end}"
        _require(len(node.key) > 0 and len(node.key) % size == 0, f"{name}: partial key")
        run = len(node.key) // size
        for group in manager.kernel.rows.token_groups:
            _require(len(node.blocks[group]) == run, f"{name}: blocks != tokens")
        _require(len(node.blocks) == len(manager.pools), f"{name}: a group is missing")
        _require(node.end == node.start + run, f"{name}: end != start + {run}")
        _check_children(manager.kernel.tree, node)


def _check_children(tree: PrefixTree, node: Node) -> None:
    size = tree.block_bytes
    for name, child in node.children.items():
        _require(child.parent is node, "a child with another parent")
        _require(bytes(child.key[:size]) == name, "a child under another block's bytes")
        _require(child.name == name, "a child that goes by another name")
        _require(
            child.priority <= node.priority or node.parent is None,
            "a child of higher priority than its parent",
        )
    names = tree.wide.get(id(node))
    if names is not None:
        there = [name for name in names if name in node.children]
        _require(there == sorted(node.children), "the index of children is out of date")
        _require(len(names) <= 2 * len(there) + MAX_GONE, "the index of children names too many")


def _check_locks(manager: CacheManager) -> None:
    locks: Counter[int] = Counter()
    stands: Counter[tuple[int, int]] = Counter()
    waiting, sources = Counter[int](), Counter[int]()
    for seq in manager.sequences.values():
        locks[id(seq.root)] += 1
        if seq.state == "open":
            locks.update(id(node) for node in seq.node.path())
            if seq.pending is not None:
                waiting[id(seq.node)] += 1
                sources.update([] if seq.pending.source is None else [id(seq.pending.source)])
            stands.update(
                (group.index, id(seq.node)) for group in manager.kernel.rows.standing(seq.row)
            )
    for hold in manager.kernel.holds.all.values():
        locks.update(id(node) for node in hold.node.path())
        stands.update((group.index, id(hold.node)) for group in manager.kernel.tree.sparse)
    locks.update(sources)
    counted = {node: count for node, (count, _) in manager.kernel.tree.waiting.items()}
    _require(counted == waiting + sources, "not those wait that are counted")
    for node in manager.kernel.tree.nodes():
        for group in manager.kernel.tree.sparse:
            wrong = group.check(node, stands[group.index, id(node)], sources[id(node)])
            _require(not wrong, f"node ending at block {node.end}, group {group.index}: {wrong}")
    for node in [*manager.kernel.tree.roots.values(), *manager.kernel.tree.nodes()]:
        counted = locks[id(node)]
        _require(
            node.locks == counted,
            f"node ending at block {node.end}: {node.locks} locks, {counted} that hold it",
        )
    if manager.kernel.tree.full:
        pinned = pinned_nodes(all_pins(manager.kernel))
        num_pinned = sum(node.num_blocks for node in pinned)
        _require(num_pinned <= pin_budget(manager), "pins above the budget")


def _check_lent(manager: CacheManager) -> None:
    """Check that the lent references are exactly those of requests without room."""
    lent: Counter[int] = Counter()
    for seq in manager.sequences.values():
        if seq.state == "open" and seq.pending is not None:
            source = seq.pending.source
            lent.update(id(node) for node in (source or seq.node).path())
            _require(source is None or source.parent is seq.node, "a source stands elsewhere")
            _require(source is None or seq.computed > seq.published, "a source without a tail")
            _require(seq.capacity == seq.computed, f"{seq!r} has room and is not counted")
    _require(manager.kernel.tree.order.lent == lent, "what is lent is not what waits for room")


def _check_policies(manager: CacheManager) -> None:
    order = list(manager.kernel.tree.order.order())
    held = Counter(id(node) for node in order)
    _require(max(held.values(), default=0) <= 1, "a node stands twice in the policies")
    place = {id(node): index for index, node in enumerate(order)}
    nodes = {id(node): node for node in manager.kernel.tree.nodes()}
    _require(all(each in nodes for each in held), "a policy holds a node that is gone")
    for node in nodes.values():
        if node.evictable:
            _require(id(node) in held, "an evictable node that no policy holds")
        if node.locks:
            _require(id(node) not in held, "a policy holds a referenced node")
        parent = node.parent
        if parent is not None and id(parent) in held and id(node) in held:
            _require(place[id(node)] < place[id(parent)], "a parent goes before its child")
        owner = node.mark.owner if node.mark is not None else None
        if owner is not None:
            _require(owner.nodes.get(id(node)) is node, "an owner does not list its node")
            _require(all(each in nodes for each in owner.nodes), "an owner lists what is gone")
            below = [each.mark for each in node.children.values()]
            alone = all(mark is not None and mark.owner is owner for mark in below)
            _require(alone, "a node below an owner's is not its own")
    victim = next((node for node in order if node.evictable), None)
    cached = sum(node.num_blocks for node in nodes.values() if not node.locks)
    _require((victim is None) == (cached == 0), "cached blocks and no victim")


def _check_sequences(manager: CacheManager) -> None:
    rows, size = manager.kernel.rows, manager.block_size
    used: set[int] = set()
    for seq in manager.sequences.values():
        if seq.state != "open":
            _require(seq.node is seq.root, "a suspended sequence references blocks")
            continue
        _require(seq.row not in used and seq.row not in rows.unused, "a row with two owners")
        used.add(seq.row)
        lengths = (seq.published, seq.computed, seq.capacity)
        _require(seq.num_blocks <= rows.ends[seq.row], "a table is longer than its extent")
        first = rows.ends[seq.row] - rows.sizes[seq.row]
        _require(first <= seq.unfilled, "a table has no place for its head")
        _require(list(lengths) == sorted(lengths), f"published <= computed <= capacity: {lengths}")
        private = len(seq.private_key) // manager.kernel.tree.block_bytes
        _require(seq.node.end + private == seq.computed // size, "a full block is not published")
        for group in rows.token_groups:
            path = [block for node in seq.node.path() for block in node.blocks[group]]
            table = seq.block_ids(group).tolist()
            seen = [block for block in table[: len(path)] if block != GAP]
            there = [path[at] for at, block in enumerate(table[: len(path)]) if block != GAP]
            _require(seen == there, f"a table of group {group} differs from the tree")
        for window in rows.windows:
            first = window.first_read(seq.computed)
            lacks = GAP in (window.block_at(seq.node, at) for at in range(first, seq.node.end))
            _require(not lacks, f"group {window.index} lost a block of a running window")
    _require(len(used) + len(rows.unused) == rows.num_rows, "a row was lost")


def check_rows(rows: Rows) -> None:
    """Extents do not overlap, and the arena is not much larger than what is used of it."""
    used = [(rows.offset[r] + rows.ends[r] - n, n) for r, n in enumerate(rows.sizes) if n]
    waiting = [(start, size) for size, starts in rows.waiting.items() for start in starts]
    end = 0
    for start, size in sorted(used + waiting):
        _require(start == end, f"an extent starts at {start}, the one before ends at {end}")
        end += size
    _require(end == rows.top <= rows.arena_size, f"extents end at {end}, {rows.top} were given out")
    _require(not any(rows.sizes[row] for row in rows.unused), "an unused row has an extent")
    num_used = sum(rows.sizes)
    fits = rows.arena_size <= max(MIN_ARENA, 4 * num_used)
    _require(fits, f"an arena of {rows.arena_size} for {num_used} entries in use")
    sizes = {len(rows.flat[group]) for group in rows.token_groups}
    _require(sizes <= {rows.arena_size}, "the groups have arenas of different sizes")


def _check_media(manager: CacheManager) -> None:
    uses: Counter[int] = Counter()
    for node in manager.kernel.tree.nodes():
        counts = manager.kernel.tree.media.counts(node.key)
        uses.update(counts)
    for seq in manager.sequences.values():
        uses.update(seq.script.media)
    media = manager.kernel.tree.media
    _require(media.uses == uses, f"media are used {dict(uses)}, counted {media.uses}")
    _require(media.idle.keys() == media.contents.keys() - uses.keys(), "unused media are not idle")
    named = {number: content for content, number in media.numbers.items()}
    _require(named == media.contents, "media numbers and contents differ")
    many = len(media.contents) > MAX_MEDIA and media.idle
    _require(not many, "idle media contents are remembered beyond the limit")


def _check_owners(manager: CacheManager, group: int) -> None:
    """Free + active + cached == num_blocks, and every block has the holders that are counted."""
    pool, rows, tree = manager.pools[group], manager.kernel.rows, manager.kernel.tree
    free: list[int] = pool.free_ids().tolist()
    held = [(node, blocks_of(manager, node, group)) for node in tree.nodes()]
    in_tree = [block for _, blocks in held for block in blocks]
    private: Counter[int] = Counter()
    lent: Counter[int] = Counter()  # the tree's, with whose heads requests without room go on
    for seq in manager.sequences.values():
        if seq.state == "open":
            start, stop = seq.node.end, seq.num_blocks
            own = rows.slots(
                group, seq.row, *((start, stop) if group in rows.token_groups else (0, 1))
            )
            ids = [block for block in own if block != GAP]
            is_lent = seq.pending is not None and seq.pending.source is not None
            (lent if is_lent else private).update(ids)
    owners: Counter[int] = Counter(free) + Counter(in_tree) + Counter(list(private))
    twice = [block for block, count in owners.items() if count > 1]
    _require(not twice, f"blocks {twice[:8]} of group {group} have two owners")
    lost = pool.num_blocks - len(owners)
    _require(not lost, f"{lost} blocks of group {group} belong to nobody")
    _require(lent.keys() <= set(in_tree), "a block is lent that is not the tree's")
    shared = {block: count for block, count in private.items() if count > 1}
    shared |= {block: count + 1 for block, count in lent.items()}
    _require(shared == pool.shared, f"shared blocks are {shared}, counted {pool.shared}")
    sparse = sparse_at(tree.sparse, group)
    cached = (
        sum(sparse.num_cached(node) for node, _ in held)
        if sparse
        else sum(len(blocks) for node, blocks in held if not node.locks)
    )
    _require(pool.num_cached == cached, f"{cached} blocks are cached, counted {pool.num_cached}")
    for copy in manager.kernel.copies.peek():
        if copy.group == group:
            owned = copy.dst in private or copy.dst in in_tree
            _require(owned, f"a copy into block {copy.dst}, which nobody owns")


def blocks_of(manager: CacheManager, node: Node, group: int) -> list[int]:
    """Return the blocks of one group that a node holds."""
    sparse = sparse_at(manager.kernel.tree.sparse, group)
    return [block for _, block in sparse.held(node)] if sparse else list(node.blocks[group])

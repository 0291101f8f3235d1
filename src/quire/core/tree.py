"""The prefix tree: which runs of tokens have blocks, and who references them.

root (scope)
 └── edge "system prompt"        key: 128 blocks of tokens, blocks: their ids
      ├── edge "user A ..."      a leaf: evicted from its tail, block by block
      └── edge "user B ..."
           ├── edge ...
           └── edge ...
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

from quire.core.blocks import BlockPool
from quire.core.media import MediaTable
from quire.core.node import NO_CHILDREN, Match, Node, NodePart
from quire.core.order import Order
from quire.core.sparse import SparseGroup, StateGroup, TableGroup
from quire.core.terms import ORDINARY, Terms
from quire.core.tokens import TOKEN_BYTES, Key, common_prefix
from quire.scope import Scope

SCAN_CHILDREN = 8
"""Up to so many children are compared one by one; the names of more are kept sorted."""

MAX_GONE = 64
"""Sorted names are made anew once so many more have gone than children are left."""

DEEP, NEAR = 4, 1 << 13
"""A path that has so many nodes in so many bytes of a key is followed in a copy of the key: it has many more."""

MAX_ROOTS = 4096
"""Beyond so many scopes, those without cached blocks and sequences are forgotten."""


class PrefixTree:
    """A radix tree per scope over runs of whole blocks, and the owner of all that is cached.

    A lookup compares tokens at memcmp speed. The tree tells the pools of the
    full groups when a run is referenced for the first time (`lock`) and no more (`unlock`); sparse
    groups hear of all changes and tell their own pools.
    """

    def __init__(
        self,
        block_size: int,
        pools: tuple[BlockPool, ...],
        order: Order,
        sparse: tuple[SparseGroup, ...] = (),
        part_kinds: tuple[type[NodePart], ...] = (),
    ) -> None:
        self.block_bytes = block_size * TOKEN_BYTES
        self.pools = pools
        self.order = order
        self.media = MediaTable()
        self.sparse = sparse
        self.part_kinds = part_kinds
        self._num_sparse = len(sparse)
        self.windows = tuple(group for group in sparse if isinstance(group, TableGroup))
        self.states = tuple(group for group in sparse if isinstance(group, StateGroup))
        self._sinking = [group for group in self.windows if group.num_sinks]
        apart = [group.index for group in sparse]
        self.full = tuple((g, pool) for g, pool in enumerate(pools) if g not in apart)
        # Sorted names of many children, by the id of their parent; those that have gone may stand in between.
        self.wide: dict[int, list[bytes]] = {}
        self.roots: dict[Scope, Node] = {}
        # By node id: the number of waiting requests at its end, and whether only they need the cut there.
        self.waiting: dict[int, tuple[int, bool]] = {}
        self._max_roots = MAX_ROOTS

    def root(self, scope: Scope) -> Node:
        """Return the root of a scope, made at first use."""
        root = self.roots.get(scope)
        if root is None:
            if len(self.roots) >= self._max_roots:
                self._forget_roots()
            kept = tuple(kind() for kind in self.part_kinds)
            root = self.roots[scope] = Node(parts=(None,) * self._num_sparse + kept)
        return root

    def match(self, root: Node, key: Key, num_bytes: int) -> Match:
        """Find the longest cached run of whole blocks in `key[:num_bytes]`. Pure."""
        block_bytes, node, start, depth = self.block_bytes, root, 0, 0
        while True:
            edge = node.children.get(key[start : start + block_bytes].tobytes())
            if edge is None:
                return Match(node, start // block_bytes)
            edge_key = edge.key
            end = start + len(edge_key)
            if end > num_bytes or not edge_key.startswith(key[start:end]):
                into = self._whole_blocks(edge_key, key[start : min(end, num_bytes)])
                return Match(node, start // block_bytes + into, edge, into)
            node, start, depth = edge, end, depth + 1
            if depth == DEEP and start < NEAR:
                node, start = self._descend(node, start, key[:num_bytes].tobytes())

    def match_partial(self, found: Match, rest: Key) -> tuple[Node, int] | None:
        """Find a node whose block `found.into` is cached and starts as `rest` does, and how many tokens do."""
        if found.edge is not None and found.into:
            at = found.into * self.block_bytes
            shared = common_prefix(found.edge.key[at : at + self.block_bytes], rest)
            return (found.edge, shared) if shared else None
        best, most, head = b"", 0, rest[:TOKEN_BYTES].tobytes()
        for name in self._similar_children(found.node, rest):
            if name.startswith(head) and (shared := common_prefix(name, rest)) > most:
                best, most = name, shared
        return (found.node.children[best], most) if most else None

    def split(self, edge: Node, num_blocks: int) -> Node:
        """Cut an edge after `num_blocks` and return the new upper half; `edge` is the lower."""
        at = num_blocks * self.block_bytes
        parent = edge.parent
        assert parent is not None
        name = edge.name
        upper = Node(
            key=edge.key[:at],
            name=name,
            blocks=tuple(ids[:num_blocks] for ids in edge.blocks),
            end=parent.end + num_blocks,
            parent=parent,
            locks=edge.locks,
        )
        del edge.key[:at]
        for ids in edge.blocks:
            del ids[:num_blocks]
        edge.parent = upper
        edge.name = bytes(edge.key[: self.block_bytes])
        parent.children[name] = upper
        upper.children = {edge.name: edge}
        self.order.split(upper, edge)
        for group in self.sparse:
            group.split(upper, edge)
        for part in edge.parts[self._num_sparse :]:
            upper.parts += (part.split(upper, edge),)
        return upper

    def cut(self, node: Node, end: int) -> Node:
        """Return the node on this path that ends at a boundary; a run that goes on there is split."""
        node = node.holding(end - 1)
        return self.split(node, end - node.start) if node.end > end else node

    def lock(self, node: Node) -> None:
        """Reference one node: cached blocks become active."""
        if not node.locks:
            self.order.referenced(node)
            num_blocks = node.num_blocks
            for _, pool in self.full:
                pool.use(num_blocks)
        node.writer = None
        node.locks += 1
        for group in self._sinking:
            group.recount(node)

    def unlock(self, node: Node) -> None:
        """Drop a reference; after the last one active blocks become cached.

        Paths are unlocked from the deepest node up: a parent is the more recently used one.
        """
        node.locks -= 1
        if not node.locks or node.locks == self.order.lent.get(id(node), 0):
            self.order.joined(node).released(node)
            if node.locks:  # of requests that have no room yet: it has its place only
                self.order.referenced(node)
        self._unlocked(node)

    def unlend(self, node: Node) -> None:
        """Drop the reference of a request that had no room: not a use."""
        if node.locks == 1:
            self.order.expire()  # its children first: they may have its place
        node.locks -= 1
        self.order.take_back(node)
        if not node.locks:
            self.order.joined(node).returned(node)
        self._unlocked(node)

    def _unlocked(self, node: Node) -> None:
        node.writer = None
        if not node.locks:
            num_blocks = node.num_blocks
            for _, pool in self.full:
                pool.cache(num_blocks)
        for group in self._sinking:
            group.recount(node)

    def hold(self, end: Node, groups: tuple[SparseGroup, ...]) -> None:
        """Reference the path to a node, and stand at its end."""
        for node in reversed(end.path()):
            self.lock(node)
        self.stand(end, groups)

    def let_go(self, end: Node, groups: tuple[SparseGroup, ...]) -> None:
        """Release the references of `hold`."""
        self.leave(end, groups)
        for node in reversed(end.path()):
            self.unlock(node)

    def stand(self, node: Node, groups: tuple[SparseGroup, ...]) -> None:
        """A sequence or pin stands at the end of this node, whose path it has locked."""
        for group in groups if node.parent is not None else ():
            group.guard(node)

    def leave(self, node: Node, groups: tuple[SparseGroup, ...], *, refused: bool = False) -> None:
        """Remove the guard of one sequence or pin at the end of a node.

        `refused`: the request was refused, so it has not used the node.
        """
        for group in groups if node.parent is not None else ():
            (group.dismiss if refused else group.unguard)(node)

    def add(self, parent: Node, key: Key, blocks: tuple[array[int], ...], terms: Terms) -> Node:
        """Add a run of active blocks below `parent`, referenced once by the caller."""
        name = key[: self.block_bytes].tobytes()
        node = Node(key=bytearray(key), name=name, blocks=blocks, parent=parent, locks=1)
        if terms is not ORDINARY:
            self.order.stored(node, terms)
        node.end = parent.end + len(key) // self.block_bytes
        parent.writer = None
        if parent.children is NO_CHILDREN:
            parent.children = {name: node}
        else:
            parent.children[name] = node
            names = self.wide.get(id(parent))
            if names is not None:
                at = bisect_left(names, name)
                if names[at : at + 1] != [name]:
                    names.insert(at, name)
        for group in self.sparse:
            group.created(node)
        if self.part_kinds:
            node.parts = (*node.parts, *[kind() for kind in self.part_kinds])
        return node

    def extend(self, node: Node, key: Key, blocks: list[memoryview[int]]) -> None:
        """Lengthen a leaf that only the caller references, in place."""
        node.key += key
        for ids, more in zip(node.blocks, blocks, strict=True):
            ids.frombytes(more.cast("B"))
        num_blocks = len(key) // self.block_bytes
        node.end += num_blocks
        for group in self.sparse:
            group.extended(node, num_blocks)

    def cut_tail(self, node: Node, num_blocks: int, freed_from: int = 0) -> None:
        """Take the last blocks of a leaf out of the tree; who owns them then is the caller's.

        Sparse groups free theirs, from block `freed_from` on.
        """
        for group in self.sparse:
            group.cut(node, num_blocks, freed_from)
        at = len(node.key) - num_blocks * self.block_bytes
        left = at // self.block_bytes
        if len(self.media):
            self.media.release(self.media.counts(node.key[at:]))
        if left:
            del node.key[at:]
            for ids in node.blocks:
                del ids[left:]
            node.end -= num_blocks
            node.writer = None
            for part in node.parts[self._num_sparse :]:
                part.cut(node)
            return
        parent, name = node.parent, node.name
        assert parent is not None
        if not node.locks:
            self.order.referenced(node)
        for group in self.sparse:
            group.forget(node)
        del parent.children[name]
        if self.wide:
            self.wide.pop(id(node), None)
            names = self.wide.get(id(parent))
            if names is not None and len(names) > 2 * len(parent.children) + MAX_GONE:
                del self.wide[id(parent)]
        if node.mark is not None:
            self.order.gone(node)
        node.parent = node.note = None
        if not parent.children and parent.parent is not None and not parent.locks:
            self.order.exposed(parent)

    def __del__(self) -> None:
        """Break the links between nodes, which the garbage collector does not see."""
        if not hasattr(self, "roots"):
            return  # its making was cut off
        for node in [*self.roots.values(), *self.nodes()]:
            node.parent = node.older = node.newer = node.writer = None
            node.mark = node.note = None
            node.children = NO_CHILDREN
        for group in self.sparse:
            group.clear()

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes but the roots, parents first, in order of insertion."""
        stack = [*reversed(self.roots.values())]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(reversed(node.children.values()))

    def _descend(self, node: Node, at: int, key: bytes) -> tuple[Node, int]:
        """Pass the nodes that match to their ends; bytes are cheaper to cut than a view of them."""
        size = self.block_bytes
        while (edge := node.children.get(key[at : at + size])) and key.startswith(edge.key, at):
            node, at = edge, at + len(edge.key)
        return node, at

    def _forget_roots(self) -> None:
        for scope, root in list(self.roots.items())[1:]:
            if not root.children and not root.locks:
                del self.roots[scope]
                self.wide.pop(id(root), None)
        self._max_roots = max(MAX_ROOTS, 2 * len(self.roots))

    def _whole_blocks(self, edge_key: bytearray, key: Key) -> int:
        """Count the whole blocks that an edge and a key share, by bisection."""
        size = self.block_bytes
        same, limit = 0, min(len(edge_key), len(key)) // size
        while same < limit:
            middle = (same + limit + 1) // 2
            if edge_key.startswith(key[same * size : middle * size], same * size):
                same = middle
            else:
                limit = middle - 1
        return same

    def _similar_children(self, node: Node, rest: Key) -> list[bytes]:
        """Return the names of the children among which the most similar one is."""
        if len(node.children) <= SCAN_CHILDREN:
            return list(node.children)
        names = self.wide.get(id(node))
        if names is None:  # made whole before it is kept, so an interrupt leaves no half of it
            names = self.wide[id(node)] = sorted(node.children)
        start = stop = bisect_left(names, rest.tobytes())
        while start and names[start - 1] not in node.children:
            start -= 1
        while stop < len(names) and names[stop] not in node.children:
            stop += 1
        del names[start:stop]  # each is passed over once
        return names[max(start - 1, 0) : start + 1]

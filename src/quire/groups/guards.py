"""Guards: which blocks of a windowed group are protected by the sequences and pins that stand in the tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from quire.core.blocks import GAP
from quire.core.node import Node
from quire.core.sparse import Site, Standing
from quire.groups.shedding import Part, SheddingGroup

FAR = 2**31
"""Beyond all blocks."""


class WindowPart(Part, gc=False, eq=False):
    """The blocks of a node in a windowed group: `node.blocks[group]`, with gaps.

    `need`   the first block needed by those who stand at the node's end or below it; FAR without any
    `below`  the children that need blocks of this node or above it, counted by the first that they need, and those
             to whom it is lent
    `swept`  the first block that may be passing: those before it were looked at
    """

    below: dict[int, int] | None = None
    need: int = FAR
    swept: int = 0


class Guards:
    """The protected blocks of the nodes of a windowed group, counted from the root.

    The first block that a hit needs never falls as its length rises.
    A node protects the blocks from the first one that the sequences and pins at its end
    or at a node below it need, and sinks while it is referenced.
    """

    def __init__(
        self,
        site: Site,
        first_block: Callable[[int, int], int],
        num_sinks: int,
        order: SheddingGroup,
    ) -> None:
        self._index, self._place, self._pool = site.index, site.place, site.pool
        self._size = site.block_size
        self._first_block = first_block
        self._num_sinks = num_sinks
        self._order = order

    def tell(self, node: Node, enter: Callable[[Node, Part], None] | None = None) -> None:
        """Compute a node's `need` anew, and go on upwards as long as the parent's may change with it.

        `enter` has the order learn of parts that nobody needs any more; they were used last unless it says otherwise.
        """
        enter = enter or self._order.enter
        while True:
            part: WindowPart = node.parts[self._place]
            before = part.need
            part.need = need = self.needed(part, node.end)
            if before != need:
                self._count(node, part, node.end, need)
                if part.num_held and (need == FAR or part.rank is None):
                    enter(node, part)
            start = node.start
            if before == need or (before >= start and need >= start):
                return
            assert node.parent is not None
            node = node.parent
            above: WindowPart = node.parts[self._place]
            below = above.below or {}
            if before < start:
                below[before] -= 1
                if not below[before]:
                    del below[before]
            if need < start:
                below[need] = below.get(need, 0) + 1
            above.below = below or None

    def lend(self, node: Node, more: int) -> None:
        """Protect all of a node for one request more or fewer; the order of eviction stays."""
        part: WindowPart = node.parts[self._place]
        below, start = part.below or {}, node.start
        below[start] = below.get(start, 0) + more
        if not below[start]:
            del below[start]
        part.below = below or None
        self.tell(node, self._order.stay)

    def recount(self, node: Node, part: WindowPart, end: int | None = None) -> None:
        """Count the protected blocks of a node, which will end at `end`; the rest is cached."""
        end = node.end if end is None else end
        self._count(node, part, end, self.needed(part, end))

    def needed(self, part: WindowPart, end: int) -> int:
        """Return the first block that is needed of a node that ends at `end`, FAR if none is."""
        need = self._first_block(end * self._size, self._size) if part.guards else FAR
        return min(need, *part.below) if part.below else need

    def would_guard(self, standing: Standing) -> int:
        """Return how many more blocks would be protected, below 0 for fewer. Changes nothing."""
        more, found = 0, standing.node.path() if standing.node is not None else []
        told: dict[Node, Counter[int]] = {}
        if standing.lent is not None:
            told[standing.lent] = Counter({standing.lent.start: -1})
        for node in standing.path():
            part: WindowPart = node.parts[self._place]
            start, end = node.start, node.end
            below = Counter(part.below or {})
            below.update(told.get(node, {}))
            guards = part.guards - standing.gone.get(node, 0)
            need = min([FAR, *(+below), *[self._first_needed(end)] * (guards > 0)])
            sinks = self._num_sinks if node.locks > standing.unlocked.get(node, 0) else 0
            more -= part.guarded
            if node is standing.node:  # the part of it behind the boundary is not the request's
                more += self._protected(node, standing.end, end, need, sinks)
                end, need = standing.end, min(need, self._first_needed(standing.end))
            more += self._protected(
                node, start, end, need, self._num_sinks if node in found else sinks
            )
            assert node.parent is not None
            above = told.setdefault(node.parent, Counter())
            for each, count in ((part.need, -1), (need, 1)):
                if each < start:
                    above[each] += count
        return more

    def check(self, node: Node, num_lent: int) -> str:
        """Return the fault in the needs of a node lent to `num_lent` waiting requests, or nothing."""
        part: WindowPart = node.parts[self._place]
        needs = [(child.parts[self._place].need, child.start) for child in node.children.values()]
        below = Counter(need for need, start in needs if need < start)
        below += Counter({node.start: num_lent})
        if below != Counter(part.below or {}):
            return f"those below need {dict(below)}, it knows of {part.below}"
        need = min([FAR, *below, *[self._first_needed(node.end)] * (part.guards > 0)])
        is_leaf = not node.children
        if part.need != need and not (is_leaf and FAR > need > part.need):
            return f"blocks from {need} on are needed, it says {part.need}"
        return ""

    def _first_needed(self, end: int) -> int:
        """Return the first block that a hit at this boundary needs, sinks apart."""
        return self._first_block(end * self._size, self._size)

    def _count(self, node: Node, part: WindowPart, end: int, need: int) -> None:
        """Count the protected blocks from a known `need` on; the difference becomes active or cached."""
        sinks = self._num_sinks if node.locks else 0
        guarded = self._protected(node, node.start, end, need, sinks)
        if guarded != part.guarded:
            self._pool.protect(part.guarded, guarded)
            part.guarded = guarded

    def _protected(self, node: Node, low: int, end: int, need: int, sinks: int) -> int:
        """Count the blocks [low, end) of a node that are there and needed, or among the first `sinks`."""
        first = max(need, low) if need < end else end
        guarded = end - first
        if guarded:
            start = node.start
            if node.parts[self._place].num_held < node.end - start:
                guarded -= node.blocks[self._index][first - start : end - start].count(GAP)
        if sinks > low:
            guarded += max(min(sinks, first) - low, 0)
        return guarded

"""Guards: which blocks of a windowed group are protected by the sequences and pins that stand in the tree."""

from __future__ import annotations

from collections import Counter
from math import lcm

from quire.core.blocks import GAP
from quire.core.groups import ChunkedAttention, SlidingWindow
from quire.core.node import Node
from quire.core.sparse import FAR, Site, SparseGroup, Standing, WindowPart

INTERVAL_WINDOWS = 4
"""Without an interval of its own, a window is kept at every multiple of so many windows."""


class WindowGuards(SparseGroup):
    """The guarded half of a windowed group. Positions here are counted in blocks from the root.

    `first(end)` is the first block that a hit at `end` needs; it never falls as `end` rises.
    A node protects the blocks from the first one that is needed by those who stand at its end
    or at a node below it, and sinks while it is referenced.
    """

    def __init__(self, site: Site, kind: SlidingWindow | ChunkedAttention, block_size: int) -> None:
        super().__init__(site)
        self._size = block_size
        self._sliding = isinstance(kind, SlidingWindow)
        self._quick = isinstance(kind, SlidingWindow) and not kind.sinks
        if isinstance(kind, SlidingWindow):
            self._span = kind.window
            self._interval = kind.interval or INTERVAL_WINDOWS * kind.window
            self.num_sinks = -(-kind.sinks // block_size)
        else:
            self._span = kind.chunk
            self._interval = 0
            self.num_sinks = 0
        self.width = -(-self._span // block_size)
        self._period = lcm(self._span, block_size) // block_size

    def first(self, end: int) -> int:
        """Return the first block that a hit at this boundary needs, sinks apart."""
        return self.first_of(end * self._size)

    def first_of(self, num_tokens: int) -> int:
        """Return the first block that the next token after so many needs, sinks apart."""
        if self._sliding:
            before = num_tokens - self._span
            return before // self._size if before > 0 else 0
        return num_tokens // self._span * self._span // self._size

    def guard(self, node: Node) -> None:
        self._part(node).guards += 1
        self._tell(node)

    def unguard(self, node: Node) -> None:
        self._part(node).guards -= 1
        self._tell(node)

    def would_guard(self, standing: Standing) -> int:
        more, found = 0, standing.node.path() if standing.node is not None else []
        told: dict[Node, Counter[int]] = {}
        for node in standing.path():
            part, start, end = self._part(node), node.start, node.end
            below = Counter(part.below or {})
            below.update(told.get(node, {}))
            guards = part.guards - standing.gone.get(node, 0)
            need = min([FAR, *(+below), *[self.first(end)] * (guards > 0)])
            sinks = self.num_sinks if node.locks > standing.unlocked.get(node, 0) else 0
            more -= part.guarded
            if node is standing.node:  # the part of it behind the boundary is not the request's
                more += self._protected(node, standing.end, end, need, sinks)
                end, need = standing.end, min(need, self.first(standing.end))
            more += self._protected(
                node, start, end, need, self.num_sinks if node in found else sinks
            )
            assert node.parent is not None
            above = told.setdefault(node.parent, Counter())
            for each, count in ((part.need, -1), (need, 1)):
                if each < start:
                    above[each] += count
        return more

    def _tell(self, node: Node) -> None:
        """Compute a node's `need` anew, and go on upwards as long as the parent's may change with it."""
        while True:
            part = self._part(node)
            before = part.need
            part.need = need = self._needed(part, node.end)
            if before != need:
                self._count(node, part, node.end, need)
                if part.num_held and (need == FAR or part.rank is None):
                    self._list(node, part)
                    self._file(node, part)
            start = node.start
            if before == need or (before >= start and need >= start):
                return
            assert node.parent is not None
            node = node.parent
            below = self._part(node).below or {}
            if before < start:
                below[before] -= 1
                if not below[before]:
                    del below[before]
            if need < start:
                below[need] = below.get(need, 0) + 1
            self._part(node).below = below

    def recount(self, node: Node) -> None:
        """The node's first reference came, or its last one went: sinks change sides."""
        if self.num_sinks > node.start:
            self._recount(node, self._part(node))

    def _recount(self, node: Node, part: WindowPart, end: int | None = None) -> None:
        """Count the protected blocks of a node that ends at `end`; the rest is cached."""
        end = node.end if end is None else end
        self._count(node, part, end, self._needed(part, end))

    def _count(self, node: Node, part: WindowPart, end: int, need: int) -> None:
        """Count the protected blocks from a known `need` on; the difference becomes active or cached."""
        sinks = self.num_sinks if node.locks else 0
        guarded = self._protected(node, node.start, end, need, sinks)
        if guarded > part.guarded:
            self.pool.use(guarded - part.guarded)
        elif guarded < part.guarded:
            self.pool.cache(part.guarded - guarded)
        part.guarded = guarded

    def _protected(self, node: Node, low: int, end: int, need: int, sinks: int) -> int:
        """Count the blocks [low, end) of a node that are there and needed, or among the first `sinks`."""
        first = max(need, low) if need < end else end
        guarded = end - first
        if guarded:
            start = node.start
            if node.parts[self.place].num_held < node.end - start:
                guarded -= node.blocks[self.index][first - start : end - start].count(GAP)
        if sinks > low:
            guarded += max(min(sinks, first) - low, 0)
        return guarded

    def _needed(self, part: WindowPart, end: int) -> int:
        """Return the first block that is needed of a node that ends at `end`, FAR if none is."""
        need = self.first_of(end * self._size) if part.guards else FAR
        return min(need, *part.below) if part.below else need

    def _part(self, node: Node) -> WindowPart:
        return node.parts[self.place]  # pyright: ignore[reportReturnType] - this group made it

"""Windowed groups: sliding windows and chunks, which need the last blocks of a prefix only."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

import numpy as np

from quire.core.blocks import GAP, without_gaps
from quire.core.guards import WindowGuards
from quire.core.node import Node, Part
from quire.core.sparse import FAR, Tell, WindowPart
from quire.core.tokens import INT32, IntArray


class WindowGroup(WindowGuards):
    """A sliding-window or chunked group: what a hit needs of it, and what it loses first."""

    # -- what a hit needs ------------------------------------------------------------------

    def accepted(self, node: Node, end: int) -> int:
        while end:
            first = self.first(end)
            if first >= end:
                return end
            while end <= node.start:
                assert node.parent is not None
                node = node.parent
            whole = first >= node.start and node.parts[self.place].num_held == node.num_blocks
            gap = -1 if whole else self._last_gap(node, first, end)
            if gap < 0:
                return end
            end = gap if gap < end - 1 else self._last_held(node, gap)
        return 0

    def kept_ends(self, node: Node) -> list[int]:
        """Return the boundaries of a node whose windows are kept longest: its end, regular ones."""
        every = self._interval or FAR
        numbers = range(node.start * self._size // every + 1, node.end * self._size // every + 1)
        ends = (number * every // self._size for number in numbers)
        return [*(end for end in ends if end > node.start), node.end]

    def reach(self, end: int) -> int:
        return min(end, self.width + self.num_sinks)

    def least(self, end: int) -> int:
        return self.reach(end) + 1

    def lacks(self, node: Node, first: int, end: int) -> bool:
        """Whether one of the blocks [first, end) of a path is gone."""
        if first >= end:
            return False
        while end <= node.start:
            assert node.parent is not None
            node = node.parent
        return self._last_gap(node, first, end) >= 0

    def _last_gap(self, node: Node, first: int, end: int) -> int:
        """Return the last gap in blocks [first, end) of a path, -1 if there is none."""
        while True:
            start = node.start
            low, high = max(first, start), min(end, node.end)
            if node.parts[self.place].num_held < node.end - start:
                ids = node.blocks[self.index][low - start : high - start].tobytes()
                at = ids.rfind(b"\xff\xff\xff\xff")
                if at >= 0:
                    return low + at // INT32.itemsize
            if first >= start:
                return -1
            assert node.parent is not None
            node = node.parent

    def _last_held(self, node: Node, end: int) -> int:
        """Return the largest boundary up to `end` whose last block is there, or that needs none; 0 without one.

        The border of a chunk needs none.
        """
        while end:
            while end <= node.start:
                assert node.parent is not None
                node = node.parent
            ids = self._array(node)[: end - node.start]
            held = (ids >= 0).nonzero()[0]
            last = node.start + int(held[-1]) + 1 if len(held) else 0
            border = 0 if self._sliding else end // self._period * self._period
            if max(last, border) > node.start:
                return max(last, border)
            end = node.start
        return 0

    # -- what the tree tells ---------------------------------------------------------------

    def created(self, node: Node) -> None:
        num_blocks = node.end - node.start
        part = WindowPart(num_held=num_blocks, swept=node.start)
        node.parts = (*node.parts, part)
        self.pool.cache(num_blocks)
        self._recount(node, part)
        self._enter(node, part)

    def extended(self, node: Node, num_blocks: int) -> None:
        part = self._part(node)
        part.num_held += num_blocks
        self.pool.cache(num_blocks)
        self.settle(node, part)

    def find_gaps(self, node: Node, num_blocks: int) -> None:
        """Count those of the last blocks of a node, just added, that it has never had."""
        part = self._part(node)
        num_gaps = node.blocks[self.index][-num_blocks:].count(GAP)
        part.num_held -= num_gaps
        self.pool.use(num_gaps)
        self._recount(node, part)
        self._enter(node, part)

    def extended_by_one(self, node: Node) -> None:
        """`extended` by one block, quickly where a whole window or the whole leaf is guarded."""
        part = self._part(node)
        quick = self._quick and part.rank is not None
        if quick and part.listed and part.guarded == self.width:
            part.num_held += 1
            self.pool.cache(1)
            return
        if quick and part.guarded == part.num_held < self.width - 1:
            part.num_held += 1
            part.guarded += 1
            return
        self.extended(node, 1)

    def settle(self, node: Node, part: WindowPart) -> None:
        """Bring a leaf that its writer lengthened up to date."""
        self._recount(node, part)
        if part.need < node.start:
            self._tell(node)
        if not part.listed:
            self._list(node, part)
        if part.rank is None:
            self._file(node, part)

    def split(self, upper: Node, lower: Node) -> None:
        part = self._part(lower)
        ids = self._array(upper)
        top = WindowPart(num_held=int((ids >= 0).sum()), swept=min(part.swept, upper.end))
        part.num_held -= top.num_held
        part.swept = max(part.swept, upper.end)
        upper.parts = (*upper.parts, top)
        if part.need < upper.end:
            top.below, top.need = {part.need: 1}, part.need
        self._recount(lower, part)
        self._recount(upper, top)
        self._enter(lower, part)
        self._enter(upper, top)
        if part.guards:
            self._tell(lower)  # a leaf that grew in place may need less than it did

    def joinable(self, upper: Node) -> bool:
        end = upper.end
        return self._kept_window(end - 1)[1] == end or self.accepted(upper, end) != end

    def joined(self, node: Node, upper: Part) -> None:
        assert isinstance(upper, WindowPart)
        part = self._part(node)
        part.num_held += upper.num_held
        part.guarded += upper.guarded
        part.swept = upper.swept
        self._recount(node, part)
        self._enter(node, part)

    def cut(self, node: Node, num_blocks: int, freed_from: int) -> None:
        part = self._part(node)
        end = node.end - num_blocks
        ids = node.blocks[self.index]
        tail = [block for block in ids[end - node.start :] if block >= 0]
        kept = 0
        if freed_from > end and ids[end - node.start] >= 0:
            kept = 1
        part.num_held -= len(tail)
        part.swept = min(part.swept, end)
        self.pool.use(kept)
        self.pool.drop(memoryview(array("i", tail[kept:])))
        self._recount(node, part, end)
        if not part.num_held:
            self._unfile(node, part)

    def merge(self, node: Node, own: memoryview[int]) -> None:
        """Replace a sequence's blocks of this run by the tree's, giving its own where gaps are."""
        part = self._part(node)
        ids = node.blocks[self.index]
        length = node.end - node.start
        if part.num_held == length:
            self.pool.give_back(without_gaps(own))
            own[:] = memoryview(ids)
            return
        mine = np.array(own, dtype=INT32)
        merged = self._array(node).copy()
        gaps = merged == GAP
        merged[gaps] = mine[gaps]
        spare = mine[~gaps & (mine != GAP)]
        if len(spare):
            self.pool.give_back(memoryview(array("i", spare.tolist())))
        num_healed = int((merged != GAP).sum()) - part.num_held
        ids[:] = array("i", merged.tolist())
        own[:] = memoryview(ids)
        part.num_held += num_healed
        part.swept = node.start
        self.pool.cache(num_healed)
        self._recount(node, part)
        self._enter(node, part)

    # -- eviction --------------------------------------------------------------------------

    def _list(self, node: Node, part: Part) -> None:
        """Only a node that is longer than its window has passing blocks."""
        if self.first(node.end) > max(node.start, self.num_sinks):
            super()._list(node, part)

    def _sweep(self, node: Node, part: Part, num_blocks: int, tell: Tell | None) -> int:
        assert isinstance(part, WindowPart)
        stop = self.first(node.end)
        at = max(part.swept, node.start, self.num_sinks)
        done = 0
        while at < stop and done < num_blocks:
            low, high = self._kept_window(at)
            if low <= at:
                at = high
                continue
            until = min(low, stop, at + num_blocks - done)
            done += self._free(node, part, at, until)
            at = until
        part.swept = at
        if at >= stop:
            part.listed = False
        return done

    def _thin(self, node: Node, part: Part, num_blocks: int, tell: Tell | None) -> int:
        start = max(node.start, self.num_sinks)
        stop = min(max(self._needed(self._part(node), node.end), start), node.end)
        if stop <= start:
            return 0
        if part.num_held == node.num_blocks:
            end = min(stop, start + num_blocks)
        else:
            ids = self._array(node)[start - node.start : stop - node.start]
            held = (ids >= 0).nonzero()[0][:num_blocks]
            if not len(held):
                return 0
            end = start + int(held[-1]) + 1
        if tell is not None:
            tell(node, range(start, end), self.index)
        return self._free(node, part, start, end)

    def is_spent(self, node: Node) -> bool:
        if node.parts[self.place].num_held > self._sinks_in(node):
            return False
        return self._quick or self.accepted(node, node.end) <= node.start

    def unthinned(self, node: Node) -> int:
        return 0 if node.locks else self._sinks_in(node)

    def check(self, node: Node) -> str:
        part = self._part(node)
        needs = [(self._part(child).need, child.start) for child in node.children.values()]
        below = Counter(need for need, start in needs if need < start)
        if below != Counter(part.below or {}):
            return f"those below need {dict(below)}, it knows of {part.below}"
        need = min([FAR, *below, *[self.first(node.end)] * (part.guards > 0)])
        is_leaf = not node.children
        if part.need != need and not (is_leaf and FAR > need > part.need):
            return f"blocks from {need} on are needed, it says {part.need}"
        return super().check(node)

    def held(self, node: Node) -> Iterator[tuple[int, int]]:
        for at, block in enumerate(node.blocks[self.index], node.start + 1):
            if block >= 0:
                yield at, block

    def _kept_window(self, at: int) -> tuple[int, int]:
        """Return the first window at a multiple of the interval that ends after block `at`."""
        if not self._interval:
            return FAR, FAR
        number = -(-(at + 1) * self._size // self._interval)
        end = number * self._interval // self._size
        return self.first(end), end

    def _free(self, node: Node, part: Part, first: int, end: int) -> int:
        """Free the blocks of a part that are there in [first, end)."""
        ids = node.blocks[self.index]
        low, high = first - node.start, end - node.start
        run = ids[low:high]
        if GAP in run:
            run = array("i", [block for block in run if block >= 0])
        if run:
            self.pool.drop(memoryview(run))
            ids[low:high] = array("i", [GAP]) * (high - low)
            part.num_held -= len(run)
        return len(run)

    def _sinks_in(self, node: Node) -> int:
        return max(min(self.num_sinks, node.end) - node.start, 0)

    def _array(self, node: Node) -> IntArray:
        """Return a copy of a node's blocks: an array that is viewed cannot grow."""
        return np.array(node.blocks[self.index], dtype=INT32)

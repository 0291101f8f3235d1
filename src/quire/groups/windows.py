"""Windowed groups: sliding windows and chunks, which need the last blocks of a prefix only."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import ClassVar, cast

import numpy as np

from quire.core.blocks import GAP
from quire.core.groups import Kind
from quire.core.node import Node
from quire.core.sparse import Site, Standing, TableGroup, Tell
from quire.core.tokens import INT32, IntArray
from quire.groups.guards import FAR, Guards, WindowPart
from quire.groups.shedding import Part, SheddingGroup


class WindowKind(Kind, frozen=True):
    """Layers that read the end of a prefix, and maybe its head.

    `is_sliding`  whether the window moves on with each token
    """

    is_sliding: ClassVar[bool] = False

    @property
    def span(self) -> int:
        """The most tokens that it reads at the end."""
        raise NotImplementedError

    @property
    def head(self) -> int:
        """Number of tokens that it reads at the start."""
        return 0

    @property
    def keep_every(self) -> int:
        """Windows at multiples of so many tokens are kept longer than what lies between; 0 for none."""
        return 0

    def first_block(self, num_tokens: int, block_size: int) -> int:
        """Return the first block a hit of `num_tokens` needs, sinks apart; it never falls as they rise."""
        raise NotImplementedError

    def border(self, end: int, block_size: int) -> int:
        """Return the last boundary up to `end` that needs no block of this group; 0 if none.

        Such a boundary is the end of a chunk of chunked attention.
        """
        del end, block_size
        return 0

    def group(self, site: Site) -> WindowGroup:
        return WindowGroup(site, self)

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Return its last window, those that are kept, and one block more, into which the sequence grows."""
        windows = 1 + (num_tokens // self.keep_every if self.keep_every else 0)
        kept = windows * (-(-self.span // block_size) + 1) - (-self.head // block_size)
        return min(-(-num_tokens // block_size), kept) + 1


class WindowGroup(SheddingGroup, TableGroup):
    """A sliding-window or chunked-attention group: the blocks a hit needs, and the order of eviction."""

    def __init__(self, site: Site, kind: WindowKind) -> None:
        super().__init__(site)
        self._size = site.block_size
        self._kind = kind
        self._interval = kind.keep_every
        self.num_sinks = -(-kind.head // site.block_size)
        self.width = -(-kind.span // site.block_size)
        self._quick = kind.is_sliding and not self.num_sinks
        self._guards = Guards(site, kind.first_block, self.num_sinks, self)

    def first_needed(self, end: int) -> int:
        """Return the first block that a hit at this boundary needs, sinks apart."""
        return self._kind.first_block(end * self._size, self._size)

    def first_read(self, num_tokens: int) -> int:
        return self._kind.first_block(num_tokens, self._size)

    # -- what a hit needs ------------------------------------------------------------------

    def accepted(self, node: Node, end: int) -> int:
        while end:
            first = self.first_needed(end)
            if first >= end:
                return end
            node = node.holding(end - 1)
            whole = first >= node.start and node.parts[self.place].num_held == node.num_blocks
            gap = -1 if whole else self._last_gap(node, first, end)
            if gap < 0:
                return end
            end = gap if gap < end - 1 else self._last_held(node, gap)
        return 0

    def required(self, end: int) -> list[int]:
        first = self.first_needed(end)
        return [*range(min(self.num_sinks, first, end)), *range(first, end)]

    def kept_ends(self, node: Node) -> list[int]:
        every = self._interval or FAR
        numbers = range(node.start * self._size // every + 1, node.end * self._size // every + 1)
        ends = (number * every // self._size for number in numbers)
        return [*(end for end in ends if end > node.start), node.end]

    def block_at(self, node: Node, at: int) -> int:
        node = node.holding(at)
        return node.blocks[self.index][at - node.start]

    def reach(self, end: int) -> int:
        return min(end, self.width + self.num_sinks)

    def least(self, end: int) -> int:
        return self.reach(end) + 1

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
        """Return the largest boundary up to `end` whose last block is there, or that needs none; 0 without one."""
        while end:
            node = node.holding(end - 1)
            held = (self._array(node)[: end - node.start] >= 0).nonzero()[0]
            last = node.start + int(held[-1]) + 1 if len(held) else 0
            last = max(last, self._kind.border(end, self._size))
            if last > node.start:
                return last
            end = node.start
        return 0

    # -- what the tree tells ---------------------------------------------------------------

    def created(self, node: Node) -> None:
        num_blocks = node.end - node.start
        part = WindowPart(num_held=num_blocks, swept=node.start)
        node.parts = (*node.parts, part)
        self.pool.cache(num_blocks)
        self._guards.recount(node, part)
        self.enter(node, part)

    def extended(self, node: Node, num_blocks: int) -> None:
        part: WindowPart = node.parts[self.place]
        part.num_held += num_blocks
        self.pool.cache(num_blocks)
        self._guards.recount(node, part)
        if part.need < node.start:
            self._guards.tell(node)
        if not part.listed:
            self.list_passing(node, part)
        if part.rank is None:
            self.file(node, part)

    def find_gaps(self, node: Node, num_blocks: int) -> None:
        part: WindowPart = node.parts[self.place]
        num_gaps = node.blocks[self.index][-num_blocks:].count(GAP)
        part.num_held -= num_gaps
        self.pool.use(num_gaps)
        self._guards.recount(node, part)
        self.enter(node, part)

    def extended_by_one(self, node: Node) -> None:
        """`extended` by one block, quickly where a whole window or the whole leaf is guarded.

        In the second case the nodes above go on protecting what the window has passed, until all of it lies in the leaf.
        """
        part: WindowPart = node.parts[self.place]
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

    def split(self, upper: Node, lower: Node) -> None:
        part: WindowPart = lower.parts[self.place]
        ids = self._array(upper)
        top = WindowPart(num_held=int((ids >= 0).sum()), swept=min(part.swept, upper.end))
        part.num_held -= top.num_held
        part.swept = max(part.swept, upper.end)
        upper.parts = (*upper.parts, top)
        if part.need < upper.end:
            top.below, top.need = {part.need: 1}, part.need
        self._guards.recount(lower, part)
        self._guards.recount(upper, top)
        self.stay(lower, part)
        self.enter(upper, top)
        if part.guards:
            self._guards.tell(lower)  # a leaf that grew in place may need less than it did

    def joinable(self, upper: Node) -> bool:
        end = upper.end
        return self._kept_window(end - 1)[1] == end or self.accepted(upper, end) != end

    def joined(self, node: Node, upper: WindowPart, at: int, *, used: bool) -> None:
        part: WindowPart = node.parts[self.place]
        if upper.swept < at:
            part.swept = upper.swept
        part.num_held += upper.num_held
        part.guarded += upper.guarded
        self._guards.recount(node, part)
        (self.enter if used else self.stay)(node, part)

    def cut(self, node: Node, num_blocks: int, freed_from: int) -> None:
        part: WindowPart = node.parts[self.place]
        end = node.end - num_blocks
        ids = node.blocks[self.index]
        tail = [block for block in ids[end - node.start :] if block >= 0]
        kept = int(freed_from > end and ids[end - node.start] >= 0)
        part.num_held -= len(tail)
        part.swept = min(part.swept, end)
        self.pool.use(kept)
        self.pool.drop(memoryview(array("i", tail[kept:])))
        self._guards.recount(node, part, end)
        if not part.num_held:
            self.unfile(node, part)

    def merge(self, node: Node, own: memoryview[int]) -> None:
        part: WindowPart = node.parts[self.place]
        ids = node.blocks[self.index]
        if part.num_held == node.num_blocks:
            self.pool.drop_hold(own)
            own[:] = memoryview(ids)
            return
        mine, merged = np.array(own, dtype=INT32), self._array(node)
        gaps = merged == GAP
        merged[gaps] = mine[gaps]
        spare = mine[~gaps & (mine != GAP)]
        self.pool.give_back(memoryview(array("i", spare.tolist())))
        num_healed = int((merged != GAP).sum()) - part.num_held
        ids[:] = array("i", merged.tolist())
        own[:] = memoryview(ids)
        part.num_held += num_healed
        part.swept = node.start
        self.pool.cache(num_healed)
        self._guards.recount(node, part)
        self.enter(node, part)
        for tell in self.listeners:
            tell(node, (node.start + (gaps & (merged != GAP)).nonzero()[0]).tolist(), True)

    # -- guards ----------------------------------------------------------------------------

    def guard(self, node: Node) -> None:
        node.parts[self.place].guards += 1
        self._guards.tell(node)

    def unguard(self, node: Node) -> None:
        node.parts[self.place].guards -= 1
        self._guards.tell(node)

    def dismiss(self, node: Node) -> None:
        node.parts[self.place].guards -= 1
        self._guards.tell(node, self.stay)

    def lend(self, node: Node, more: int) -> None:
        self._guards.lend(node, more)

    def recount(self, node: Node) -> None:
        if self.num_sinks > node.start:
            self._guards.recount(node, node.parts[self.place])

    def would_guard(self, standing: Standing) -> int:
        return self._guards.would_guard(standing)

    # -- eviction --------------------------------------------------------------------------

    def list_passing(self, node: Node, part: Part) -> None:
        """Passing blocks lie in a node longer than its window, behind what was swept."""
        swept = cast("WindowPart", part).swept
        if self.first_needed(node.end) > max(node.start, self.num_sinks, swept):
            super().list_passing(node, part)

    def sweep(self, node: Node, part: WindowPart, num_blocks: int, tell: Tell | None) -> int:
        del tell  # no kept boundary needs them
        stop = min(self.first_needed(node.end), self._guards.needed(part, node.end))
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

    def thin(self, node: Node, part: WindowPart, num_blocks: int, tell: Tell | None) -> int:
        start = max(node.start, self.num_sinks)
        stop = min(max(self._guards.needed(part, node.end), start), node.end)
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

    def check(self, node: Node, num_standing: int, num_lent: int) -> str:
        wrong = self._guards.check(node, num_lent)
        return wrong or super().check(node, num_standing, num_lent)

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
        return self.first_needed(end), end

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
            for tell in self.listeners:
                tell(node, range(first, end), False)
        return len(run)

    def _sinks_in(self, node: Node) -> int:
        return max(min(self.num_sinks, node.end) - node.start, 0)

    def _array(self, node: Node) -> IntArray:
        """Return a copy of a node's blocks: an array that is viewed cannot grow."""
        return np.array(node.blocks[self.index], dtype=INT32)

"""Shedding: in which order the nodes of a sparse group lose blocks."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import msgspec

from quire.core.node import FOREVER, Node
from quire.core.sparse import Drop, Site, SparseGroup, Tell

Queue: TypeAlias = OrderedDict[Node, None]

Listener: TypeAlias = Callable[[Node, Sequence[int], bool], None]
"""Is told of blocks of a node, counted from the root, rising, that its group has now, or has no more, while the node stays."""


class Part(msgspec.Struct, gc=False, eq=False):
    """A group's share of a node.

    `guards`   sequences and pins that stand at the end of the node
    `guarded`  blocks of the part that those references protect
    `num_held` blocks of the part that are there
    `listed`   whether it stands among the parts that may have passing blocks
    `rank`     its eviction class, (retained, priority); None while nothing of it can be evicted by itself
    """

    guards: int = 0
    guarded: int = 0
    num_held: int = 0
    listed: bool = False
    rank: tuple[bool, int] | None = None


class SheddingGroup(SparseGroup):
    """A sparse group that loses blocks by class and recency; what these are, each says in `sweep` and `thin`.

    Passing blocks go first, which no kept boundary needs; then kept ones, the lowest class
    first; in both, from the part used longest ago. Kept boundaries are the ends of nodes
    (leaf ends, branch points) and multiples of an interval.
    """

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._now = site.order.now
        self._passing: Queue = OrderedDict()
        self._kept: defaultdict[tuple[bool, int], Queue] = defaultdict(OrderedDict)
        self._next_expiry = FOREVER
        self.listeners: list[Listener] = []

    @abstractmethod
    def sweep(self, node: Node, part: Any, num_blocks: int, tell: Tell | None) -> int:
        """Free up to so many passing blocks of a part; unlist it when it has no more."""

    @abstractmethod
    def thin(self, node: Node, part: Any, num_blocks: int, tell: Tell | None) -> int:
        """Free up to so many unprotected blocks of a part."""

    def unthinned(self, node: Node) -> int:
        """Return how many cached blocks of a node leave with the node alone."""
        del node
        return 0

    def touched(self, node: Node) -> None:
        part = node.parts[self.place]
        if part.rank is not None:
            self.file(node, part)
            if part.listed:
                self._passing.move_to_end(node)

    def forget(self, node: Node) -> None:
        part = node.parts[self.place]
        self.unfile(node, part)
        if part.listed:
            del self._passing[node]
            part.listed = False

    def clear(self) -> None:
        self._passing.clear()
        self._kept.clear()

    def enter(self, node: Node, part: Part) -> None:
        """Put a part into both orders as the one used last, if anything is there."""
        if part.num_held:
            self.file(node, part)
            self.list_passing(node, part)
        else:
            self.unfile(node, part)

    def stay(self, node: Node, part: Part) -> None:
        """Leave a part where it is in both orders; a part that is in neither goes first."""
        was_filed, was_listed = part.rank is not None, part.listed
        if part.num_held and not was_filed:
            self.file(node, part)
            if part.rank is not None:
                self._kept[part.rank].move_to_end(node, last=False)
        if part.num_held and not was_listed:
            self.list_passing(node, part)
            if part.listed:
                self._passing.move_to_end(node, last=False)

    def list_passing(self, node: Node, part: Part) -> None:
        """Put a part among those that may have passing blocks, as the one used last."""
        part.listed = True
        self._passing[node] = None
        self._passing.move_to_end(node)

    def file(self, node: Node, part: Part) -> None:
        """Put a part into its class, as the one used last."""
        keep_until = node.keep_until
        rank = (keep_until > 0 and keep_until > self._now(), node.priority)
        if part.rank != rank:
            self.unfile(node, part)
            part.rank = rank
            if rank[0]:
                self._next_expiry = min(self._next_expiry, keep_until)
        queue = self._kept[rank]
        queue[node] = None
        queue.move_to_end(node)

    def unfile(self, node: Node, part: Part) -> None:
        """Take a part out of its class."""
        if part.rank is not None:
            del self._kept[part.rank][node]
            part.rank = None

    def evict(self, num_blocks: int, drop: Drop, tell: Tell | None) -> int:
        done = 0
        while self._passing and done < num_blocks:
            node = next(iter(self._passing))
            part = node.parts[self.place]
            done += self.sweep(node, part, num_blocks - done, tell)
            if not part.listed:
                del self._passing[node]
        if done < num_blocks:
            done += self._evict_kept(num_blocks - done, drop, tell)
        return done

    def _evict_kept(self, num_blocks: int, drop: Drop, tell: Tell | None) -> int:
        self._expire()
        done = 0
        for rank in sorted(self._kept):
            queue = self._kept[rank]
            for _ in range(len(queue)):
                if done >= num_blocks or not queue:
                    break
                node = next(iter(queue))
                part = node.parts[self.place]
                freed = self.thin(node, part, num_blocks - done, tell)
                done += freed
                if not part.num_held or not freed:
                    self.unfile(node, part)
                    if node.evictable and self.is_spent(node):
                        drop(node)
                elif done < num_blocks:
                    queue.move_to_end(node)
        return done

    def _expire(self) -> None:
        """Put parts whose retention ran out among the others, as those used longest ago."""
        now = self._now()
        if now < self._next_expiry:
            return
        retained = [node for rank in self._kept if rank[0] for node in self._kept[rank]]
        later = [node.keep_until for node in retained if node.keep_until > now]
        self._next_expiry = min(later, default=FOREVER)
        for node in reversed(retained):
            if node.keep_until <= now:
                part = node.parts[self.place]
                self.file(node, part)
                self._kept[part.rank].move_to_end(node, last=False)

    def num_cached(self, node: Node) -> int:
        part = node.parts[self.place]
        return part.num_held - part.guarded

    def check(self, node: Node, num_standing: int, num_lent: int) -> str:
        del num_lent  # a window's
        part = node.parts[self.place]
        held = sum(1 for _ in self.held(node))
        if part.guards != num_standing:
            return f"{part.guards} guards for {num_standing} that stand"
        if held != part.num_held:
            return f"{held} blocks are there, counted {part.num_held}"
        if part.listed != (node in self._passing):
            return "the list of passing parts is wrong"
        if part.rank is not None and node not in self._kept[part.rank]:
            return "its eviction class is wrong"
        if part.rank is None and part.num_held > part.guarded + self.unthinned(node):
            return "it has blocks to give and no eviction class"
        return ""

    def eviction_order(self) -> list[int]:
        kept = [node.end for rank in sorted(self._kept) for node in self._kept[rank]]
        return [node.end for node in self._passing] + [-1] + kept

"""Sparse groups: layer groups that may drop blocks of a prefix and keep the rest of it.

A full-attention group lives and dies with the nodes of the tree. A group with a window or a
state needs little of a long prefix, so its blocks are references, cached and evicted on terms
of their own: what it drops leaves a gap in the node, and the node stays.

    node           |=========== run of tokens, blocks of the full groups ===========|
    sliding group      . . . . [window] . . . . . . . [window] . . . . . . . [window]
    recurrent group                   *                      *                      *
                              a multiple of `interval`    another        end of the node
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import msgspec

from quire.core.blocks import BlockPool
from quire.core.node import FOREVER, Node, Part
from quire.core.order import Order

Queue: TypeAlias = OrderedDict[Node, None]

Drop = Callable[[Node], None]
"""Takes a node that no hit can end in any more out of the tree."""

Tell = Callable[[Node, range, int], None]
"""Is told of the blocks of a node that one group is about to free, though a kept boundary needs them."""

FAR = 2**31
"""Beyond all blocks."""


class WindowPart(Part, gc=False, eq=False):
    """The blocks of a node in a windowed group: `node.blocks[group]`, with gaps.

    `need`   the first block needed by those who stand at the node's end or below it; FAR without any
    `below`  the children that need blocks of this node or above it, counted by the first that they need
    `swept`  the first block that may be passing: those before it were looked at
    """

    below: dict[int, int] | None = None
    need: int = FAR
    swept: int = 0


class Standing(msgspec.Struct, frozen=True):
    """A change of who stands where, to be counted before it is made.

    `gone`      node -> how many fewer stand at its end
    `unlocked`  node -> how many fewer lock it
    `node`      where one more would stand, at boundary `end`; None for nobody
    """

    gone: Mapping[Node, int]
    unlocked: Mapping[Node, int]
    node: Node | None = None
    end: int = 0

    def path(self) -> list[Node]:
        """Return the nodes that this touches, children before their parents."""
        ends = [*self.gone] if self.node is None else [*self.gone, self.node]
        touched = dict.fromkeys(each for node in ends for each in node.path())
        return sorted(touched, key=lambda node: -node.end)


class Site(msgspec.Struct, frozen=True):
    """Where a sparse group stands: its index among all groups and its place among the sparse."""

    index: int
    place: int
    pool: BlockPool
    evictor: Order


class SparseGroup(ABC):
    """The parts of all nodes in one sparse group, and the order in which they lose blocks.

    Blocks in the tree are cached unless they are guarded:

        pool.num_cached == sum(part.num_held - part.guarded)

    Eviction takes passing blocks first, which no kept boundary needs; then kept ones, the
    lowest class (retained, priority) first; in both, from the part used longest ago. Kept
    boundaries are the ends of nodes (leaf ends, branch points) and multiples of an interval.
    """

    def __init__(self, site: Site) -> None:
        self.index = site.index
        self.place = site.place
        self.pool = site.pool
        self._evictor = site.evictor
        self._passing: Queue = OrderedDict()
        self._kept: dict[tuple[bool, int], Queue] = {}
        self._next_expiry = FOREVER

    # -- what a hit needs ------------------------------------------------------------------

    @abstractmethod
    def accepted(self, node: Node, end: int) -> int:
        """Return the largest boundary up to block `end`, on the path to `node`, for a hit."""

    @abstractmethod
    def reach(self, end: int) -> int:
        """Return how many blocks a hit at this boundary needs at most."""

    @abstractmethod
    def least(self, end: int) -> int:
        """Return how many blocks a sequence of so many must be able to hold at a time."""

    # -- what the tree tells ---------------------------------------------------------------

    @abstractmethod
    def created(self, node: Node) -> None:
        """Make the part of a node that was just added; its blocks were active, are cached now."""

    @abstractmethod
    def extended(self, node: Node, num_blocks: int) -> None:
        """The leaf grew by so many active blocks, in place."""

    @abstractmethod
    def split(self, upper: Node, lower: Node) -> None:
        """`upper` took over the head of `lower`."""

    @abstractmethod
    def joinable(self, upper: Node) -> bool:
        """Whether nothing is kept for the end of this node alone, so that it need not be an end."""

    @abstractmethod
    def joined(self, node: Node, upper: Part) -> None:
        """`node` took over the run of the node above it, whose part this was."""

    @abstractmethod
    def cut(self, node: Node, num_blocks: int, freed_from: int) -> None:
        """The last blocks of a leaf leave the tree; those from `freed_from` on are freed."""

    @abstractmethod
    def guard(self, node: Node) -> None:
        """Protect what a hit at the end of this node needs."""

    @abstractmethod
    def unguard(self, node: Node) -> None:
        """Take one protection of the end of this node away."""

    @abstractmethod
    def would_guard(self, standing: Standing) -> int:
        """Return how many more blocks would be guarded, below 0 for fewer. Changes nothing."""

    def touched(self, node: Node) -> None:
        """A request found this node."""
        part = node.parts[self.place]
        if part.rank is not None:
            self._file(node, part)
            if part.listed:
                self._passing.move_to_end(node)

    def forget(self, node: Node) -> None:
        """The node left the tree."""
        part = node.parts[self.place]
        self._unfile(node, part)
        if part.listed:
            del self._passing[node]
            part.listed = False

    def clear(self) -> None:
        """Forget all nodes: the tree ends."""
        self._passing.clear()
        self._kept.clear()

    # -- eviction --------------------------------------------------------------------------

    def evict(self, num_blocks: int, drop: Drop, tell: Tell | None) -> int:
        """Free up to `num_blocks` cached blocks; return how many were."""
        done = self._evict_passing(num_blocks, tell)
        if done < num_blocks:
            done += self._evict_kept(num_blocks - done, drop, tell)
        return done

    @abstractmethod
    def _sweep(self, node: Node, part: Part, num_blocks: int, tell: Tell | None) -> int:
        """Free up to so many passing blocks of a part; unlist it when it has no more."""

    @abstractmethod
    def _thin(self, node: Node, part: Part, num_blocks: int, tell: Tell | None) -> int:
        """Free up to so many unprotected blocks of a part."""

    @abstractmethod
    def unthinned(self, node: Node) -> int:
        """Return how many cached blocks of a node leave with the node alone."""

    @abstractmethod
    def is_spent(self, node: Node) -> bool:
        """Whether no hit can end inside this node any more, for want of this group's blocks."""

    @abstractmethod
    def held(self, node: Node) -> Iterator[tuple[int, int]]:
        """Iterate over (boundary in blocks, block id) of what is there, for people and checks."""

    def _evict_passing(self, num_blocks: int, tell: Tell | None) -> int:
        done = 0
        while self._passing and done < num_blocks:
            node = next(iter(self._passing))
            part = node.parts[self.place]
            done += self._sweep(node, part, num_blocks - done, tell)
            if not part.listed:
                del self._passing[node]
        return done

    def _evict_kept(self, num_blocks: int, drop: Drop, tell: Tell | None) -> int:
        self._refile_expired()
        done = 0
        for rank in sorted(self._kept):
            order = self._kept[rank]
            for _ in range(len(order)):
                if done >= num_blocks or not order:
                    break
                node = next(iter(order))
                part = node.parts[self.place]
                freed = self._thin(node, part, num_blocks - done, tell)
                done += freed
                if not part.num_held or not freed:
                    self._unfile(node, part)
                    if node.evictable and self.is_spent(node):
                        drop(node)
                elif done < num_blocks:
                    order.move_to_end(node)
        return done

    def _refile_expired(self) -> None:
        """Put parts whose retention ran out among the others, as those used longest ago."""
        now = self._evictor.now()
        if now < self._next_expiry:
            return
        retained = [node for rank in self._kept if rank[0] for node in self._kept[rank]]
        self._next_expiry = min(
            (n.keep_until for n in retained if n.keep_until > now), default=FOREVER
        )
        for node in reversed(retained):
            if node.keep_until <= now:
                part = node.parts[self.place]
                self._file(node, part)
                assert part.rank is not None
                self._kept[part.rank].move_to_end(node, last=False)

    def _enter(self, node: Node, part: Part) -> None:
        """Put a part into both eviction orders as the one used last, if anything is there."""
        if part.num_held:
            self._file(node, part)
            self._list(node, part)
        else:
            self._unfile(node, part)

    def _list(self, node: Node, part: Part) -> None:
        """Put a part among those that may have passing blocks, as the one used last."""
        if part.listed:
            self._passing.move_to_end(node)
        else:
            part.listed = True
            self._passing[node] = None

    def _file(self, node: Node, part: Part) -> None:
        """Put a part into its eviction class, as the one used last."""
        keep_until, now_in = node.keep_until, part.rank
        if now_in is not None and not keep_until and now_in == (False, node.priority):
            self._kept[now_in].move_to_end(node)
            return
        rank = (keep_until > 0 and keep_until > self._evictor.now(), node.priority)
        if rank[0]:
            self._next_expiry = min(self._next_expiry, keep_until)
        if part.rank is not None and part.rank != rank:
            del self._kept[part.rank][node]
        order = self._kept.get(rank)
        if order is None:
            order = self._kept[rank] = OrderedDict()
        order[node] = None
        order.move_to_end(node)
        part.rank = rank

    def _unfile(self, node: Node, part: Part) -> None:
        if part.rank is not None:
            del self._kept[part.rank][node]
            part.rank = None

    def check(self, node: Node) -> str:
        """Return what is wrong with the part of this node, or nothing."""
        part = node.parts[self.place]
        held = sum(1 for _ in self.held(node))
        if held != part.num_held:
            return f"{held} blocks are there, counted {part.num_held}"
        if part.listed != (node in self._passing):
            return "the list of passing parts is wrong"
        if part.rank is not None and node not in self._kept[part.rank]:
            return "its eviction class is wrong"
        if part.rank is None and part.num_held > part.guarded + self.unthinned(node):
            return "it has blocks to give and no eviction class"
        return ""

    def order(self) -> list[int]:
        """Return the ends of the nodes in both eviction orders, for snapshots."""
        kept = [node.end for rank in sorted(self._kept) for node in self._kept[rank]]
        return [node.end for node in self._passing] + [-1] + kept


def sparse_at(groups: tuple[SparseGroup, ...], index: int) -> SparseGroup | None:
    """Return the sparse group of this index, None for a full one."""
    return next((group for group in groups if group.index == index), None)

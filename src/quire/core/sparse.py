"""Sparse groups, as the kernel knows them: layer groups that keep only some blocks of a prefix.

A full-attention group lives and dies with the nodes of the tree. A group with a window or a state needs little of
a long prefix, so its blocks are guarded, cached and evicted by rules of their own. A block that such a group drops
leaves a gap in the node, and the node stays. This module is the kernel's interface to these groups; `quire.groups`
has those that ship.

    node           |=========== run of tokens, blocks of the full groups ===========|
    sliding group      . . . . [window] . . . . . . . [window] . . . . . . . [window]
    recurrent group                   *                      *                      *
                              a multiple of `interval`    another        end of the node

A boundary is a number of blocks from the root. A sequence or pin at the end of a node has locked its path in the
full groups, and guards that end in the sparse ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from quire.core.blocks import BlockPool
from quire.core.node import Node
from quire.core.order import Order
from quire.core.tokens import IntArray

Drop = Callable[[Node], None]
"""Takes a node that no hit can end in any more out of the tree."""

Tell = Callable[[Node, range, int], None]
"""Is told of the blocks of a node that one group is about to free, though a kept boundary needs them."""


SomeGroup = TypeVar("SomeGroup", bound="SparseGroup")


class Site(msgspec.Struct, frozen=True):
    """Where a sparse group stands: its index among all groups, its place among the sparse, what it works with."""

    index: int
    place: int
    pool: BlockPool
    order: Order
    block_size: int


class Standing(msgspec.Struct, frozen=True):
    """A change of who stands where, to be counted before it is made.

    `gone`      node -> how many fewer stand at its end
    `unlocked`  node -> how many fewer lock it
    `node`      where one more would stand, at boundary `end`; None for nobody
    `lent`      the source of a waiting request, counted as released; None for none
    """

    gone: Mapping[Node, int]
    unlocked: Mapping[Node, int]
    node: Node | None = None
    end: int = 0
    lent: Node | None = None

    def path(self) -> list[Node]:
        """Return the nodes that this touches, children before their parents."""
        ends = [*self.gone, *(each for each in (self.node, self.lent) if each is not None)]
        touched = dict.fromkeys(each for node in ends for each in node.path())
        return sorted(touched, key=lambda node: -node.end)


class SparseGroup(ABC):
    """One such group: it hears of every change of the tree, tells its pool, and keeps a struct as `node.parts[place]`.

    Its blocks in the tree are cached unless they are guarded:

        pool.num_cached == sum(num_cached(node))
    """

    def __init__(self, site: Site) -> None:
        self.index = site.index
        self.place = site.place
        self.pool = site.pool

    # -- what a hit needs ------------------------------------------------------------------

    @abstractmethod
    def accepted(self, node: Node, end: int) -> int:
        """Return the largest boundary up to `end`, on the path to `node`, at which a hit is complete.

        Sinks are not checked: they stay as long as their node does.
        """

    @abstractmethod
    def required(self, end: int) -> list[int]:
        """Return which blocks (or states after them) a hit at this boundary needs, rising."""

    @abstractmethod
    def reach(self, end: int) -> int:
        """Return how many blocks a hit at this boundary needs at most."""

    def least(self, end: int) -> int:
        """Return the blocks that a sequence of `end` blocks must be able to hold at a time."""
        return self.reach(end)

    # -- what the tree tells ---------------------------------------------------------------

    @abstractmethod
    def created(self, node: Node) -> None:
        """Make the part of a node that was just added.

        Its blocks go from active to cached, until a sequence or pin guards them.
        """

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
    def joined(self, node: Node, upper: Any, at: int, *, used: bool) -> None:
        """`node` took over the run above it, which ended at boundary `at` and whose part this was.

        `used`  a request has just used both; otherwise the order of eviction stays
        """

    @abstractmethod
    def cut(self, node: Node, num_blocks: int, freed_from: int) -> None:
        """The last blocks of a leaf leave the tree; those from `freed_from` on are freed."""

    @abstractmethod
    def touched(self, node: Node) -> None:
        """A request found this node."""

    @abstractmethod
    def forget(self, node: Node) -> None:
        """The node left the tree."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all nodes: the tree ends."""

    @abstractmethod
    def guard(self, node: Node) -> None:
        """Protect the blocks that a hit at the end of this node needs."""

    @abstractmethod
    def unguard(self, node: Node) -> None:
        """Take one protection of the end of this node away."""

    def dismiss(self, node: Node) -> None:
        """Take a protection away of a request that had no room: no use, so the order of eviction stays."""
        self.unguard(node)

    # -- eviction --------------------------------------------------------------------------

    @abstractmethod
    def evict(self, num_blocks: int, drop: Drop, tell: Tell | None) -> int:
        """Free up to `num_blocks` cached blocks; return how many were."""

    @abstractmethod
    def is_spent(self, node: Node) -> bool:
        """Whether no hit can end inside this node any more, for want of this group's blocks."""

    # -- what others ask -------------------------------------------------------------------

    @abstractmethod
    def would_guard(self, standing: Standing) -> int:
        """Return how many more blocks would be guarded, below 0 for fewer. Changes nothing."""

    @abstractmethod
    def num_cached(self, node: Node) -> int:
        """Return how many blocks of a node are there and not guarded."""

    @abstractmethod
    def held(self, node: Node) -> Iterator[tuple[int, int]]:
        """Iterate over (boundary, block id) of the present blocks of a node."""

    @abstractmethod
    def block_at(self, node: Node, at: int) -> int:
        """Return block `at` of the path to a node, or the state after it; GAP if absent."""

    @abstractmethod
    def kept_ends(self, node: Node) -> list[int]:
        """Return the boundaries in a node, rising, whose blocks are kept longest."""

    @abstractmethod
    def check(self, node: Node, num_standing: int, num_lent: int) -> str:
        """Return the fault in the part of a node, or nothing: `num_standing` at its end, `num_lent` waiting requests."""

    @abstractmethod
    def eviction_order(self) -> list[int]:
        """Return the ends of the nodes in the order in which they lose blocks, for snapshots."""


class TableGroup(SparseGroup):
    """A group in which a sequence has a table of blocks, with gaps behind what its next token reads.

    `num_sinks`  blocks at the head that are never behind; a locked node protects those that it has
    """

    num_sinks: int

    @abstractmethod
    def first_read(self, num_tokens: int) -> int:
        """Return the first block that the next token after so many reads, sinks apart."""

    @abstractmethod
    def recount(self, node: Node) -> None:
        """The node's first reference came, or its last one went: sinks change sides."""

    @abstractmethod
    def lend(self, node: Node, more: int) -> None:
        """Protect all of a node for one more waiting request, or one fewer (-1); the order of eviction stays."""

    @abstractmethod
    def extended_by_one(self, node: Node) -> None:
        """`extended` by one block, at every block that a batch fills; nodes above may learn of it later."""

    @abstractmethod
    def find_gaps(self, node: Node, num_blocks: int) -> None:
        """Count those of the last blocks of a node, just added, that it has never had."""

    @abstractmethod
    def merge(self, node: Node, own: memoryview[int]) -> None:
        """Replace a sequence's blocks of this run by the tree's, giving its own where gaps are."""


class StateGroup(SparseGroup):
    """A group in which a sequence has one block: its state, a copy of the snapshot that it found."""

    @abstractmethod
    def due(self, start: int, stop: int) -> Iterable[int]:
        """Return the ends of blocks, in tokens, at which regular snapshots are due.

        All of [start, stop) are returned, maybe others.
        """

    @abstractmethod
    def keep(self, node: Node, block: int, *, passing: bool) -> None:
        """Enter a snapshot of the state at the end of a node, in a block that was allocated."""

    @abstractmethod
    def rename(self, node: Node, renamed: IntArray) -> None:
        """The blocks of this group were moved: block b is renamed[b] now."""


def sparse_at(groups: tuple[SomeGroup, ...], index: int) -> SomeGroup | None:
    """Return the one of these groups that has this index, if any."""
    return next((group for group in groups if group.index == index), None)

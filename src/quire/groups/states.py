"""Recurrent groups: snapshots of a state, each valid at exactly one boundary."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import msgspec

from quire.core.blocks import GAP
from quire.core.node import Node
from quire.core.sparse import Site, Standing, StateGroup, Tell
from quire.core.tokens import IntArray
from quire.groups.shedding import Part, SheddingGroup


class StatePart(Part, gc=False, eq=False):
    """The snapshots of a node: boundary in blocks from the root -> block id.

    `passing`  boundaries whose snapshots matter only while they are the node's end
    """

    snapshots: dict[int, int] = msgspec.field(default_factory=dict[int, int])
    passing: set[int] = msgspec.field(default_factory=set[int])


class SnapshotGroup(SheddingGroup, StateGroup):
    """A recurrent group. A block is one state, over all layers of the group.

    A guard protects the snapshot at the end of its node, and no other: a running sequence
    works on a copy of its own.
    """

    def __init__(self, site: Site, interval: int | None) -> None:
        super().__init__(site)
        self._size = site.block_size
        self._interval = interval

    # -- what a hit needs ------------------------------------------------------------------

    def accepted(self, node: Node, end: int) -> int:
        while end:
            node = node.holding(end - 1)
            best = max((at for at in self._part(node).snapshots if at <= end), default=0)
            if best:
                return best
            end = node.start
        return 0

    def required(self, end: int) -> list[int]:
        return [end - 1] if end else []

    def kept_ends(self, node: Node) -> list[int]:
        return sorted(self._part(node).snapshots)

    def reach(self, end: int) -> int:
        return min(end, 1)

    def due(self, start: int, stop: int) -> Iterable[int]:
        if self._interval is None:
            return ()
        multiples = range(start // self._interval * self._interval, stop, self._interval)
        return (at // self._size * self._size for at in multiples)

    def block_at(self, node: Node, at: int) -> int:
        node = node.holding(at)
        return self._part(node).snapshots.get(at + 1, GAP) if node.parent is not None else GAP

    def keep(self, node: Node, block: int, *, passing: bool) -> None:
        part = self._part(node)
        part.snapshots[node.end] = block
        part.num_held += 1
        self.pool.cache(1)
        if passing:
            part.passing.add(node.end)
        self.list_passing(node, part)
        self._recount(node, part)
        self.file(node, part)
        for told in self.listeners:
            told(node, [node.end - 1], True)

    def rename(self, node: Node, renamed: IntArray) -> None:
        part = self._part(node)
        part.snapshots = {at: int(renamed[block]) for at, block in part.snapshots.items()}

    # -- what the tree tells ---------------------------------------------------------------

    def created(self, node: Node) -> None:
        node.parts = (*node.parts, StatePart())

    def extended(self, node: Node, num_blocks: int) -> None:
        part = self._part(node)
        self._recount(node, part)
        if part.passing and not part.listed:
            self.list_passing(node, part)
        if part.num_held and part.rank is None:
            self.file(node, part)

    def split(self, upper: Node, lower: Node) -> None:
        part, top = self._part(lower), StatePart()
        for at in [at for at in part.snapshots if at <= upper.end]:
            top.snapshots[at] = part.snapshots.pop(at)
        top.passing = {at for at in part.passing if at in top.snapshots}
        part.passing -= top.passing
        top.num_held, part.num_held = len(top.snapshots), len(part.snapshots)
        upper.parts = (*upper.parts, top)
        self.stay(lower, part)
        self.enter(upper, top)

    def joinable(self, upper: Node) -> bool:
        return upper.end not in self._part(upper).passing

    def joined(self, node: Node, upper: StatePart, at: int, *, used: bool) -> None:
        del at
        part = self._part(node)
        part.snapshots = upper.snapshots | part.snapshots
        part.passing |= upper.passing
        part.num_held = len(part.snapshots)
        part.guarded += upper.guarded
        self._recount(node, part)
        (self.enter if used else self.stay)(node, part)

    def cut(self, node: Node, num_blocks: int, freed_from: int) -> None:
        end = node.end - num_blocks
        part = self._part(node)
        for at in [at for at in part.snapshots if at > end]:
            self._free(part, at)
        self._recount(node, part, end)
        if not part.num_held:
            self.unfile(node, part)

    def guard(self, node: Node) -> None:
        part = self._part(node)
        part.guards += 1
        self._recount(node, part)

    def unguard(self, node: Node) -> None:
        part = self._part(node)
        part.guards -= 1
        self._recount(node, part)
        if part.num_held:
            self.file(node, part)

    def dismiss(self, node: Node) -> None:
        part = self._part(node)
        part.guards -= 1
        self._recount(node, part)
        self.stay(node, part)

    def would_guard(self, standing: Standing) -> int:
        more = 0
        for node in standing.path():
            part = self._part(node)
            guarded = part.guards > standing.gone.get(node, 0) and node.end in part.snapshots
            more += int(guarded) - part.guarded
            if node is standing.node and standing.end in part.snapshots:
                more += not (guarded and standing.end == node.end)
        return more

    # -- eviction --------------------------------------------------------------------------

    def list_passing(self, node: Node, part: Part) -> None:
        """Passing snapshots lie before the end of their node."""
        if self._part(node).passing - {node.end}:
            super().list_passing(node, part)

    def sweep(self, node: Node, part: StatePart, num_blocks: int, tell: Tell | None) -> int:
        gone = sorted(part.passing - {node.end})[:num_blocks]
        self._evict(node, part, gone, tell)
        part.listed = len(part.passing - {node.end}) > 0
        return len(gone)

    def thin(self, node: Node, part: StatePart, num_blocks: int, tell: Tell | None) -> int:
        kept = node.end if part.guards else -1
        gone = [at for at in sorted(part.snapshots) if at != kept][:num_blocks]
        self._evict(node, part, gone, tell)
        return len(gone)

    def is_spent(self, node: Node) -> bool:
        return not node.parts[self.place].num_held

    def held(self, node: Node) -> Iterator[tuple[int, int]]:
        yield from sorted(self._part(node).snapshots.items())

    def _evict(self, node: Node, part: StatePart, gone: list[int], tell: Tell | None) -> None:
        for at in gone:
            if tell is not None:
                tell(node, range(at - 1, at), self.index)
            self._free(part, at)
            for told in self.listeners:
                told(node, [at - 1], False)

    def _free(self, part: StatePart, at: int) -> None:
        block = part.snapshots.pop(at)
        self.pool.drop(memoryview(array("i", [block])))
        part.passing.discard(at)
        part.num_held -= 1

    def _recount(self, node: Node, part: StatePart, end: int | None = None) -> None:
        end = node.end if end is None else end
        guarded = int(part.guards > 0 and end in part.snapshots)
        if guarded != part.guarded:
            self.pool.protect(part.guarded, guarded)
            part.guarded = guarded

    def _part(self, node: Node) -> StatePart:
        return node.parts[self.place]

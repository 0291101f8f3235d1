"""Spilling: which blocks made room, for a data plane that brings their bytes elsewhere first."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from quire.core.kernel import Kernel, Leaving, Watcher
from quire.core.node import Node
from quire.core.sparse import sparse_at
from quire.exchange.digests import Digests


class NamedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block of a layer group, with the digest that names its contents.

    `digest` names the tokens up to its end, as `block_hashes` does; `index` is its place in the
    prefix. A block of a recurrent group is the state after those tokens.
    """

    group: int
    block: int
    index: int
    digest: bytes


class Spill(Watcher):
    """Blocks that were evicted since the last `take`, each under the last name it had.

    So it is never longer than the pools: a block that was given out and evicted again stands
    in it once. Blocks that wait for a planned copy hold nothing yet and are left out, and so are
    passing blocks of windows, which no boundary needs that is kept, and what `invalidate` and `clear` drop.
    """

    needs = (Digests,)

    def begin(self, kernel: Kernel) -> None:
        self._tree, self._digests = kernel.tree, kernel.watchers.of(Digests)
        self._groups = [g for g, _ in kernel.tree.full] + [g.index for g in kernel.tree.sparse]
        self._named: dict[tuple[int, int], tuple[int, bytes]] = {}

    def leaving(self, node: Node, blocks: range, group: int | None, why: Leaving) -> None:
        if why == "cleared":
            self._named.clear()
        if why != "evicted":
            return
        digests, start = self._digests.of(node), node.start
        for each in self._groups if group is None else (group,):
            waiting = self._tree.pools[each].waiting
            for index, block in self._held(node, each, blocks):
                self._named.pop((each, block), None)
                if block not in waiting:
                    self._named[each, block] = (index, digests[index - start])

    def take(self) -> list[NamedBlock]:
        """Return the blocks in the order of their eviction, and start anew.

        Their bytes are in place until something is written: call it after each operation that may
        evict, before its copies are done.
        """
        taken = [NamedBlock(*where, *what) for where, what in self._named.items()]
        self._named.clear()
        return taken

    def _held(self, node: Node, group: int, blocks: range) -> Iterator[tuple[int, int]]:
        """Iterate over (index, block) of those blocks that are present."""
        sparse = sparse_at(self._tree.sparse, group)
        if sparse is None:
            first = blocks.start - node.start
            yield from zip(blocks, node.blocks[group][first : first + len(blocks)], strict=True)
            return
        for end, block in sparse.held(node):
            if end - 1 in blocks:
                yield end - 1, block

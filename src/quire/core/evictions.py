"""Which blocks made room: for a data plane that brings their bytes elsewhere first."""

from __future__ import annotations

from collections.abc import Sequence as Items

import msgspec

from quire.core.blocks import BlockPool
from quire.core.digests import Digests
from quire.core.node import Node


class NamedBlock(msgspec.Struct, frozen=True, gc=False):
    """A block of a layer group, and what its bytes are.

    `digest` names the tokens up to its end, as `block_hashes` does; `index` is its place in the
    prefix. A block of a recurrent group is the state after those tokens.
    """

    group: int
    block: int
    index: int
    digest: bytes


class EvictionLog:
    """Blocks that were evicted since the last `take`, each under the last name it had.

    So it is never longer than the pools: a block that was given out and evicted again stands
    in it once. Blocks that wait for a planned copy hold nothing yet and are left out, and so are
    passing blocks of windows, which no boundary needs that is kept.
    """

    def __init__(self, pools: tuple[BlockPool, ...], digests: Digests) -> None:
        self._pools = pools
        self._digests = digests
        self._named: dict[tuple[int, int], tuple[int, bytes]] = {}

    def add(self, group: int, node: Node, ends: Items[int], ids: Items[int]) -> None:
        """Blocks of a node that end at these boundaries are about to be freed."""
        digests, start = self._digests.of(node), node.start + 1
        waiting = self._pools[group].waiting
        for end, block in zip(ends, ids, strict=True):
            self._named.pop((group, block), None)
            if block >= 0 and block not in waiting:
                self._named[group, block] = (end - 1, digests[end - start])

    def take(self) -> list[NamedBlock]:
        """Return the blocks in the order of their eviction, and start anew."""
        taken = [NamedBlock(*where, *what) for where, what in self._named.items()]
        self._named.clear()
        return taken

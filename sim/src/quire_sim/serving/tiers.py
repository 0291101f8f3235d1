"""Tiers below the device: evicted blocks go down a link, and come back when that pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from quire.core import Sequence as CacheSequence
from quire.core import Watcher
from quire.core.kernel import Kernel, Leaving
from quire.core.node import Node
from quire.core.tokens import TOKEN_BYTES, IntArray
from quire.errors import ConfigError
from quire_sim.hardware import MemoryTier


class Tiers(Watcher):
    """The tiers of one replica: exclusive stores of block ids, each in LRU order.

    A block is on the device or in one tier, never in two places: as a watcher of the manager it is
    told what is stored (it leaves the tiers) and what is evicted (it enters the first tier, whose
    oldest block goes on to the next one, and out of the last one), the deepest block of a prefix
    first, so a tier too drops the ends of prefixes first.
    What goes down is not timed: links work in both directions at once. Raises `ConfigError`.
    """

    def __init__(self, tiers: Sequence[MemoryTier], block_bytes: int) -> None:
        self.tiers = tuple(tiers)
        self._block_bytes = block_bytes
        self._capacities = [tier.capacity_bytes // block_bytes for tier in tiers]
        for tier, capacity in zip(tiers, self._capacities, strict=True):
            if not capacity:
                raise ConfigError(
                    f"tier {tier.name!r} of {tier.capacity_bytes} bytes holds not one block of "
                    f"{block_bytes} bytes; give it more"
                )
        self._stores: list[dict[int, None]] = [{} for _ in tiers]
        self.demoted_blocks = [0] * len(tiers)
        self.fetched_blocks = [0] * len(tiers)
        self._block_tokens = 1

    def begin(self, kernel: Kernel) -> None:
        self._block_tokens = kernel.tree.block_bytes // TOKEN_BYTES

    def stored(self, seq: CacheSequence, node: Node, num_blocks: int) -> None:
        for block in self._last_blocks(node, num_blocks):
            self._discard(block)

    def leaving(self, node: Node, blocks: range, group: int | None, why: Leaving) -> None:
        if group is None and why == "evicted":
            for block in reversed(self._last_blocks(node, len(blocks))):
                self._demote(block)

    def segments(self, blocks: IntArray) -> list[tuple[int, int]]:
        """Return the tiers of the first blocks of a run: (tier, blocks), until one is nowhere."""
        found: list[tuple[int, int]] = []
        for tier, run in groupby(map(self.tier_of, blocks.tolist())):
            if tier is None:
                break
            found.append((tier, sum(1 for _ in run)))
        return found

    def by_tier(self, segments: Iterable[tuple[int, int]]) -> list[int]:
        """Return the blocks of segments by tier, [num_tiers]."""
        num_blocks = [0] * len(self.tiers)
        for tier, count in segments:
            num_blocks[tier] += count
        return num_blocks

    def tier_of(self, block: int) -> int | None:
        """Return the tier that holds a block, by number; None if it is in none."""
        for tier, store in enumerate(self._stores):
            if block in store:
                return tier
        return None

    def fetch_s(self, segments: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of bringing blocks up; tiers work side by side."""
        found = zip(self.tiers, self.by_tier(segments), strict=True)
        asked = [pair for pair in found if pair[1]]
        return max((tier.fetch_s(n * self._block_bytes) for tier, n in asked), default=0.0)

    def _discard(self, block: int) -> None:
        for store in self._stores:
            if block in store:
                del store[block]
                return

    def _demote(self, block: int) -> None:
        for tier, (store, capacity) in enumerate(zip(self._stores, self._capacities, strict=True)):
            store[block] = None
            self.demoted_blocks[tier] += 1
            if len(store) <= capacity:
                return
            block = next(iter(store))
            del store[block]

    def _last_blocks(self, node: Node, count: int) -> list[int]:
        """Return the ids of the last blocks of a node: in a simulation a block begins with its id."""
        return memoryview(node.key).cast("i")[:: self._block_tokens][-count:].tolist()

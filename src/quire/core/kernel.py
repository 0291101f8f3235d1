"""The kernel: the parts of a manager that take, publish and give back blocks."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.blocks import BlockPool
from quire.core.copies import CopyPlan
from quire.core.digests import Digests
from quire.core.events import EventLog
from quire.core.eviction import Evictor
from quire.core.evictions import EvictionLog
from quire.core.groups import ChunkedAttention, FullAttention, Recurrent, SlidingWindow
from quire.core.hints import Sessions
from quire.core.livecurve import LiveCurve
from quire.core.lookup import Lookup
from quire.core.media import UsedMedia
from quire.core.node import Node
from quire.core.pins import PinBoard
from quire.core.policies import Capacity
from quire.core.rows import Rows
from quire.core.sequence import Drafted
from quire.core.settings import Settings, factory_of
from quire.core.sparse import Site, SparseGroup
from quire.core.states import StateGroup
from quire.core.stats import Counters
from quire.core.tree import PrefixTree
from quire.core.windows import WindowGroup


class Kernel:
    """Pools, tree and rows of one manager. The modules beside this one are functions on it.

    `take` opens, reserves and forks; `publish` commits; `give` closes and truncates; `decode` does
    a step of a batch; `room` evicts; `snapshots` keeps states. None of them checks arguments:
    `CacheManager` does.
    """

    def __init__(self, settings: Settings, cut_off: Callable[[str, BaseException], None]) -> None:
        size = settings.block_size
        self.pools = tuple(
            BlockPool(group.num_blocks, group.name, debug=settings.debug)
            for group in settings.groups
        )
        capacity = _capacity(settings, self.pools)
        evictor = Evictor(factory_of(settings.policy), capacity, settings.clock)
        sparse = _sparse_groups(settings, self.pools, evictor)
        self.tree = PrefixTree(size, self.pools, evictor, UsedMedia(), sparse)
        self.rows = Rows(self.tree, cut_off)
        self.lookup = Lookup(self.tree, size, sub_block=settings.sub_block)
        self.copies = CopyPlan(self.pools)
        self.counters = Counters()
        self.pins = PinBoard(self.tree, settings.pin_budget, settings.clock, cut_off)
        self.sessions = Sessions(evictor)
        # Ends of the paths that restores and holds have locked, by handle.
        self.anchors: dict[int, Node] = {}
        # Drafts that wait behind open sequences, by row.
        self.drafts: dict[int, Drafted] = {}
        self.live_curve = LiveCurve(size, self.counters, capacity) if settings.curve else None
        self.digests = Digests(self.tree)
        self.events = EventLog(self.tree.block_bytes, self.digests) if settings.events else None
        self.log = EvictionLog(self.pools, self.digests) if settings.evictions else None
        for group in sparse:
            group.log = self.log

    def now(self) -> float:
        """Return the seconds of the clock; without one, the requests opened so far."""
        evictor = self.tree.evictor
        return evictor.now() if evictor.has_clock else self.counters.num_requests


def _sparse_groups(
    settings: Settings, pools: tuple[BlockPool, ...], evictor: Evictor
) -> tuple[SparseGroup, ...]:
    sparse: list[SparseGroup] = []
    for index, (group, pool) in enumerate(zip(settings.groups, pools, strict=True)):
        site = Site(index, len(sparse), pool, evictor)
        match group.kind:
            case SlidingWindow() | ChunkedAttention():
                sparse.append(WindowGroup(site, group.kind, settings.block_size))
            case Recurrent():
                sparse.append(StateGroup(site, group.kind.interval))
            case FullAttention():
                pass
    return tuple(sparse)


def _capacity(settings: Settings, pools: tuple[BlockPool, ...]) -> Capacity:
    """Return what tells how large the smallest pool of full attention is now.

    It knows the pools alone: policies are referenced by nodes, which the garbage collector does
    not see, so that one which knew the kernel would keep it for ever.
    """
    groups = zip(settings.groups, pools, strict=True)
    full = [pool for group, pool in groups if isinstance(group.kind, FullAttention)]
    return lambda: min(pool.num_blocks for pool in full or pools)

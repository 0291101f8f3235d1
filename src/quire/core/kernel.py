"""The kernel: the parts of a manager that take, publish and give back blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar, Literal, TypeAlias, TypeVar

from quire.core.blocks import BlockPool, CopyPlan
from quire.core.groups import FullAttention
from quire.core.holds import Holds
from quire.core.lookup import Lookup
from quire.core.node import Node, NodePart
from quire.core.order import Order
from quire.core.owners import Owners
from quire.core.policy import Capacity
from quire.core.rows import Rows
from quire.core.sequence import Sequence
from quire.core.settings import ManagerSettings
from quire.core.sparse import Site, SparseGroup
from quire.core.stats import Counters, Missed
from quire.core.tokens import Key
from quire.core.tree import PrefixTree
from quire.errors import ConfigError

Leaving: TypeAlias = Literal["evicted", "invalidated", "truncated", "cleared"]
"""Why blocks can be found no more: they made room, somebody dropped them, their own sequence took them back."""

SomeWatcher = TypeVar("SomeWatcher", bound="Watcher")


class Watcher:
    """A listener to requests and blocks: it keeps events, a trace, or a memory of evictions.

    It changes nothing that it is shown, and must not raise. Hooks that a watcher leaves out cost nothing. It
    watches one manager, from when that is made.

    `part`   what it keeps of every node, or None; the tree cuts and joins it with the node
    `place`  where that stands in `node.parts`
    `needs`  kinds of watchers of which one is told before it; made without arguments where the manager was given none
    `taken`  whether it watches a manager
    """

    part: ClassVar[type[NodePart] | None] = None
    needs: ClassVar[tuple[type[Watcher], ...]] = ()
    place: int = 0
    taken: bool = False

    def begin(self, kernel: Kernel) -> None:
        """The manager was made, or reset."""

    def opened(self, seq: Sequence, key: Key, missed: Missed) -> None:
        """A request has room for its first tokens; `key` is its prompt with numbers for media, valid during this call."""

    def stored(self, seq: Sequence, node: Node, num_blocks: int) -> None:
        """The last blocks of a node can be found now: the sequence computed them, or a restore brought them."""

    def leaving(self, node: Node, blocks: range, group: int | None, why: Leaving) -> None:
        """Called before blocks of a node are freed in a group (None: in all, as they leave the tree).

        `blocks` are counted from the root. When all that can be dropped is dropped, a root is told of last:
        no blocks, "cleared".
        """

    def closed(self, seq: Sequence) -> None:
        """A request that had room, or a fork, is about to be closed."""


class Audience:
    """The watchers of a manager, those that they need before them, and their hooks."""

    def __init__(self, watchers: Iterable[Watcher]) -> None:
        self.all: tuple[Watcher, ...] = ()
        given = tuple(watchers)
        for watcher in given:
            self._add(watcher, given)
        self.opened = tuple(w.opened for w in self.all if _has(w, "opened"))
        self.stored = tuple(w.stored for w in self.all if _has(w, "stored"))
        self.leaving = tuple(w.leaving for w in self.all if _has(w, "leaving"))
        self.closed = tuple(w.closed for w in self.all if _has(w, "closed"))
        self.parts = tuple(w.part for w in self.all if w.part is not None)

    def find(self, kind: type[SomeWatcher]) -> SomeWatcher | None:
        """Return the first watcher of a kind, or None."""
        return next((each for each in self.all if isinstance(each, kind)), None)

    def of(self, kind: type[SomeWatcher]) -> SomeWatcher:
        """Return the watcher of a kind that another one `needs`."""
        return next(each for each in self.all if isinstance(each, kind))

    def _add(self, watcher: Watcher, given: tuple[Watcher, ...]) -> None:
        if watcher in self.all:
            return
        for kind in watcher.needs:
            known = [each for each in (*self.all, *given) if isinstance(each, kind)]
            self._add(known[0] if known else kind(), given)
        self.all += (watcher,)

    def begin(self, kernel: Kernel) -> None:
        """Tell all that a manager begins, and where their parts stand."""
        place = len(kernel.tree.sparse)
        for watcher in self.all:
            watcher.place, watcher.taken = place, True
            watcher.begin(kernel)
            place += watcher.part is not None


class Kernel:
    """Pools, tree and rows of one manager. The modules beside this one are functions on it.

    `take` opens, reserves, settles and forks; `publish` commits; `give` closes and suspends; `decode` does
    a step of a batch; `room` evicts. None of them checks arguments: `CacheManager` does.
    """

    def __init__(
        self,
        settings: ManagerSettings,
        watchers: Iterable[Watcher],
        cut_off: Callable[[str, BaseException], None],
    ) -> None:
        size = settings.block_size
        self.pools = tuple(settings.pool(group.num_blocks, group.name) for group in settings.groups)
        capacity = _capacity(settings, self.pools)
        order = Order(settings.policy, capacity, settings.clock)
        sparse = _sparse_groups(settings, self.pools, order)
        self.watchers = Audience(watchers)
        self.tree = PrefixTree(size, self.pools, order, sparse, self.watchers.parts)
        self.rows = Rows(self.tree, cut_off)
        self.lookup = Lookup(self.tree, size, sub_block=settings.sub_block)
        self.copies = CopyPlan(self.pools)
        self.counters = Counters()
        self.holds = Holds(self.tree)
        self.owners = Owners(order)
        self.sequences: dict[int, Sequence] = {}
        self.capacity = capacity
        self.watchers.begin(self)


def check_watchers(watchers: object) -> None:
    """Raise `ConfigError` unless these are watchers that are free."""
    known = isinstance(watchers, tuple | list)
    for each in watchers if known else (watchers,):  # pyright: ignore[reportUnknownVariableType, reportGeneralTypeIssues]
        if not known or not isinstance(each, Watcher):
            msg = "watchers is a list of quire.core.Watcher objects, [EventLog()] for instance"
            raise ConfigError(f"{msg}; got {each!r}")
        if each.taken:
            raise ConfigError(f"{each!r} watches a manager already; make one for each manager")


def _has(watcher: Watcher, hook: str) -> bool:
    return getattr(type(watcher), hook) is not getattr(Watcher, hook)


def _sparse_groups(
    settings: ManagerSettings, pools: tuple[BlockPool, ...], order: Order
) -> tuple[SparseGroup, ...]:
    sparse: list[SparseGroup] = []
    for index, (group, pool) in enumerate(zip(settings.groups, pools, strict=True)):
        site = Site(index, len(sparse), pool, order, settings.block_size)
        made = group.kind.group(site)
        if made is not None:
            sparse.append(made)
    return tuple(sparse)


def _capacity(settings: ManagerSettings, pools: tuple[BlockPool, ...]) -> Capacity:
    """Return a function that gives the present size of the smallest pool, among those of full attention if any.

    It knows the pools alone: policies are referenced by nodes, which the garbage collector does
    not see, so that one which knew the kernel would keep it for ever.
    """
    groups = zip(settings.groups, pools, strict=True)
    full = [pool for group, pool in groups if isinstance(group.kind, FullAttention)]
    return lambda: min(pool.num_blocks for pool in full or pools)

"""The block store: everything about cached prefixes, nothing about running requests."""

from __future__ import annotations

from collections.abc import Sequence as Items

import msgspec

from quire0.core.blocks import BlockPool
from quire0.core.copies import CopyPlan
from quire0.core.digests import Digests
from quire0.core.events import Event, EventLog
from quire0.core.eviction import Clock, Evictor
from quire0.core.evictions import EvictionLog, NamedBlock
from quire0.core.groups import (
    ChunkedAttention,
    FullAttention,
    LayerGroup,
    Recurrent,
    SlidingWindow,
    check_count,
    check_group,
    check_groups,
)
from quire0.core.hints import Sessions, check_session_id
from quire0.core.interrupts import Interruptible, mutating
from quire0.core.livecurve import LiveCurve
from quire0.core.lookup import Explanation, Hit, Lookup
from quire0.core.media import UsedMedia
from quire0.core.node import Node
from quire0.core.pins import Pin, PinBoard
from quire0.core.policies import POLICIES, Capacity, PolicyFactory
from quire0.core.radix import PrefixTree
from quire0.core.room import Room
from quire0.core.scope import MediaItem, Scope, check_media, check_scope
from quire0.core.sequence import Observer
from quire0.core.sparse import Site, SparseGroup, sparse_at
from quire0.core.states import StateGroup
from quire0.core.stats import Counters, Stats
from quire0.core.tokens import TOKEN_BYTES, Key, TokenIds, check_sign, key_of
from quire0.core.windows import WindowGroup
from quire.errors import ConfigError, TokensError

NO_SCOPE = Scope()

MAX_SECONDS = 1e9
"""The longest retention or time to live: about 31 years."""


class Settings(msgspec.Struct, frozen=True):
    """What a manager is made with; see `CacheManager`. Raises `ConfigError`."""

    groups: tuple[LayerGroup, ...]
    block_size: int
    policy: str | PolicyFactory
    sub_block: bool
    pin_budget: float
    events: bool
    debug: bool
    clock: Clock | None
    curve: bool = False
    observer: Observer | None = None
    evictions: bool = False

    def __post_init__(self) -> None:
        check_groups(self.groups)
        check_count("block_size", self.block_size, limit=2**20)
        _factory(self.policy)
        if self.clock is not None and not callable(self.clock):
            raise ConfigError(f"clock must be a function that returns seconds, got {self.clock!r}")
        if type(self.pin_budget) not in (int, float) or not 0 <= self.pin_budget <= 1:
            raise ConfigError(f"pin_budget is a share from 0 to 1, got {self.pin_budget!r}")

    @property
    def policy_name(self) -> str:
        """The policy's name, for people."""
        if isinstance(self.policy, str):
            return self.policy
        return getattr(self.policy, "__name__", type(self.policy).__name__)


class BlockStore(Interruptible):
    """Cached prefixes in the blocks of one or more layer groups.

    The half of `CacheManager` that knows no sequences: lookups, pins, eviction, statistics.
    For every group, after every call: free + active + cached == num_blocks.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.block_size = settings.block_size
        self.clock = settings.clock
        self.groups = tuple(
            BlockPool(group.num_blocks, group.name, debug=settings.debug)
            for group in settings.groups
        )
        self._capacity = _capacity(settings, self.groups)
        self.copies = CopyPlan(self.groups)
        evictor = Evictor(_factory(settings.policy), self._capacity, self.clock)
        sparse = sparse_groups(settings, self.groups, evictor)
        self.media = UsedMedia()
        self.tree = PrefixTree(self.block_size, self.groups, evictor, self.media, sparse)
        self.counters = Counters()
        self.live_curve = LiveCurve(self.block_size, self.counters) if settings.curve else None
        self.digests = Digests(self.tree, self.media)
        self.event_log = EventLog(self.tree.block_bytes, self.digests) if settings.events else None
        self.room = Room(self.groups, self.tree, self.counters, self.event_log)
        self.eviction_log = EvictionLog(self.groups, self.digests) if settings.evictions else None
        for teller in (self.room, *sparse):
            teller.log = self.eviction_log
        self.pins = PinBoard(self.tree, settings.pin_budget, self.clock, self.cut_off)
        self.lookup = Lookup(self.tree, self.block_size, sub_block=settings.sub_block)
        self.sessions = Sessions(evictor)
        self.default_root = self.tree.root(NO_SCOPE)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, of the first group."""
        return self.groups[0].num_free

    @property
    def num_active(self) -> int:
        """Blocks that a sequence or a pin references, of the first group."""
        return self.groups[0].num_active

    @property
    def num_cached(self) -> int:
        """Blocks that are findable and referenced by nobody, of the first group."""
        return self.groups[0].num_cached

    @property
    def stats(self) -> Stats:
        """What was counted since the manager was made."""
        if self.live_curve is not None:
            self._count()
        return self.counters.stats()

    def probe(
        self, tokens: TokenIds, scope: Scope | None = None, media: Items[MediaItem] = ()
    ) -> Hit:
        """Return what `open` would find cached of a prompt. Changes nothing, counts nothing.

        Raises `TokensError`, `ScopeError`, `MediaError`.
        """
        key = key_of(tokens)
        root = self.default_root
        if scope is not None or media or len(self.media) or not key:
            key, root = self._read(key, scope, media)
        return self.lookup.hit(root, key)

    def explain(
        self, tokens: TokenIds, scope: Scope | None = None, media: Items[MediaItem] = ()
    ) -> Explanation:
        """Return what is cached of a prompt, what is not, and why; `str()` of it reads well."""
        key, root = self._read(key_of(tokens), scope, media)
        return self.lookup.explain(root, key)

    @mutating
    def pin(
        self,
        tokens: TokenIds,
        scope: Scope | None = None,
        *,
        media: Items[MediaItem] = (),
        ttl_s: float | None = None,
    ) -> Pin:
        """Keep what is cached of these tokens, in whole blocks, until the pin is closed.

        The last token may be part of it, unlike in `open`. `ttl_s` closes the pin after so
        many seconds. Raises `PinBudgetExceeded`, `ConfigError` and what `probe` raises.
        """
        deadline = self.check_duration("ttl_s", ttl_s)
        key, root = self._read(key_of(tokens), scope, media)
        found = self.tree.match(root, key, len(key) - len(key) % self.tree.block_bytes)
        found = self.lookup.accepted(found)
        if deadline:
            deadline += self.tree.evictor.now()
        return self.pins.add(found, found.num_bytes // TOKEN_BYTES, deadline)

    @mutating
    def evict(
        self,
        tokens: TokenIds | None = None,
        scope: Scope | None = None,
        *,
        media: Items[MediaItem] = (),
    ) -> int:
        """Drop a cached prefix, all that continues it, and return the blocks dropped per group.

        What other prompts share with it stays, and so does what a sequence or pin references.
        Without tokens the whole scope is dropped. Raises what `probe` raises.
        """
        if tokens is None:
            if scope is not None:
                check_scope(scope)
            self.pins.release_expired()
            root = self.tree.roots.get(scope or NO_SCOPE)
            return self.room.invalidate_below(root) if root is not None else 0
        key, root = self._read(key_of(tokens), scope, media)
        whole = len(key) - len(key) % self.tree.block_bytes
        self.pins.release_expired()
        found = self.tree.match(root, key, whole)
        covered = found.num_bytes == whole
        rest = key[whole:]
        if found.edge is not None and found.into:
            if not covered or not found.edge.key.startswith(rest, found.into):
                return 0
            return self.room.invalidate_below(found.edge) + self.room.invalidate_path(found.edge)
        dropped = 0
        for child in list(found.node.children.values()) if covered else ():
            if child.key.startswith(rest):
                dropped += self.room.invalidate_below(child) + self.room.invalidate_node(child)
        return dropped + self.room.invalidate_path(found.node)

    def reclaim(self, num_blocks: int, group: int | None = None) -> int:
        """Evict up to `num_blocks` cached blocks by policy; return how many.

        Without a group, leaves lose their last blocks in every group. In one group with a
        window or a state, blocks go where they are missed least, and the prefixes stay.
        """
        num_blocks = check_count("num_blocks", num_blocks)
        if group is not None:
            check_group(group, len(self.groups))
        try:
            self.pins.release_expired()
            sparse = sparse_at(self.tree.sparse, group) if group is not None else None
            if sparse is not None:
                return self.room.evict_sparse(sparse, num_blocks)
            return self.room.evict(num_blocks)
        except BaseException as error:
            self.cut_off("reclaim", error)
            raise

    @mutating
    def clear(self) -> int:
        """Drop all that is cached and not referenced, in every scope; return blocks per group.

        Of a running sequence's path, that is what lies behind its windows.
        """
        self.pins.release_expired()
        dropped = sum(self.room.invalidate_below(root) for root in self.tree.roots.values())
        for group in self.tree.sparse:
            self.room.evict_sparse(group, group.pool.num_cached)
        self.take_evicted()
        if self.event_log is not None and not any(r.children for r in self.tree.roots.values()):
            self.event_log.cleared()
        return dropped

    @mutating
    def end_session(self, session_id: str, scope: Scope | None = None) -> int:
        """Say that no other request of a session of this scope follows, as `Hint` has it.

        The blocks that only this session has used are evicted before all others from now on.
        Returns how many these are; 0 for a session that is not known in the scope. Raises `ConfigError`, `ScopeError`.
        """
        check_session_id(session_id)
        if scope is not None:
            check_scope(scope)
        return self.sessions.end(scope or NO_SCOPE, session_id)

    @mutating
    def take_events(self) -> list[Event]:
        """Return the events since the last call; empty unless made with `events=True`.

        The oldest are dropped, and counted in `num_dropped_events`, beyond 10,000.
        """
        return self.event_log.take() if self.event_log is not None else []

    @mutating
    def take_evicted(self) -> list[NamedBlock]:
        """Return the blocks that made room since the last call; empty unless made with `evictions`.

        Their bytes are in place until something is written: call it after each operation that may
        evict, before its copies are done. What `evict` and `clear` drop is not among them.
        """
        return self.eviction_log.take() if self.eviction_log is not None else []

    @property
    def num_dropped_events(self) -> int:
        """Events that were dropped because `take_events` was not called in time."""
        return self.event_log.num_dropped if self.event_log is not None else 0

    def check_duration(self, name: str, seconds: float | None) -> float:
        """Return a duration in seconds, 0 for None; raise `ConfigError` if it cannot work."""
        if seconds is None:
            return 0.0
        if type(seconds) not in (int, float) or not 0 < seconds <= MAX_SECONDS:
            msg = f"{name} must be a number of seconds, above 0 and up to {MAX_SECONDS:g}"
            raise ConfigError(f"{msg}, got {seconds!r}")
        if self.clock is None:
            msg = f"{name}={seconds} needs a clock: CacheManager(..., clock=time.monotonic)"
            raise ConfigError(msg)
        return seconds

    @mutating
    def _count(self) -> None:
        assert self.live_curve is not None
        self.live_curve.count()

    def _read(self, key: Key, scope: Scope | None, media: Items[MediaItem]) -> tuple[Key, Node]:
        """Return the key and root to look up; an unknown scope gives an empty root."""
        if not key:
            raise TokensError("the prompt is empty; a lookup needs at least one token")
        if scope is not None:
            check_scope(scope)
        if media:
            check_media(media, len(key) // TOKEN_BYTES)
            key = self.media.peek(key, media)
        elif len(self.media):
            check_sign(key)
        root = self.tree.roots.get(scope or NO_SCOPE)
        return key, root if root is not None else Node()


def sparse_groups(
    settings: Settings, pools: tuple[BlockPool, ...], evictor: Evictor
) -> tuple[SparseGroup, ...]:
    """Make the windowed and recurrent groups of a manager."""
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
    """Return what tells the policy how large the smallest pool of full attention is now.

    It knows the pools alone: policies are referenced by nodes, which the garbage collector does
    not see, so that one which knew the store would keep it for ever.
    """
    groups = zip(settings.groups, pools, strict=True)
    full = [pool for group, pool in groups if isinstance(group.kind, FullAttention)]
    return lambda: min(pool.num_blocks for pool in full or pools)


def _factory(policy: str | PolicyFactory) -> PolicyFactory:
    if callable(policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:  # pyright: ignore[reportUnnecessaryIsInstance]
        msg = f"unknown policy {policy!r}; there are {', '.join(sorted(POLICIES))}"
        raise ConfigError(msg)
    return POLICIES[policy]

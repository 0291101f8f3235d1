"""Purging a tenant of an engine: its requests, pins and blocks, the bytes of these, and then its tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from quire import ops
from quire.core import CacheManager, Scope
from quire.errors import CacheBusy, ConfigError, RequestFailed, TenantPurged
from quire.exchange.hashing import tenant_tag
from quire.ops.purging import IsOwn, num_held, sequences_of
from quire.scope import ScopePart, scope_of
from quire.tensors.pool import KVPool, Pool

if TYPE_CHECKING:
    from quire.engines.companions import CacheCompanion, EngineCompanion, TenantHolder
    from quire.engines.hf.storage import KeptBlocks
    from quire.engines.loop.answers import EngineRequest, FinishReason
    from quire.engines.loop.computing import Forward
    from quire.engines.thread_guard import ThreadGuard
    from quire.tiers.purging import Purged
    from quire.tiers.stack.stack import TierStack

PURGE_TIMEOUT_S = 600.0
"""The longest that a purge waits for each tier where its caller does not say."""


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """The counts of a purge, by place.

    `blocks`    blocks that were freed and overwritten, by layer group; those of aborted requests among them
    `held`      blocks that could not be freed: a tier is reading them still
    `requests`  requests that were aborted
    `pins`      pins that were let go
    `passages`  captures of passages that were dropped
    `tiers`     results of the tiers, by name
    """

    blocks: dict[str, int] = field(default_factory=dict[str, int])
    held: int = 0
    requests: int = 0
    pins: int = 0
    passages: int = 0
    tiers: dict[str, Purged] = field(default_factory=dict[str, "Purged"])

    @property
    def is_complete(self) -> bool:
        """Whether nothing of the tenant is left, as far as the tiers can say."""
        return not self.reason

    @property
    def counts(self) -> dict[str, Any]:
        """The report as plain data."""
        plain = {
            name: getattr(self, name) for name in ("blocks", "held", "requests", "pins", "passages")
        }
        tiers = {name: msgspec.to_builtins(each) for name, each in self.tiers.items()}
        return plain | {"tiers": tiers, "complete": self.is_complete, "reason": self.reason}

    @property
    def reason(self) -> str:
        """The reasons why something is left or may be; empty where the purge is complete."""
        held = [f"{self.held} blocks are held: a tier copies them still"] if self.held else []
        tiers = (f"{name}: {each.reason}" for name, each in self.tiers.items() if each.reason)
        return "; ".join([*held, *tiers])


class PurgeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A purge that an operator asks for; a tenant is the name of its keys. Raises `ConfigError`."""

    tenant: str

    def __post_init__(self) -> None:
        if not self.tenant:
            raise ConfigError("tenant is empty; send the name of its keys")


class PurgeableEngine:
    """The part of an engine that purges a tenant, and shows figures of its companions."""

    manager: CacheManager
    tiers: TierStack | None
    _guard: ThreadGuard
    _forward: Forward
    _companions: list[EngineCompanion]
    _requests: dict[str, EngineRequest]
    _end: Callable[[EngineRequest, FinishReason, RequestFailed], None]

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of its companions, as plain data by name."""
        return {name: told for each in self._companions for name, told in each.figures.items()}

    def purge(self, tenant: Scope | ScopePart, timeout_s: float = PURGE_TIMEOUT_S) -> PurgeReport:
        """Delete and overwrite all that the engine and its tiers hold of a tenant; return the counts.

        `tenant` is the scope's `tenant`, its `salt` where it has none, or a scope that has them; None is everybody's.
        Its requests end with `TenantPurged`. Others go on; while tiers are purged they wait, but in an `AsyncEngine`.
        `timeout_s` bounds the wait for tiers. A tier that fails is told in the report. Raises `ScopeError`, and `CacheBusy`,
        with nothing changed, from within a step or while another thread has its turn.
        """
        scope = scope_of(tenant)
        with self._guard, self.barring(scope):
            told = self.purge_device(scope, timeout_s)
            return replace(told, tiers=self.purge_tiers(scope, timeout_s))

    def barring(self, scope: Scope) -> ExitStack:
        """Have no tier take or give anything of a tenant until the end of a block; any thread may."""
        return barring(scope, self.tiers, self._companions)

    def purge_device(self, scope: Scope, timeout_s: float) -> PurgeReport:
        """Purge what the engine itself holds, between two steps and within `barring`."""
        is_own = of_tenant(scope)
        with self._guard:
            if self._guard.is_stepping:
                raise CacheBusy(
                    "purge was called from within a step, which goes on to write K and V of its requests: call it "
                    "between two steps"
                )
            own = [each for each in self._requests.values() if is_own(each.scope)]
            before = free_blocks(self.manager)
            for request in own:
                why = f"request {request.request_id!r} ended: its tenant was purged"
                self._end(request, "error", TenantPurged(why))
            self._forward.copy()
            passages = sum(each.purge(scope, is_own, timeout_s) for each in self._companions)
            told = purge_blocks(self.manager, self._forward.pools, is_own, before)
            self._forward.model.wipe()
            return replace(told, requests=len(own), passages=passages)

    def purge_tiers(self, scope: Scope, timeout_s: float) -> dict[str, Purged]:
        """Purge the tiers, within `barring`; any thread may."""
        return purge_tiers(scope, timeout_s, self.tiers, self._companions)


class PurgeableAsync:
    """The part of an engine with a thread of its own that purges a tenant."""

    engine: Any
    _ask: Callable[[Callable[[Any], PurgeReport]], Future[PurgeReport]]

    async def purge(
        self, tenant: Scope | ScopePart, timeout_s: float = PURGE_TIMEOUT_S
    ) -> PurgeReport:
        """Purge a tenant as `Engine.purge` does; others' requests go on while tiers are purged."""
        return await asyncio.to_thread(self._purge, scope_of(tenant), timeout_s)

    def _purge(self, scope: Scope, timeout_s: float) -> PurgeReport:
        engine: PurgeableEngine = self.engine
        with engine.barring(scope):
            asked = self._ask(lambda engine: engine.purge_device(scope, timeout_s))
            return replace(asked.result(), tiers=engine.purge_tiers(scope, timeout_s))


class PurgeableCache:
    """The part of a `PrefixCache` that purges a tenant."""

    kept: KeptBlocks
    tiers: TierStack | None
    passages: CacheCompanion | None
    _guard: ThreadGuard

    def purge(self, tenant: Scope | ScopePart, timeout_s: float = PURGE_TIMEOUT_S) -> PurgeReport:
        """Delete and overwrite all that the cache and its tiers hold of a tenant; return the counts.

        `tenant` is the scope's `tenant`, its `salt` where it has none, or a scope that has them; None is everybody's.
        `timeout_s` bounds the wait for tiers. A tier that fails is told in the report. Raises `ScopeError`, and
        `CacheBusy`, with nothing changed, while a session or call of the tenant is open, or another thread's turn.
        """
        scope = scope_of(tenant)
        is_own = of_tenant(scope)
        companions = [] if self.passages is None else [self.passages]
        with self._guard:
            manager, store = self.kept.manager, self.kept.store
            if count := len(sequences_of(manager, is_own)):
                raise CacheBusy(
                    f"{count} rows of sessions or calls of this tenant are open, and would keep what they compute: "
                    "end them, then purge"
                )
            with barring(scope, self.tiers, companions):
                before = free_blocks(manager)
                store.transfers.join()
                if store.tiers is not None:
                    store.tiers.purge(scope, timeout_s)
                told = purge_blocks(manager, self.kept.pools, is_own, before)
                passages = sum(each.purge(scope, is_own, timeout_s) for each in companions)
                tiers = purge_tiers(scope, timeout_s, self.tiers, companions)
                return replace(told, passages=passages, tiers=tiers)


def of_tenant(scope: Scope) -> IsOwn:
    """Return what says whether another scope is of the same tenant."""
    tag = tenant_tag(scope)
    return lambda other: tenant_tag(other) == tag


def barring(scope: Scope, stack: TierStack | None, companions: Sequence[TenantHolder]) -> ExitStack:
    """Have tiers take and give nothing of a tenant until the end of a block."""
    with ExitStack() as opened:
        for each in (*([] if stack is None else [stack]), *companions):
            opened.enter_context(each.barring(scope))
        return opened.pop_all()


def free_blocks(manager: CacheManager) -> dict[str, int]:
    """Return the free blocks of each layer group, by name."""
    return {pool.name: pool.num_free for pool in manager.pools}


def purge_blocks(
    manager: CacheManager, pools: Sequence[Pool], is_own: IsOwn, before: dict[str, int]
) -> PurgeReport:
    """Drop all blocks of a tenant, and overwrite all that nobody uses; `before`: the free blocks when the purge began."""
    pins = ops.purge(manager, is_own)
    freed = {name: count - before[name] for name, count in free_blocks(manager).items()}
    wipe_unused(manager, pools)
    return PurgeReport(blocks=freed, held=num_held(manager, is_own), pins=pins)


def wipe_unused(manager: CacheManager, pools: Sequence[Pool]) -> None:
    """Overwrite free blocks, and what lies behind the tokens of running sequences in theirs: both hold what was there before."""
    running = [seq for seq in manager.sequences.values() if seq.state == "open"]
    for group, (pool, blocks) in enumerate(zip(pools, manager.pools, strict=True)):
        pool.wipe(blocks.free_ids())
        for seq in running:
            if isinstance(pool, KVPool):
                pool.wipe_behind(seq.block_ids(group), seq.computed)
            elif not seq.computed:
                pool.wipe(seq.block_ids(group))


def purge_tiers(
    scope: Scope, timeout_s: float, stack: TierStack | None, companions: Sequence[TenantHolder]
) -> dict[str, Purged]:
    """Purge a stack, and the tiers of companions; return their results by name."""
    told = {} if stack is None else stack.purge(scope, timeout_s)
    for each in companions:
        told |= each.purge_tiers(scope, timeout_s)
    return told

"""Purging of a stack: all tiers, queues and buffers at once, and nothing that began before brings a record back."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from quire.exchange.hashing import tenant_tag
from quire.scope import Scope, ScopePart, scope_of
from quire.tiers.base import Tier
from quire.tiers.contents.names import purge_names
from quire.tiers.format import tag_of_key
from quire.tiers.keys import stored_tag
from quire.tiers.purging import PURGE_TIMEOUT_S, Purged
from quire.tiers.stack.background_writer import BackgroundWriter
from quire.tiers.stack.lanes import Deadline
from quire.tiers.stack.lookup import LaneCall
from quire.tiers.stack.member import Shared, StackMember

LOOK_S = 0.002
"""How often a purge looks whether writes of its tenant have ended."""

NAMES_TIMEOUT_S = 60.0


class PurgeableStack:
    """The part of a stack that purges a tenant; `tenant` is as in `purge`.

    While a tag is barred, what is offered, promoted, fetched ahead or evicted of it is left out. What was made
    before that ended is left out later, too: a queue may hold it, or a read be about to keep it.
    """

    tiers: tuple[Tier, ...]
    feeding: BackgroundWriter
    _shared: Shared
    _levels: list[StackMember]

    @contextmanager
    def barring(self, tenant: Scope | ScopePart) -> Generator[None]:
        """Have the tiers neither take nor show anything of a tenant until the end of the block.

        So that an engine can drop what it has first, and nothing comes back before `purge` is done, which is called within.
        """
        tag = self._tag(tenant)
        with self._shared.writes.barring(tag):
            try:
                self._count(tag)
                yield
            finally:
                self._count(tag)

    def drop_fed(self, tenant: Scope | ScopePart, timeout_s: float) -> bool:
        """Drop a tenant's queued copies; return whether its running ones ended in time.

        Call it within `barring`.
        """
        return self._drop_fed(self._tag(tenant), Deadline(self._shared.lanes, timeout_s))

    def purge(
        self, tenant: Scope | ScopePart, timeout_s: float = PURGE_TIMEOUT_S
    ) -> dict[str, Purged]:
        """Delete a tenant's records in all tiers; return each tier's result by name.

        Tiers that can overwrite the deleted bytes do. `tenant` is the scope's `tenant`, its `salt` where it has none,
        or a scope that has them; None is everybody's. Everything stored before it returns is gone, also records that
        waited in queues, were being read to be kept or fetched ahead. Then the tenant may store again. A tier that
        fails or does not answer is `is_complete=False`, with the reason. Raises `ScopeError`.
        """
        tag, shared = self._tag(tenant), self._shared
        if shared.is_closed:
            closed = Purged(is_complete=False, reason="the stack is closed")
            return {level.name: closed for level in self._levels}
        deadline = Deadline(shared.lanes, timeout_s)
        told: dict[str, Purged] = {}
        with self.barring(tenant):
            is_over = self._drop_fed(tag, deadline)
            is_over = self._wait(tag, deadline) and is_over
            for level in self._levels:
                told[level.name] = self._purge(level, tag, deadline)
                if not is_over:
                    told[level.name] += Purged(is_complete=False, reason="a write has not ended")
            with shared.lock:
                shared.whereabouts.forget()
                shared.refused.forget()
            shared.pool.wipe()
        for level in self._levels:
            path = getattr(level.tier, "path", None)
            if isinstance(path, Path):
                call = partial(purge_names, path, tenant_tag(scope_of(tenant)))
                asked = LaneCall(shared, level.stores, call, self)  # behind what is written of them
                asked.wait(NAMES_TIMEOUT_S)
                told[level.name] += asked.result or Purged(
                    is_complete=False, reason="its names are not purged yet"
                )
        return told

    def _tag(self, tenant: Scope | ScopePart) -> bytes:
        """Return what stands for a tenant in the keys of records."""
        return stored_tag(tenant_tag(scope_of(tenant)), self._shared.settings.key)

    def _count(self, tag: bytes) -> None:
        """Let all that was made so far be of before the purge."""
        with self._shared.lock:
            self._shared.epoch += 1
            self._shared.purged[tag] = self._shared.epoch

    def _drop_fed(self, tag: bytes, deadline: Deadline) -> bool:
        return self.feeding.purge(lambda key: tag_of_key(key) == tag, deadline)

    def _wait(self, tag: bytes, deadline: Deadline) -> bool:
        pause = self._shared.lanes.signal()
        while self._shared.writes.is_writing(tag):
            if deadline.passed:
                return False
            pause.wait(LOOK_S)
        return True

    def _purge(self, level: StackMember, tag: bytes, deadline: Deadline) -> Purged:
        """Purge a tier behind all that waits to be written to it."""
        if level.settings.read_only or self._shared.settings.read_only:
            return Purged(is_complete=False, reason="the stack only reads this tier")
        left_s = deadline.left_s
        call = LaneCall(self._shared, level.stores, partial(level.tier.purge, tag, left_s), level)
        call.wait(left_s)
        why = f"it has not answered within {left_s:g} s"
        return call.result or Purged(is_complete=False, reason=why)

"""Companions of an engine or a cache: tiers below it, and packages that reuse text at any position."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quire.core import Scope
    from quire.engines.loop.computing import Forward
    from quire.engines.models.working_cache import WorkingCache
    from quire.engines.packed.bound_model import BoundModel
    from quire.engines.segments import Segments
    from quire.engines.thread_guard import ThreadGuard
    from quire.scheduling import Job, Scheduler, Step
    from quire.tensors.kinds import LayerKind
    from quire.tiers.purging import Purged


class TenantHolder:
    """Base of what holds KV of tenants beside the blocks of a manager."""

    def purge(self, scope: Scope, is_own: Callable[[Scope], bool], timeout_s: float) -> int:
        """Drop and overwrite a tenant's KV in this process; return the captures of passages among it."""
        return 0

    def barring(self, scope: Scope) -> AbstractContextManager[object]:
        """Have tiers of its own take and give nothing of a tenant until the end of a block."""
        return nullcontext()

    def purge_tiers(self, scope: Scope, timeout_s: float) -> dict[str, Purged]:
        """Purge tiers of its own, within `barring`; return their results by name."""
        return {}

    def close(self) -> None:
        """Write what is due, and close what it has opened."""


class EngineCompanion(TenantHolder):
    """Base of a companion of an engine. Each hook does nothing by itself; all run in the engine's thread."""

    @property
    def figures(self) -> dict[str, Any]:
        """Figures of its own for metrics and pages, as plain data by name."""
        return {}

    @property
    def is_pending(self) -> bool:
        """Whether it has work that needs further steps, though no request has."""
        return False

    @property
    def is_settled(self) -> bool:
        """Whether it holds no block of a request that has ended."""
        return True

    def segmented(self, request: Any, segments: Segments) -> None:
        """Take note of a new request whose prompt came in segments."""

    def bring_up(self, job: Job) -> None:
        """Prepare a job that is admitted next, before its blocks are looked up."""

    def opened(self, job: Job) -> None:
        """Fill blocks of a job that was admitted, before its first step."""

    def before_step(self, scheduler: Scheduler) -> None:
        """Do work of its own between two steps."""

    def before_forward(self) -> None:
        """Raise an exception that fails the step."""

    def observe(self, step: Step, seconds: float) -> None:
        """Take note of a computed step and its time."""

    def keep(self, job: Job) -> None:
        """Take what it needs of a job's blocks before they are given back."""

    def ended(self, request: Any) -> None:
        """Take note of a request that has ended."""

    def held(self, tokens: list[int], scope: Scope) -> dict[str, int]:
        """Return the tokens of a prompt that each of its tiers would add to those in the pools, by name."""
        return {}

    def recover(self) -> None:
        """Give up what is under way, before the engine drops all that it holds."""


class CacheCompanion(TenantHolder):
    """Base of a companion of a `PrefixCache`."""

    def asked(self, segments: Any, selector: Any) -> AskedCompanion:
        """Return the companion of one call that was given segments. Raises `ConfigError` and `TokensError`."""
        raise NotImplementedError

    def clear(self) -> None:
        """Drop all that it keeps."""


class AskedCompanion(Protocol):
    """A companion of one call: it fills the working cache of the call, and keeps what it computed."""

    def prompt(self, input_ids: object, attention_mask: object, media: object) -> tuple[Any, Any]:
        """Return ids and mask `[1, tokens]` of the call's prompt. Raises `ConfigError`."""
        ...

    def fill(self, calls: Any, request: Any, past: WorkingCache, how: Any) -> None:
        """Bring a working cache from its cached columns to all but the prompt's last one."""
        ...

    def ended(self, request: Any, past: WorkingCache, report: Any, output: Any) -> Any:
        """Return the call's report, with that on passages; `output` is what generate returned."""
        ...


class PassageAccount(Protocol):
    """Account of the passages of a prompt, in tokens."""

    @property
    def computed_tokens(self) -> int:
        """Tokens that were computed as ever."""
        ...

    @property
    def recomputed_rows(self) -> int:
        """Rows of moved passages that were computed again."""
        ...


class PromptInSegments(Protocol):
    """The segments of a request, as the companion that takes them has them."""

    @property
    def report(self) -> PassageAccount | None:
        """The account of the passages, once they were planned."""
        ...


@runtime_checkable
class PassageSettings(Protocol):
    """Settings that add passages to an engine or a cache, as `quire_passages.Passages`."""

    @property
    def outlives(self) -> bool:
        """Whether captures outlive the process, so that all weights are part of their names."""
        ...

    def in_engine(self, forward: Forward, bound: BoundModel, guard: ThreadGuard) -> EngineCompanion:
        """Return the companion of an engine. Raises `ConfigError` for settings that it cannot keep."""
        ...

    def in_cache(self, kept: Any, kinds: Sequence[LayerKind], guard: ThreadGuard) -> CacheCompanion:
        """Return the companion of a `PrefixCache`."""
        ...


def checked_passages(given: object) -> PassageSettings | None:
    """Return the settings of passages that an engine or a cache was given. Raises `ConfigError`."""
    if given is None:
        return None
    if isinstance(given, type) or not isinstance(given, PassageSettings):
        raise ConfigError(f"passages={given!r}; give quire_passages.Passages('1GiB'), or nothing")
    return given

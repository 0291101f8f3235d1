"""The settings of an engine, checked, and what they come to on a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, TypedDict

from quire.config import check_count, format_bytes, parse_bytes
from quire.core import FullAttention, Hint, LayerGroup, Scope, Watcher
from quire.core.policy import PolicyFactory
from quire.engines.hf.memory import split_layout
from quire.errors import ConfigError
from quire.scheduling import Limits
from quire.tensors.model import ModelLayout

if TYPE_CHECKING:
    from quire.engines.tiered.opening import Tiers


class RequestOptions(TypedDict, total=False):
    """What a request takes beside its prompt and parameters.

    scope       who shares its prefixes
    priority    higher ones are served first, and preempted last
    deadline_s  seconds from now, after which it is given up
    retain_s, store_until, hint  of `CacheManager.open`
    """

    scope: Scope | None
    priority: int
    deadline_s: float | None
    retain_s: float | None
    store_until: int | None
    hint: Hint


def job_terms(options: RequestOptions, now: float) -> dict[str, Any]:
    """Return what a `Job` takes of the options of a request. Raises `ConfigError`."""
    known = RequestOptions.__annotations__
    if unknown := options.keys() - known.keys():
        raise ConfigError(
            f"{min(unknown)!r} is no option of a request; these are {', '.join(known)}"
        )
    terms: dict[str, Any] = {**options}
    deadline_s = terms.pop("deadline_s", None)
    return {
        "scope": terms.pop("scope", None),
        "priority": terms.pop("priority", 0),
        "deadline": None if deadline_s is None else now + deadline_s,
        "terms": terms,
    }


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of an `Engine`. Raises `ConfigError`.

    kv_memory        bytes of KV, as a number or "4GiB" (None: 1 GiB), divided over the layer groups; or give
    num_blocks       blocks of each layer group
    block_size       tokens per block
    max_running      requests that run at once
    max_step_tokens  tokens that one forward computes
    max_chunk        tokens of one prompt in a forward; None: as many as there is room for
    max_model_len    tokens of a prompt and its answer; None: what the model and the memory allow
    policy           what is evicted first, see `CacheManager`
    watchers         of the manager
    tiers            where KV goes that outlives the pools, as `PrefixCache` takes it; then `close` the engine
    clock            seconds, rising
    debug_nan        fill fresh memory with NaN, so that reading what nobody computed shows
    """

    kv_memory: int | str | None = None
    num_blocks: int | None = None
    block_size: int = 16
    max_running: int = 64
    max_step_tokens: int = 2048
    max_chunk: int | None = None
    max_model_len: int | None = None
    policy: str | PolicyFactory = "lru"
    watchers: Sequence[Watcher] = ()
    tiers: "Tiers | None" = None
    clock: Callable[[], float] = monotonic
    debug_nan: bool = False

    def __post_init__(self) -> None:
        if not callable(self.clock):
            raise ConfigError(f"clock is a function that returns seconds, got {self.clock!r}")

    @property
    def limits(self) -> Limits:
        """What the scheduler may do in a step."""
        return Limits(
            max_running=self.max_running,
            max_step_tokens=self.max_step_tokens,
            max_chunk=self.max_chunk,
        )

    def groups(self, layout: ModelLayout) -> list[LayerGroup]:
        """Return the layer groups of a model with their blocks."""
        if self.num_blocks is not None:
            if self.kv_memory is not None:
                raise ConfigError(
                    f"kv_memory, {self.kv_memory!r}, and num_blocks, {self.num_blocks}, were both given; "
                    "give one of them"
                )
            count = check_count("num_blocks", self.num_blocks)
            return [LayerGroup(group.name, count, group.kind) for group in layout.groups]
        capacity = parse_bytes("1GiB" if self.kv_memory is None else self.kv_memory)
        expected = self.max_model_len or 8192
        return split_layout(layout, capacity, expected)

    def longest(self, config: Any, groups: Sequence[LayerGroup], layout: ModelLayout) -> int:
        """Return the most tokens of a prompt and its answer: what the model knows positions for, and blocks hold."""
        rooms = [g.num_blocks for g in groups if isinstance(g.kind, FullAttention)]
        held = min(rooms, default=None)
        positions = getattr(config, "max_position_embeddings", None)
        limits = [n for n in (positions, held and held * self.block_size) if n]
        if self.max_model_len is None:
            return min(limits, default=2**31 - 1)
        wanted = check_count("max_model_len", self.max_model_len)
        if wanted > min(limits, default=wanted):
            raise ConfigError(
                f"max_model_len is {wanted} tokens; the model has {positions} positions, and the blocks hold "
                f"{held and held * self.block_size} tokens of {format_bytes(layout.bytes_per_block)} per block of "
                f"{self.block_size}: give more kv_memory, or a lower length"
            )
        return wanted

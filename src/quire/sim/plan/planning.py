"""The whole plan of a deployment, from its model, its devices, its tiers and its trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from quire.errors import ConfigError
from quire.sim.hardware import Roofline, Tier
from quire.sim.plan.blocks import BlockAdvice, advise
from quire.sim.plan.crossover import NEW_TOKENS, Crossover, crossover
from quire.sim.plan.memory import Budget, Placement, budget
from quire.sim.plan.value import GIB, Room, Workload, Worth
from quire.sim.reuse import reuses
from quire.sim.trace import Trace, TraceRequest, with_block_size

STEP = 64 * GIB
MAX_ROWS = 9
MAX_BATCH = 1024
"""Sequences that a step decodes at most: what engines allow."""

DEFAULT_CONTEXT_LIMIT = 131072
HOST_SHARE = 0.8
"""Share of the host link's bandwidth that copies reach; an assumption."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds by the roofline.

    `prefill_s`        the context and the new tokens, from nothing
    `turn_s`           the new tokens after a context on the device
    `decode_step_s`    one step of all users, `MAX_BATCH` at most; `tokens_per_s` in all
    `break_even_bandwidth`  bytes per second from which fetching a context beats computing it
    """

    prefill_s: float
    turn_s: float
    break_even_bandwidth: float
    decode_step_s: float
    tokens_per_s: float
    mfu: float
    bandwidth_efficiency: float


class TierPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A tier: what it holds, and when fetching from it is worth it.

    `sequences`  of the context that it holds
    `fetched_s`  time to the first token of new tokens after a whole context in this tier
    """

    name: str
    capacity_bytes: int
    bandwidth: float
    latency_s: float
    sequences: int
    fetched_s: float
    crossover: Crossover


class TraceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The trace that a plan was made for.

    `unique_bytes`  K and V of all its different blocks
    `ceiling`       its token hit without a limit of memory
    `duration_s`    from its first arrival to its last
    `too_long`      share of prompts beyond the model's context
    """

    source: str
    block_size: int
    num_requests: int
    prompt_tokens: int
    unique_bytes: int
    ceiling: float
    duration_s: float
    too_long: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan; `worth` and `trace` are there when a trace was given."""

    model: str
    params: int
    active_params: int
    accelerator: str
    num_gpus: int
    memory: Budget
    speed: Speed
    tiers: list[TierPlan]
    blocks: BlockAdvice
    worth: list[Worth]
    trace: TraceFacts | None


def plan(
    placement: Placement,
    context: int,
    tiers: Sequence[Tier] = (),
    *,
    trace: Trace | None = None,
    new_tokens: int = NEW_TOKENS,
    roofline: Roofline | None = None,
) -> Plan:
    """Plan for sequences of `context` tokens.

    `roofline`: a calibrated one; else one with assumed rates. Without tiers, host memory behind
    the accelerator's own link is looked at. Raises `ConfigError` for a model that does not fit,
    with what it takes, and `TraceError` for a trace that cannot be read.
    """
    model = placement.model
    if context < 1 or new_tokens < 1:
        raise ConfigError(f"context is {context} and new_tokens {new_tokens}; both are at least 1")
    if model.max_context and context > model.max_context:
        raise ConfigError(
            f"a context of {context:,} tokens is more than the {model.max_context:,} that "
            f"{model.name} was made for"
        )
    if roofline is None:
        roofline = Roofline(model, placement.accelerator, placement.num_gpus)
    memory = budget(placement, context)
    looked_at = list(tiers) or [host_tier(placement)]
    limit = model.max_context or DEFAULT_CONTEXT_LIMIT
    watched = None if trace is None else _Watched(trace)
    read = None if watched is None else Workload(reuses(watched))
    worth: list[Worth] = []
    if read is not None:
        hierarchies = _hierarchies(read, placement, tiers, looked_at[0])
        worth = read.worth(roofline, _cacheable(memory), hierarchies)
    return Plan(
        model=model.name,
        params=model.params,
        active_params=model.active_params,
        accelerator=placement.accelerator.name,
        num_gpus=placement.num_gpus,
        memory=memory,
        speed=_speed(roofline, memory, new_tokens),
        tiers=[
            TierPlan(
                name=tier.name,
                capacity_bytes=tier.capacity_bytes,
                bandwidth=tier.bandwidth,
                latency_s=tier.latency_s,
                sequences=tier.capacity_bytes // max(1, model.kv.of(context)),
                fetched_s=roofline.ttft_s(new_tokens, context, tier),
                crossover=crossover(
                    roofline,
                    tier,
                    limit,
                    new_tokens=new_tokens,
                    block_size=placement.block_size,
                ),
            )
            for tier in looked_at
        ],
        blocks=_block_advice(placement, context, tiers, trace, memory),
        worth=worth,
        trace=None if watched is None or read is None else _facts(watched, read, roofline),
    )


def host_tier(placement: Placement, capacity_bytes: int = 256 * GIB) -> Tier:
    """Return host memory behind the links of all devices together."""
    links = placement.accelerator.link_bandwidth * HOST_SHARE * placement.num_gpus
    return Tier("host", capacity_bytes, links, 20e-6)


def _cacheable(memory: Budget) -> int:
    """Return the bytes of different K and V that the devices hold."""
    return int(memory.kv_bytes / memory.kv_copies)


def _speed(roofline: Roofline, memory: Budget, new_tokens: int) -> Speed:
    contexts = [memory.context] * min(MAX_BATCH, max(1, memory.users))
    step = roofline.decode_s(contexts)
    whole = roofline.prefill_s(memory.context + new_tokens)
    return Speed(
        prefill_s=whole,
        turn_s=roofline.prefill_s(new_tokens, memory.context),
        break_even_bandwidth=roofline.model.kv.of(memory.context) / whole,
        decode_step_s=step,
        tokens_per_s=len(contexts) / step,
        mfu=roofline.mfu,
        bandwidth_efficiency=roofline.bandwidth_efficiency,
    )


def _hierarchies(
    read: Workload, placement: Placement, tiers: Sequence[Tier], first: Tier
) -> list[list[Room]]:
    """Return what is compared: the first tier in steps of 64 GiB, then each further tier whole.

    The steps end at the tier's own size, or where the trace cannot use more; the later ones
    are longer, so that there are few.
    """
    per_token = read.bytes_per_token(placement.model)
    useful = int(max(0.0, read.unique_tokens * per_token - max(0, placement.free_bytes)))
    last = min(first.capacity_bytes if tiers else useful, useful + STEP)
    sizes, step = [0], STEP
    while sizes[-1] < last and len(sizes) < MAX_ROWS:
        sizes.append(min(sizes[-1] + step, last) if tiers else sizes[-1] + step)
        step *= 2 if len(sizes) > 4 else 1
    if tiers and sizes[-1] < last:
        sizes[-1] = last
    compared = [[Room(first, size)] if size else [] for size in sizes]
    whole = [Room(tier, tier.capacity_bytes) for tier in tiers]
    return compared + [whole[:count] for count in range(2, len(whole) + 1)]


def _block_advice(
    placement: Placement,
    context: int,
    tiers: Sequence[Tier],
    trace: Trace | None,
    memory: Budget,
) -> BlockAdvice:
    if trace is None:
        return advise(placement.model, context, tiers)

    def hit_at(size: int) -> float:
        read = Workload(reuses(with_block_size(trace, size)))
        per_token = read.bytes_per_token(placement.model)
        held = _cacheable(memory) + sum(tier.capacity_bytes for tier in tiers)
        return read.token_hit(int(held / per_token))

    return advise(placement.model, context, tiers, trace_block=trace.block_size, hit_at=hit_at)


class _Watched:
    """A trace that notes when the last request came."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.duration_s = 0.0

    @property
    def source(self) -> str:
        return self._trace.source

    @property
    def format(self) -> str:
        return self._trace.format

    @property
    def block_size(self) -> int:
        return self._trace.block_size

    def __iter__(self) -> Iterator[TraceRequest]:
        for request in self._trace:
            self.duration_s = request.time_s
            yield request


def _facts(trace: _Watched, read: Workload, roofline: Roofline) -> TraceFacts:
    model = roofline.model
    per_token = read.bytes_per_token(model)
    return TraceFacts(
        source=trace.source,
        block_size=trace.block_size,
        num_requests=read.num_requests,
        prompt_tokens=read.prompt_tokens,
        unique_bytes=int(read.unique_tokens * per_token),
        ceiling=read.token_hit(read.unique_tokens),
        duration_s=trace.duration_s,
        too_long=read.share_above(model.max_context) if model.max_context else 0.0,
    )

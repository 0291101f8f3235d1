"""The whole plan of a deployment, from its model, its devices, its tiers and its trace."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.config import check_count
from quire.errors import ConfigError
from quire_sim.hardware import EngineTimes, MemoryTier, ModelTimes
from quire_sim.plan.blocks import BlockAdvice, advise
from quire_sim.plan.crossover import NEW_TOKENS, Crossover, crossover
from quire_sim.plan.memory import Budget, Placement, budget
from quire_sim.plan.value import GIB, LruHits, Worth, worth_of
from quire_sim.reuse import reuses
from quire_sim.trace import Trace, with_block_size

STEP = 64 * GIB
MAX_ROWS = 9
MAX_BATCH = 1024
"""Sequences that a step decodes at most: what engines allow."""

DEFAULT_CONTEXT_LIMIT = 131072
HOST_SHARE = 0.8
"""Share of the host link's bandwidth that copies reach; an assumption."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, where they come from, and by which share they were off there (None: not known).

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
    basis: str
    error: float | None


class TierPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A tier: its capacity, and the contexts for which a fetch from it pays.

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


class PlannedTrace(msgspec.Struct, frozen=True, kw_only=True):
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


class DeploymentPlan(msgspec.Struct, frozen=True, kw_only=True):
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
    trace: PlannedTrace | None = None


def plan(
    placement: Placement,
    context: int,
    tiers: Sequence[MemoryTier] = (),
    *,
    trace: Trace | None = None,
    new_tokens: int = NEW_TOKENS,
    timing: ModelTimes | None = None,
) -> DeploymentPlan:
    """Plan for sequences of `context` tokens.

    `timing`: None is by data sheets. Without tiers, host memory behind
    the accelerator's own link is looked at. Raises `ConfigError` for a model that does not fit,
    with what it takes, and `TraceError` for a trace that cannot be read.
    """
    model = placement.model
    check_count("context", context)
    check_count("new_tokens", new_tokens)
    if model.max_context and context > model.max_context:
        raise ConfigError(
            f"a context of {context:,} tokens is more than the {model.max_context:,} that "
            f"{model.name} was made for"
        )
    if timing is None:
        timing = EngineTimes(model, placement.accelerator, placement.num_gpus)
    memory = budget(placement, context)
    looked_at = list(tiers) or [host_tier(placement)]
    limit = model.max_context or DEFAULT_CONTEXT_LIMIT
    worth: list[Worth] = []
    planned = None
    if trace is not None:
        hits = LruHits(reuses(trace, trace.block_size))
        hierarchies = _hierarchies(hits, placement, tiers, looked_at[0])
        worth = worth_of(hits, timing, _cacheable(memory), hierarchies)
        planned = _planned_trace(trace, hits, timing)
    return DeploymentPlan(
        model=model.name,
        params=model.params,
        active_params=model.active_params,
        accelerator=placement.accelerator.name,
        num_gpus=placement.num_gpus,
        memory=memory,
        speed=_speed(timing, memory, new_tokens),
        tiers=[
            TierPlan(
                name=tier.name,
                capacity_bytes=tier.capacity_bytes,
                bandwidth=tier.bandwidth,
                latency_s=tier.latency_s,
                sequences=tier.capacity_bytes // max(1, model.kv.of(context)),
                fetched_s=timing.ttft_s(new_tokens, context, tier),
                crossover=crossover(
                    timing, tier, limit, new_tokens=new_tokens, block_size=placement.block_size
                ),
            )
            for tier in looked_at
        ],
        blocks=_block_advice(placement, context, tiers, trace, memory),
        worth=worth,
        trace=planned,
    )


def host_tier(placement: Placement, capacity_bytes: int = 256 * GIB) -> MemoryTier:
    """Return host memory behind the links of all devices together."""
    links = placement.accelerator.link_bandwidth * HOST_SHARE * placement.num_gpus
    return MemoryTier("host", capacity_bytes, links, 20e-6)


def _cacheable(memory: Budget) -> int:
    """Return the bytes of different K and V that the devices hold."""
    return int(memory.kv_bytes / memory.kv_copies)


def _speed(timing: ModelTimes, memory: Budget, new_tokens: int) -> Speed:
    contexts = [memory.context] * min(MAX_BATCH, max(1, memory.users))
    step = timing.decode_s(contexts)
    whole = timing.prefill_s(memory.context + new_tokens)
    return Speed(
        prefill_s=whole,
        turn_s=timing.prefill_s(new_tokens, memory.context),
        break_even_bandwidth=timing.model.kv.of(memory.context) / whole,
        decode_step_s=step,
        tokens_per_s=len(contexts) / step,
        basis=timing.basis,
        error=timing.known_error(),
    )


def _hierarchies(
    hits: LruHits, placement: Placement, tiers: Sequence[MemoryTier], first: MemoryTier
) -> list[list[MemoryTier]]:
    """Return the hierarchies to compare: the first tier in steps of 64 GiB, then each further tier whole.

    The steps end at the tier's own size, or where the trace cannot use more; the later ones
    are longer, so that there are few.
    """
    per_token = hits.bytes_per_token(placement.model)
    useful = int(max(0.0, hits.unique_tokens * per_token - max(0, placement.free_bytes)))
    last = min(first.capacity_bytes if tiers else useful, useful + STEP)
    sizes, step = [0], STEP
    while sizes[-1] < last and len(sizes) < MAX_ROWS:
        sizes.append(min(sizes[-1] + step, last) if tiers else sizes[-1] + step)
        step *= 2 if len(sizes) > 4 else 1
    if tiers and sizes[-1] < last:
        sizes[-1] = last
    compared = [
        [msgspec.structs.replace(first, capacity_bytes=size)] if size else [] for size in sizes
    ]
    return compared + [[*tiers[:count]] for count in range(2, len(tiers) + 1)]


def _block_advice(
    placement: Placement,
    context: int,
    tiers: Sequence[MemoryTier],
    trace: Trace | None,
    memory: Budget,
) -> BlockAdvice:
    if trace is None:
        return advise(placement.model, context, tiers)

    def hit_at(size: int) -> float:
        hits = LruHits(reuses(with_block_size(trace, size), size))
        held = _cacheable(memory) + sum(tier.capacity_bytes for tier in tiers)
        return hits.token_hit(int(held / hits.bytes_per_token(placement.model)))

    return advise(placement.model, context, tiers, trace_block=trace.block_size, hit_at=hit_at)


def _planned_trace(trace: Trace, hits: LruHits, timing: ModelTimes) -> PlannedTrace:
    model, read = timing.model, hits.read
    too_long = read.prompt_tokens > (model.max_context or np.inf)
    return PlannedTrace(
        source=trace.source,
        block_size=trace.block_size,
        num_requests=read.num_requests,
        prompt_tokens=hits.prompt_tokens,
        unique_bytes=int(hits.unique_tokens * hits.bytes_per_token(model)),
        ceiling=hits.token_hit(hits.unique_tokens),
        duration_s=read.duration_s,
        too_long=float(too_long.mean()),
    )

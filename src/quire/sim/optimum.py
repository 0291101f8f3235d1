"""The optimum as rows beside replayed policies: Belady's rule with bypass, at given capacities."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import numpy as np

from quire.sim.curves import blocks_found
from quire.sim.replay import REASONS, Observer, ReplayResult, check_capacity
from quire.sim.reuse import Counts, Reuses, reuses
from quire.sim.stacks import optimum_steps
from quire.sim.trace.rows import Trace

OPTIMUM = "optimum"


def optimum_results(
    trace: Trace,
    capacities: Sequence[int],
    *,
    observers: Sequence[Sequence[Observer]] = (),
    count_from: int = 0,
) -> list[ReplayResult]:
    """Return the hits of the optimum at each capacity, in blocks, as a replay of it would.

    A miss counts as evicted where an earlier request had the block. The trace is read once, and
    once more for the `observers` of each capacity, as in a replay. See `optimum_steps`.
    """
    for capacity in capacities:
        check_capacity(capacity)
    begun = time.process_time()
    read = reuses(trace, trace.block_size)
    steps = optimum_steps(read)
    reading = time.process_time() - begun
    results: list[ReplayResult] = []
    for number, capacity in enumerate(capacities):
        begun = time.process_time()
        hits = blocks_found(steps, capacity, read.num_requests)
        result = _counted(read, capacity, hits[count_from:])
        for request, found in zip(trace, hits.tolist(), strict=True) if observers else ():
            for observe in observers[number]:
                observe(request, min(found * read.block_size, request.prompt_tokens))
        seconds = reading / len(capacities) + time.process_time() - begun
        results.append(msgspec.structs.replace(result, seconds=seconds))
    return results


def _counted(read: Reuses, capacity: int, hits: Counts) -> ReplayResult:
    """Count the last `len(hits)` requests of a trace."""
    counted = slice(read.num_requests - len(hits), None)
    prompts, blocks = read.prompt_tokens[counted], read.prompt_blocks[counted]
    seen = np.zeros(read.num_requests, np.int64)
    np.add.at(seen, read.later, read.num_blocks)
    size = read.block_size
    held = np.minimum(blocks, capacity)
    ends = (hits, np.minimum(seen[counted], held), held, blocks)
    hit_tokens, seen_tokens, held_tokens, named_tokens = (
        int(np.minimum(end * size, prompts).sum()) for end in ends
    )
    prompt_tokens = int(prompts.sum())
    missed = dict.fromkeys(REASONS, 0) | {
        "cold": held_tokens - seen_tokens,
        "evicted": seen_tokens - hit_tokens,
        "oversized": named_tokens - held_tokens,
        "partial_block": prompt_tokens - named_tokens,
    }
    return ReplayResult(
        policy=OPTIMUM,
        capacity_blocks=capacity,
        block_size=size,
        num_requests=len(hits),
        prompt_tokens=prompt_tokens,
        hit_tokens=hit_tokens,
        missed=missed,
        prompt_blocks=int(blocks.sum()),
        hit_blocks=int(hits.sum()),
        evicted_blocks=None,
        seconds=0.0,
    )

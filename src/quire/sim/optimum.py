"""The optimum as rows beside replayed policies: Belady's rule with bypass, at given capacities.

`quire.sim.curves` knows what it finds at every capacity. What it evicts depends on the
capacity, so it is played through here for each one, over the reuses of the trace.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from quire.sim.replay import Observer, ReplayResult, check_capacity
from quire.sim.reuse import Counts, Reuses, reuses
from quire.sim.trace.rows import Trace

OPTIMUM = "optimum"


class _Held(msgspec.Struct):
    """Blocks [`start`, `start` + `count`) of the chain of request `user`, next used together."""

    user: int
    start: int
    count: int


def optimum_results(
    trace: Trace,
    capacities: Sequence[int],
    *,
    observers: Sequence[Sequence[Observer]] = (),
    count_from: int = 0,
    clock: Callable[[], float] = time.process_time,
) -> list[ReplayResult]:
    """Return what the optimum finds at each capacity, in blocks, as a replay of it would.

    After every request a cache keeps, of what it held and what the request used, the blocks
    that are used again soonest; it needs no room for those that it leaves out. Evicted is what
    it held and gave up although it is used again. A miss counts as evicted where an earlier
    request had the block. The trace is read once, and once more for the `observers` of each
    capacity, as in a replay. Source: Belady, A study of replacement algorithms for a
    virtual-storage computer, IBM Systems Journal 5(2), 1966, doi:10.1147/sj.52.0078.
    """
    for capacity in capacities:
        check_capacity(capacity)
    begun = clock()
    read = reuses(trace)
    reading = clock() - begun
    results: list[ReplayResult] = []
    for number, capacity in enumerate(capacities):
        begun = clock()
        hits, evicted = play(read, capacity)
        result = _counted(read, capacity, hits[count_from:], int(evicted[count_from:].sum()))
        for request, found in zip(trace, hits.tolist(), strict=True) if observers else ():
            for observe in observers[number]:
                observe(request, min(found * read.block_size, request.prompt_tokens))
        seconds = reading / len(capacities) + clock() - begun
        results.append(msgspec.structs.replace(result, seconds=seconds))
    return results


def play(read: Reuses, capacity: int) -> tuple[Counts, Counts]:
    """Return the blocks that each request finds and gives up, int64 [requests] each."""
    hits = np.zeros(read.num_requests, np.int64)
    evicted = np.zeros(read.num_requests, np.int64)
    order = np.argsort(read.earlier, kind="stable")
    columns = (read.earlier, read.later, read.num_blocks)
    users, uses, counts = (column[order].tolist() for column in columns)
    due: dict[int, list[_Held]] = {}
    latest: list[tuple[int, int, _Held]] = []
    held = at = 0
    for now in range(read.num_requests):
        found = 0
        for each in due.pop(now, ()):
            found += each.count
            each.count = 0
        hits[now] = found
        held -= found
        start = 0
        while at < len(users) and users[at] == now:
            kept = _Held(now, start, counts[at])
            start += kept.count
            held += kept.count
            due.setdefault(uses[at], []).append(kept)
            heapq.heappush(latest, (-uses[at], now, kept))
            at += 1
        while held > capacity:
            _, _, last = latest[0]
            gone = min(last.count, held - capacity)
            end = last.start + last.count
            was_held = gone if last.user != now else min(gone, max(found - end + gone, 0))
            evicted[now] += was_held
            held -= gone
            last.count -= gone
            if not last.count:
                heapq.heappop(latest)
    return hits, evicted


def _counted(read: Reuses, capacity: int, hits: Counts, evicted: int) -> ReplayResult:
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
    missed = {
        "cold": held_tokens - seen_tokens,
        "evicted": seen_tokens - hit_tokens,
        "computing": 0,
        "oversized": named_tokens - held_tokens,
        "partial_block": prompt_tokens - named_tokens,
    }
    return ReplayResult(
        OPTIMUM,
        capacity,
        size,
        len(hits),
        prompt_tokens,
        hit_tokens,
        missed,
        int(blocks.sum()),
        int(hits.sum()),
        evicted,
        0.0,
    )

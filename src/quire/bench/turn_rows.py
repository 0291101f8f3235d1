"""Rows of a served turn under eviction: what a full cache costs a request.

200 sessions share a system prompt of 2,048 tokens; a turn goes to a session drawn uniformly and adds 304 tokens to its
history, which is the prompt. The pool holds 2,000 blocks of 16 tokens, so most of a history is evicted before its
session comes back: a turn computes and publishes some 80 blocks, and evicts as many.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from time import process_time_ns

from quire.bench import serving
from quire.bench.serving import PLAIN, Features, store
from quire.bench.timing import Row
from quire.bench.workloads import BLOCK_SIZE, ServeLoop, Tokens

LOOP = ServeLoop(
    pool_tokens=32_000,
    num_sessions=200,
    turns=None,
    output_tokens=0,
    seed=5,
    num_requests=1_300,
    user_tokens=304,
)
WARMUP = 200
"""Turns that fill the pool; they are not timed."""

ROUNDS = 5
"""Fresh managers that a row is measured on."""


def _turn(features: Features) -> Row:
    """Open, reserve, commit and close each request, and take the events; the median turn of the median round.

    `published_blocks` is how many a turn computes on average, `hit_rate` that of the timed and untimed turns.
    """
    prompts = [turn.prompt for turn in LOOP.requests()]
    medians: list[float] = []
    hit_rate = 0.0
    for _ in range(ROUNDS):
        median, hit_rate = _round(features, prompts)
        medians.append(median)
    tokens = sum(len(prompt) for prompt in prompts) * (1 - hit_rate)
    return {
        "median_us": statistics.median(medians),
        "published_blocks": tokens / BLOCK_SIZE / len(prompts),
        "hit_rate": hit_rate,
    }


def _round(features: Features, prompts: list[Tokens]) -> tuple[float, float]:
    """Return the median time of a turn in microseconds, and the hit rate."""
    manager, take_events = serving.build(LOOP.pool_tokens, features)
    times: list[int] = []
    for prompt in prompts:
        start = process_time_ns()
        store(manager, prompt)
        take_events()
        times.append(process_time_ns() - start)
    return statistics.median(times[WARMUP:]) / 1_000, manager.stats.hit_rate


ROWS: dict[str, Callable[[], Row]] = {
    "turn_evicting": partial(_turn, PLAIN),
    "turn_evicting_curve": partial(_turn, Features(curve=True)),
    "turn_evicting_events": partial(_turn, Features(events=True)),
}
"""Every row's measurement by name, in the order of the table."""

"""quire's own rows of the comparison: the control plane, timed through its public calls."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np

from quire import ops
from quire.bench import hybrid_rows, serving, timing, turn_rows
from quire.bench import workloads as load
from quire.bench.serving import PLAIN, Features, manager_of
from quire.bench.timing import Progress, Row
from quire.core import CacheManager, Sequence
from quire.core.blocks import BlockPool

MAX_RUNNING = 16
"""Requests that serve loop B runs at once: so many always fit its pool."""

LOOKAHEAD = 64
"""Requests that wait at a time in serve loop B: one for each live session."""


def rows(wanted: list[str] | None = None, progress: Progress | None = None) -> list[Row]:
    """Measure the named rows (all by default), medians of CPU time, in one process.

    A row has `name` and `median_us`, `requests_per_s` with `hit_rate`, or `bytes`; match rows
    add `floor_us`, the time of one memcmp of the same tokens. Raises `ValueError` for a name
    that does not exist.
    """
    timing.check_names(wanted or (), ROWS)
    measured: list[Row] = []
    for name in wanted or ROWS:
        if progress is not None:
            progress(name)
        measured.append({"name": name, **ROWS[name]()})
    return measured


def _match(num_tokens: int) -> Row:
    """Probe a prompt of which all but the last token lies on one cached edge."""
    manager = manager_of(2 * num_tokens)
    prompt = load.prompt(num_tokens + 1)
    serving.store(manager, prompt)
    return serving.match_row(manager, prompt)


def _match_branches() -> Row:
    manager = manager_of(65_536)
    prompt = load.prompt(load.SHARED_PREFIX + 1)
    serving.store(manager, prompt)
    for other in load.branching_prompts(prompt[:-1]):
        serving.store(manager, other)
    return serving.match_row(manager, prompt)


def _insert(features: Features) -> Row:
    """Commit 512 fresh tokens of a request that found 8k cached: publish 32 blocks."""
    count = 400
    num_tokens = load.SHARED_PREFIX + (count + 8) * 2 * load.FRESH_SUFFIX
    manager, take_events = serving.build(num_tokens, features)
    prefix = load.prompt(load.SHARED_PREFIX)
    serving.store(manager, np.append(prefix, np.int32(1)))
    opened = [serving.begin(manager, each) for each in load.suffixed_prompts(prefix, count, seed=7)]

    def insert(item: tuple[Sequence, load.Tokens]) -> None:
        manager.commit(*item)
        take_events()

    return {"median_us": timing.each_us(insert, opened)}


def _alloc_free(num_blocks: int) -> Row:
    pool = BlockPool(load.ALLOC_POOL_BLOCKS)

    def call() -> None:
        pool.give_back(pool.take(num_blocks))

    return {"median_us": timing.repeat_us(call)}


def _leaf_manager() -> CacheManager:
    return serving.store_leaves(manager_of(load.NUM_LEAVES * load.LEAF_TOKENS * 2))


def _evict_one() -> Row:
    manager = _leaf_manager()
    return {
        "median_us": timing.each_us(
            partial(ops.reclaim, manager), [load.LEAF_TOKENS // load.BLOCK_SIZE] * 2_000
        )
    }


def _evict_all() -> Row:
    manager = _leaf_manager()
    return {"median_us": timing.once_us(lambda: ops.reclaim(manager, manager.num_cached))}


def _decode(batch_size: int) -> Row:
    return serving.decode_row(manager_of(batch_size * 512), load.decode_prompts(batch_size))


def _serve_a(features: Features) -> Row:
    manager, take_events = serving.build(load.SERVE_A.pool_tokens, features)
    watch = timing.Stopwatch()
    for _, prompt, _ in load.SERVE_A.requests():
        with watch:
            serving.store(manager, prompt)
            take_events()
    rate = load.SERVE_A.num_requests * 1e9 / watch.total_ns
    return {"requests_per_s": rate, "hit_rate": manager.stats.hit_rate}


def _serve_b() -> Row:
    """Serve loop B with MAX_RUNNING requests at a time; a step decodes a token for all of them."""
    manager = manager_of(load.SERVE_B.pool_tokens)
    watch = timing.Stopwatch()
    for wave in _waves(load.SERVE_B.requests()):
        with watch:
            running = [serving.prefill(manager, turn.prompt) for turn in wave]
            batch = manager.batch(running)
            outputs = np.stack([turn.output for turn in wave], axis=1)
            for tokens in outputs:
                manager.reserve_step(batch)
                manager.commit_step(batch, tokens)
            for seq in running:
                manager.close(seq)
    rate = load.SERVE_B.num_requests * 1e9 / watch.total_ns
    return {"requests_per_s": rate, "hit_rate": manager.stats.hit_rate}


def _waves(turns: Iterator[load.ServedTurn]) -> Iterator[list[load.ServedTurn]]:
    """Group requests into waves of up to MAX_RUNNING different sessions.

    A session has one request running at a time, and its requests keep their order; one whose
    session is in the wave already waits for the next, up to LOOKAHEAD requests long.
    """
    waiting: list[load.ServedTurn] = list(islice(turns, LOOKAHEAD))
    while waiting:
        wave: list[load.ServedTurn] = []
        left: list[load.ServedTurn] = []
        seen: set[int] = set()
        for turn in waiting:
            taken = len(wave) < MAX_RUNNING and turn.session not in seen
            (wave if taken else left).append(turn)
            seen.add(turn.session)
        yield wave
        waiting = left + list(islice(turns, len(wave)))


def _pool() -> Row:
    make = partial(BlockPool, load.LARGE_POOL_BLOCKS)
    return {"median_us": timing.repeat_us(make, samples=9)}


def _leaf_bytes() -> Row:
    """Growth of the process per cached leaf, pool included."""
    _, grown = timing.growth_bytes(_leaf_manager)
    return {"bytes": grown / load.NUM_LEAVES}


def _import(module: str) -> Row:
    """Import a module in a fresh interpreter; NumPy and msgspec are part of it.

    CPU time of the importing thread: NumPy's worker threads spin for a while beside it.
    """
    code = f"import time; t = time.thread_time(); import {module}; print(time.thread_time() - t)"
    seconds = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)  # noqa: S603 - our own code
        for _ in range(7)
    ]
    return {"median_us": statistics.median(seconds) * 1e6}


ROWS: dict[str, Callable[[], Row]] = {
    "bytes_per_64_token_leaf": _leaf_bytes,
    **{name: partial(_match, length) for name, length in load.MATCH_LENGTHS.items()},
    "match_32k_102_turns": lambda: serving.match_turns_row(manager_of(65_536)),
    "match_8k_26_branches": _match_branches,
    "insert_512_after_8k": partial(_insert, PLAIN),
    "insert_512_after_8k_events": partial(_insert, Features(events=True)),
    **{f"alloc_free_{run}": partial(_alloc_free, run) for run in load.ALLOC_RUNS},
    "evict_one_of_10k": _evict_one,
    "evict_10k": _evict_all,
    **{f"decode_{batch}": partial(_decode, batch) for batch in load.DECODE_BATCHES},
    "serve_a": partial(_serve_a, PLAIN),
    "serve_a_events": partial(_serve_a, Features(events=True)),
    "serve_b": _serve_b,
    **turn_rows.ROWS,
    "fork_16_of_100k": lambda: serving.fork_row(manager_of(2 * serving.FORKED_TOKENS)),
    **hybrid_rows.ROWS,
    "pool_1m": _pool,
    "import_core": partial(_import, "quire.core"),
    "import_quire": partial(_import, "quire"),
}
"""Every row's measurement by name, in the order of the table."""

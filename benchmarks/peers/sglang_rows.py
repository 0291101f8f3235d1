"""Rows of one of SGLang's prefix trees: `python sglang_rows.py legacy|unified|rust [names]`.

Runs inside the peers' environment, without quire, and prints one JSON array. SGLang has no decode step that publishes blocks, so it has no `decode_*` and no `serve_b` row.
"""

from __future__ import annotations

import json
import statistics
import sys
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

import adapter
import sglang_hybrid
import timing
import workloads as work
from sglang_peer import PAGE, Peer, load

CORES = ("legacy", "unified", "rust")


def match_rows(core: str) -> Iterator[timing.Row]:
    """Yield the rows of lookups."""
    for name, length in work.MATCH_LENGTHS.items():
        peer = Peer(core, 2 * length)
        key = peer.store(work.prompt(length))
        assert peer.match(key).device_prefix_len == length
        yield {"name": name, "median_us": timing.repeat_us(partial(peer.match, key))}
    peer = Peer(core, 65_536)
    tokens = work.prompt(32_768)
    for length in work.turn_lengths():
        key = peer.store(tokens[:length])
    assert peer.match(key).device_prefix_len == 32_768
    yield {"name": "match_32k_102_turns", "median_us": timing.repeat_us(partial(peer.match, key))}
    peer = Peer(core, 65_536)
    path = work.prompt(8_192)
    key = peer.store(path)
    for branch in work.branching_prompts(path):
        peer.store(branch)
    assert peer.match(key).device_prefix_len == 8_192
    yield {"name": "match_8k_26_branches", "median_us": timing.repeat_us(partial(peer.match, key))}


def insert_row(core: str, *, events: bool) -> timing.Row:
    """Return the row of an insertion of fresh tokens below a shared prefix."""
    peer = Peer(core, 262_144, events=events)
    prefix = work.prompt(work.SHARED_PREFIX)
    peer.store(prefix)
    path = peer.tree.path_device_indices(peer.match(peer.key(prefix)).last_device_node)
    inputs = [
        (peer.key(tokens), peer.torch.cat((path, peer.allocate(work.FRESH_SUFFIX))))
        for tokens in work.suffixed_prompts(prefix, 264, seed=int(events))
    ]
    peer.take_events()

    def insert(item: tuple[array[int], Any]) -> None:
        peer.insert(*item, work.SHARED_PREFIX)
        if events:
            peer.take_events()

    name = "insert_512_after_8k_events" if events else "insert_512_after_8k"
    return {"name": name, "median_us": timing.each_us(insert, inputs)}


def pool_rows(core: str) -> Iterator[timing.Row]:
    """Yield the rows of the allocator alone."""
    pool = Peer(core, work.ALLOC_POOL_BLOCKS * PAGE).pool
    for blocks in work.ALLOC_RUNS:

        def cycle(tokens: int = blocks * PAGE) -> None:
            pool.free_segment(pool.alloc(tokens), start_pos=0)

        yield {"name": f"alloc_free_{blocks}", "median_us": timing.repeat_us(cycle)}
    pool = Peer(core, work.LARGE_POOL_BLOCKS * PAGE).pool
    yield {
        "name": "pool_1m",
        "median_us": timing.repeat_us(pool.clear),
        "bytes": pool.free_pages.nbytes / work.LARGE_POOL_BLOCKS,
    }


def evict_rows(core: str) -> Iterator[timing.Row]:
    """Yield the rows of eviction out of many leaves."""
    peer = full_of_leaves(core)
    single = [timing.once_us(partial(peer.evict, work.LEAF_TOKENS)) for _ in range(40)]
    whole: list[float] = []
    for _ in range(3):
        peer = full_of_leaves(core)
        whole.append(timing.once_us(partial(peer.evict, work.NUM_LEAVES * work.LEAF_TOKENS)))
        assert peer.pool.available_size() == work.NUM_LEAVES * work.LEAF_TOKENS
    yield {"name": "evict_one_of_10k", "median_us": statistics.median(single)}
    yield {"name": "evict_10k", "median_us": statistics.median(whole)}


def full_of_leaves(core: str, count: int = work.NUM_LEAVES) -> Peer:
    """Return a tree of `count` leaves of `LEAF_TOKENS` tokens that fill its pool."""
    peer = Peer(core, count * work.LEAF_TOKENS)
    for tokens in work.leaves(count):
        peer.insert(peer.key(tokens), peer.pool.alloc(work.LEAF_TOKENS))
    return peer


def leaf_row(core: str) -> timing.Row:
    """Return the memory that one leaf holds, the allocator's share included."""
    full_of_leaves(core, 100)  # what the first calls load is not the leaves'
    peer, grown = timing.growth_bytes(lambda: full_of_leaves(core))
    del peer
    traced = adapter.traced_bytes(lambda: full_of_leaves(core))
    return {
        "name": "bytes_per_64_token_leaf",
        "bytes": grown / work.NUM_LEAVES,
        "traced_bytes": traced / work.NUM_LEAVES,
    }


def serve_row(core: str, *, events: bool) -> timing.Row:
    """Return serve loop A, requests per second of CPU time and its hit rate."""
    peer = Peer(core, work.SERVE_A.pool_tokens, events=events)
    clock = timing.Stopwatch()
    cached = total = 0
    for turn in work.SERVE_A.requests():
        key = peer.key(turn.prompt)
        with clock:
            cached += peer.serve(key)
            if events:
                peer.take_events()
        total += len(key)
    return {
        "name": "serve_a_events" if events else "serve_a",
        "requests_per_s": work.SERVE_A.num_requests / clock.total_ns * 1e9,
        "hit_rate": cached / total,
    }


def measurements(core: str) -> Iterator[adapter.Measurement]:
    """Yield what there is of `core`; rows of many nodes first, while the process is small."""
    yield ("bytes_per_64_token_leaf",), lambda: [leaf_row(core)]
    yield ("evict_one_of_10k", "evict_10k"), lambda: evict_rows(core)
    matches = (*work.MATCH_LENGTHS, "match_32k_102_turns", "match_8k_26_branches")
    yield matches, lambda: match_rows(core)
    yield ("insert_512_after_8k",), lambda: [insert_row(core, events=False)]
    yield ("insert_512_after_8k_events",), lambda: [insert_row(core, events=True)]
    yield (*(f"alloc_free_{run}" for run in work.ALLOC_RUNS), "pool_1m"), lambda: pool_rows(core)
    yield ("serve_a",), lambda: [serve_row(core, events=False)]
    yield ("serve_a_events",), lambda: [serve_row(core, events=True)]
    if core != "legacy":  # which has no sliding window
        yield from sglang_hybrid.measurements(core)
    yield ("import_core",), lambda: [adapter.import_row([__file__, core, "--import-only"])]


def main() -> None:
    """Print the rows of the core named by the first argument; those of the second, if given."""
    core = sys.argv[1]
    if core not in CORES:
        raise SystemExit(f"unknown core {core!r}: one of {', '.join(CORES)}")
    if "--import-only" in sys.argv:
        adapter.print_import_cost(lambda: load(core))
        return
    load(core)
    found = adapter.measured(measurements(core), "".join(sys.argv[2:]))
    print(json.dumps(adapter.rounded(found)))


if __name__ == "__main__":
    main()

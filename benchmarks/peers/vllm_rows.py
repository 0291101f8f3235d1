"""Rows of vLLM's KVCacheManager: `python vllm_rows.py 16|64 [names]`, by block size.

Runs inside the peers' environment, without quire, and prints one JSON array. One full-attention
group, in the `hybrid_*` rows one of sliding layers beside it. vLLM evicts blocks as they are
allocated again and has no tree, so it has no `evict_*` row.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import adapter
import timing
import vllm_hybrid
import workloads as work
from vllm_peer import Peer, decode_row, load, lookup_row


def match_rows(block_size: int) -> Iterator[timing.Row]:
    """Yield the rows of lookups: hash of the prompt and lookup, and the lookup alone."""
    for name, length in work.MATCH_LENGTHS.items():
        peer = Peer(block_size, 2 * length)
        prompt = work.prompt(length).tolist()
        peer.store(prompt)
        yield lookup_row(name, peer, prompt)
    peer = Peer(block_size, 65_536)
    prompt = work.prompt(32_768).tolist()
    for length in work.turn_lengths():
        peer.store(prompt[:length])
    yield lookup_row("match_32k_102_turns", peer, prompt)
    peer = Peer(block_size, 65_536)
    path = work.prompt(8_192)
    for branch in [path, *work.branching_prompts(path)]:
        peer.store(branch.tolist())
    yield lookup_row("match_8k_26_branches", peer, path.tolist())


def insert_row(block_size: int, *, events: bool) -> timing.Row:
    """Return the row of `allocate_slots` for fresh tokens below a shared prefix."""
    peer = Peer(block_size, 1 << 20, events=events)
    prefix = work.prompt(work.SHARED_PREFIX)
    peer.store(prefix.tolist())
    peer.manager.take_events()
    inserts: list[float] = []
    hashes: list[float] = []
    prompts = [p.tolist() for p in work.suffixed_prompts(prefix, 264, seed=int(events))]
    known: Any = None
    for group in range(0, len(prompts), 8):
        found = [peer.find(prompt) for prompt in prompts[group : group + 8]]

        def insert(found: list[tuple[Any, Any, int]] = found) -> None:
            for request, blocks, cached in found:
                peer.manager.allocate_slots(request, work.FRESH_SUFFIX, cached, blocks)
                if events:
                    peer.manager.take_events()

        inserts.append(timing.once_us(insert) / 8)
        suffixes = []
        for request, _, _ in found:
            suffix = peer.request(prompts[group], hashed=False)
            suffix.block_hashes = request.block_hashes[: work.SHARED_PREFIX // block_size]
            suffix._block_hasher = peer.hasher  # hash the suffix only
            suffixes.append(suffix)

        def extend(suffixes: list[Any] = suffixes) -> None:
            for suffix in suffixes:
                suffix.update_block_hashes()

        hashes.append(timing.once_us(extend) / 8)
        for known, _, _ in found:
            peer.manager.free(known)
    return {
        "name": "insert_512_after_8k_events" if events else "insert_512_after_8k",
        "median_us": statistics.median(inserts),
        "hash_us": statistics.median(hashes),
    }


def pool_rows(block_size: int) -> Iterator[timing.Row]:
    """Yield the rows of the block pool alone."""
    pool = Peer(block_size, (work.ALLOC_POOL_BLOCKS + 1) * block_size).manager.block_pool
    for blocks in work.ALLOC_RUNS:

        def cycle(blocks: int = blocks) -> None:
            pool.free_blocks(pool.get_new_blocks(blocks))

        yield {"name": f"alloc_free_{blocks}", "median_us": timing.repeat_us(cycle)}


def large_pool_row(block_size: int) -> timing.Row:
    """Return the cost of making a large pool, and its bytes per block."""
    clock = timing.Stopwatch()

    def build() -> Peer:
        with clock:
            return Peer(block_size, work.LARGE_POOL_BLOCKS * block_size)

    peer, grown = timing.growth_bytes(build)
    del peer
    return {
        "name": "pool_1m",
        "median_us": clock.total_ns / 1e3,
        "bytes": grown / work.LARGE_POOL_BLOCKS,
    }


def leaf_row(block_size: int) -> timing.Row:
    """Return the memory that 64 cached tokens hold: beside the pool's blocks, and with them."""
    tokens = (work.NUM_LEAVES + 1) * work.LEAF_TOKENS

    def fill(peer: Peer, count: int = work.NUM_LEAVES) -> Peer:
        for leaf in work.leaves(count):
            peer.store(leaf.tolist())
        return peer

    fill(
        Peer(block_size, 101 * work.LEAF_TOKENS), 100
    )  # what the first calls load is not the leaves'
    peer, pool = timing.growth_bytes(lambda: Peer(block_size, tokens))
    _, grown = timing.growth_bytes(lambda: fill(peer))
    traced = adapter.traced_bytes(lambda: fill(Peer(block_size, tokens)))
    return {
        "name": "bytes_per_64_token_leaf",
        "bytes": (pool + grown) / work.NUM_LEAVES,
        "beside_pool_bytes": grown / work.NUM_LEAVES,
        "traced_bytes": traced / work.NUM_LEAVES,
    }


def decode_rows(block_size: int) -> Iterator[timing.Row]:
    """Yield the rows of decode steps over staggered sequences."""
    for batch in work.DECODE_BATCHES:
        peer = Peer(block_size, (batch + 1) * 512)
        yield decode_row(f"decode_{batch}", peer, work.decode_prompts(batch))


def serve_row(name: str, loop: work.ServeLoop, block_size: int, *, events: bool) -> timing.Row:
    """Return a serve loop: requests per second of CPU time and the hit rate."""
    peer = Peer(block_size, loop.pool_tokens, events=events)
    clock = timing.Stopwatch()
    cached = total = 0
    for turn in loop.requests():
        prompt, output = turn.prompt.tolist(), turn.output.tolist()
        with clock:
            request, hit = peer.admit(prompt)
            for token in output:
                peer.decode(request, token)
            peer.manager.free(request)
            if events:
                peer.manager.take_events()
        cached += hit
        total += len(prompt)
    return {
        "name": name,
        "requests_per_s": loop.num_requests / clock.total_ns * 1e9,
        "hit_rate": cached / total,
    }


def measurements(size: int) -> Iterator[adapter.Measurement]:
    """Yield what there is; memory first, while the process is small."""
    yield ("bytes_per_64_token_leaf",), lambda: [leaf_row(size)]
    matches = (*work.MATCH_LENGTHS, "match_32k_102_turns", "match_8k_26_branches")
    yield matches, lambda: match_rows(size)
    yield ("insert_512_after_8k",), lambda: [insert_row(size, events=False)]
    yield ("insert_512_after_8k_events",), lambda: [insert_row(size, events=True)]
    yield tuple(f"alloc_free_{run}" for run in work.ALLOC_RUNS), lambda: pool_rows(size)
    yield tuple(f"decode_{batch}" for batch in work.DECODE_BATCHES), lambda: decode_rows(size)
    yield ("serve_a",), lambda: [serve_row("serve_a", work.SERVE_A, size, events=False)]
    yield (
        ("serve_a_events",),
        lambda: [serve_row("serve_a_events", work.SERVE_A, size, events=True)],
    )
    yield ("serve_b",), lambda: [serve_row("serve_b", work.SERVE_B, size, events=False)]
    yield from vllm_hybrid.measurements(size)
    yield ("pool_1m",), lambda: [large_pool_row(size)]
    yield ("import_core",), lambda: [adapter.import_row([__file__, str(size), "--import-only"])]


def main() -> None:
    """Print the rows at a block size, the first argument; those of the second, if given."""
    if "--import-only" in sys.argv:
        adapter.print_import_cost(load)
        return
    load()
    found = adapter.measured(measurements(int(sys.argv[1])), "".join(sys.argv[2:]))
    print(json.dumps(adapter.rounded(found)))


if __name__ == "__main__":
    main()

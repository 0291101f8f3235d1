# pyright: basic, reportMissingImports=false
# (basic: it runs in the peers' environment, against untyped modules that are not installed here)
# ruff: noqa: PLC0415
# (what importing a peer costs is one of the rows, so a peer is imported where that is measured)
"""Rows of vLLM's KVCacheManager: `python vllm_rows.py 16|64`, the argument is the block size.

Runs inside the peers' environment, without quire, and prints one JSON array. One full-attention
group on the CPU, prefix caching on, vLLM's default block hash (SHA-256). Prompts are lists of ints,
as its requests hold them. vLLM evicts blocks as they are allocated again and has no tree, so it has
no `evict_*` row.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import timing
import workloads as work


def load() -> None:
    """Import what a user of the cache manager imports."""
    import vllm.v1.core.kv_cache_manager  # noqa: F401


class Peer:
    """A cache manager over `pool_tokens` tokens and the calls the rows are made of."""

    def __init__(self, block_size: int, pool_tokens: int, *, events: bool = False) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        init_none_hash(sha256)
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float16
        )
        config = KVCacheConfig(
            num_blocks=pool_tokens // block_size,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self.manager: Any = KVCacheManager(
            config,
            max_model_len=1 << 20,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            enable_kv_cache_events=events,
        )
        self.hasher = get_request_block_hasher(block_size, sha256)
        self._request, self._names = Request, count()
        self._sampling = SamplingParams(max_tokens=1 << 20)

    def request(self, prompt: list[int], *, hashed: bool = True) -> Any:
        """Return a new request; making it hashes its prompt, unless `hashed` is false."""
        hasher = self.hasher if hashed else None
        name = str(next(self._names))
        return self._request(name, prompt, self._sampling, None, block_hasher=hasher)

    def find(self, prompt: list[int]) -> tuple[Any, Any, int]:
        """Return a new request, its cached blocks and how many tokens they hold."""
        request = self.request(prompt)
        blocks, cached, _ = self.manager.get_computed_blocks(request)
        return request, blocks, cached

    def admit(self, prompt: list[int]) -> tuple[Any, int]:
        """Allocate and cache the whole prompt; return the running request and its cached tokens."""
        request, blocks, cached = self.find(prompt)
        fresh = request.num_tokens - cached
        if self.manager.allocate_slots(request, fresh, cached, blocks) is None:
            raise MemoryError(f"no room for {fresh} tokens")
        request.num_computed_tokens = request.num_tokens
        return request, cached

    def decode(self, request: Any, token: int) -> None:
        """Give `request` one output token and the slot for it."""
        request.append_output_token_ids(token)
        if self.manager.allocate_slots(request, 1) is None:
            raise MemoryError("no room for one token")
        request.num_computed_tokens += 1

    def store(self, prompt: list[int]) -> None:
        """Cache `prompt` and let its request finish."""
        self.manager.free(self.admit(prompt)[0])


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


def lookup_row(name: str, peer: Peer, prompt: list[int]) -> timing.Row:
    """Return the row of finding `prompt`; vLLM always leaves its last block to compute."""
    request, _, cached = peer.find(prompt)
    assert cached >= len(prompt) - 64
    lookup = partial(peer.manager.get_computed_blocks, request)
    return {
        "name": name,
        "median_us": timing.repeat_us(lambda: peer.find(prompt)),
        "lookup_only_us": timing.repeat_us(lookup),
    }


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
            suffix._block_hasher = peer.hasher  # noqa: SLF001  # hash the suffix only
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
    traced = timing.traced_bytes(lambda: fill(Peer(block_size, tokens)))
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
        running = [peer.admit(prompt.tolist())[0] for prompt in work.decode_prompts(batch)]
        steps: list[float] = []
        reserves: list[float] = []
        for step in range(work.DECODE_WARMUP + work.DECODE_STEPS):
            append, reserve = timing.Stopwatch(), timing.Stopwatch()
            allocate = peer.manager.allocate_slots
            with append:
                for request in running:
                    request.append_output_token_ids(step)
            with reserve:
                for request in running:
                    allocate(request, 1)
            with append:
                for request in running:
                    request.num_computed_tokens += 1
            steps.append((append.total_ns + reserve.total_ns) / 1_000)
            reserves.append(reserve.total_ns / 1_000)
        yield {
            "name": f"decode_{batch}",
            "median_us": statistics.median(steps[work.DECODE_WARMUP :]),
            "reserve_only_us": statistics.median(reserves[work.DECODE_WARMUP :]),
        }


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


def rows(block_size: int) -> Iterator[timing.Row]:
    """Yield every row; memory first, while the process is small."""
    yield leaf_row(block_size)
    yield from match_rows(block_size)
    yield insert_row(block_size, events=False)
    yield insert_row(block_size, events=True)
    yield from pool_rows(block_size)
    yield from decode_rows(block_size)
    yield serve_row("serve_a", work.SERVE_A, block_size, events=False)
    yield serve_row("serve_a_events", work.SERVE_A, block_size, events=True)
    yield serve_row("serve_b", work.SERVE_B, block_size, events=False)
    yield large_pool_row(block_size)
    yield timing.import_row([__file__, str(block_size), "--import-only"])


def main() -> None:
    """Print the rows at the block size named by the first argument."""
    if "--import-only" in sys.argv:
        timing.print_import_cost(load)
        return
    load()
    print(json.dumps(timing.rounded(rows(int(sys.argv[1])))))  # noqa: T201  # standard output is the protocol


if __name__ == "__main__":
    main()

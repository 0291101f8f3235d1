# pyright: basic, reportMissingImports=false
# (basic: it runs in the peers' environment, against untyped modules that are not installed here)
# ruff: noqa: PLC0415
# (what importing a peer costs is one of the rows, so a peer is imported where that is measured)
"""Rows of one of SGLang's prefix trees: `python sglang_rows.py legacy|unified|rust`.

Runs inside the peers' environment, without quire, and prints one JSON array. The trees stand on
SGLang's paged allocator with page size 16 on the CPU, keys are `array('q')` as in its scheduler.
SGLang has no decode step that publishes blocks, so it has no `decode_*` and no `serve_b` row.
"""

from __future__ import annotations

import json
import statistics
import sys
from array import array
from collections.abc import Iterator
from functools import partial
from typing import Any

import engine_stubs
import timing
import workloads as work

CORES = ("legacy", "unified", "rust")
BACKENDS = {"unified": "python", "rust": "rust"}
PAGE = work.BLOCK_SIZE


def load(core: str) -> None:
    """Import what a user of `core` imports."""
    engine_stubs.install()
    import torch

    torch.set_num_threads(1)  # as SGLang's model runner does on a CPU
    if core == "legacy":
        import sglang.srt.mem_cache.radix_cache
    else:
        import sglang.srt.mem_cache.unified_radix_cache
    if core == "rust":
        import sglang.srt.mem_cache.rust_tree_core.adapter  # noqa: F401


class Peer:
    """A tree of kind `core` over an allocator of `pool_tokens`; the calls the rows are made of."""

    def __init__(self, core: str, pool_tokens: int, *, events: bool = False) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        self.torch, self.base, self.new_key = torch, base, RadixKey
        self.pool: Any = PagedTokenToKVPoolAllocator(
            pool_tokens, PAGE, torch.float16, "cpu", None, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.pool,
            page_size=PAGE,
            enable_kv_cache_events=events,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=BACKENDS.get(core),
        )
        if core == "legacy":
            self.tree: Any = RadixCache(params)
            self.take_events = self.tree.kv_events.take
        else:
            from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

            self.tree = UnifiedRadixCache(params)
            self.take_events = self.tree.take_events

    def key(self, tokens: work.Tokens) -> array[int]:
        """Return `tokens` as SGLang's requests hold them."""
        return array("q", tokens.astype("int64").tobytes())

    def match(self, key: array[int]) -> Any:
        """Look `key` up."""
        return self.tree.match_prefix(self.base.MatchPrefixParams(key=self.new_key(key)))

    def insert(self, key: array[int], value: Any, shared: int = 0) -> None:
        """Insert `key`, whose first `shared` tokens were matched before."""
        self.tree.insert(
            self.base.InsertParams(key=self.new_key(key), value=value, prev_prefix_len=shared)
        )

    def evict(self, tokens: int) -> None:
        """Evict at least `tokens` tokens."""
        self.tree.evict(self.base.EvictParams(num_tokens=tokens))

    def allocate(self, tokens: int) -> Any:
        """Return slots for `tokens` tokens, evicting when the pool is short."""
        short = tokens - self.pool.available_size()
        if short > 0:
            self.evict(short)
        return self.pool.alloc(tokens)

    def store(self, tokens: work.Tokens) -> array[int]:
        """Match, allocate and insert one prompt, as a finished request does; return its key."""
        key = self.key(tokens)
        found = self.match(key)
        cached = found.device_prefix_len
        new = self.allocate(len(key) // PAGE * PAGE - cached)
        path = self.tree.path_device_indices(found.last_device_node)
        self.insert(key, self.torch.cat((path, new)), cached)
        return key

    def serve(self, key: array[int]) -> int:
        """Do what one request of a serve loop does; return how many tokens were cached."""
        found = self.match(key)
        cached = found.device_prefix_len
        lock = self.tree.lock(found.last_device_node)
        new = self.allocate(len(key) // PAGE * PAGE - cached)
        path = self.tree.path_device_indices(found.last_device_node)
        self.insert(key, self.torch.cat((path, new)), cached)
        self.tree.unlock(lock)
        return cached


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
    traced = timing.traced_bytes(lambda: full_of_leaves(core))
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


def rows(core: str) -> Iterator[timing.Row]:
    """Yield every row of `core`; those of many nodes first, while the process is small."""
    yield leaf_row(core)
    yield from evict_rows(core)
    yield from match_rows(core)
    yield insert_row(core, events=False)
    yield insert_row(core, events=True)
    yield from pool_rows(core)
    yield serve_row(core, events=False)
    yield serve_row(core, events=True)
    yield timing.import_row([__file__, core, "--import-only"])


def main() -> None:
    """Print the rows of the core named by the first argument."""
    core = sys.argv[1]
    if core not in CORES:
        raise SystemExit(f"unknown core {core!r}: one of {', '.join(CORES)}")
    if "--import-only" in sys.argv:
        timing.print_import_cost(lambda: load(core))
        return
    load(core)
    print(json.dumps(timing.rounded(rows(core))))  # noqa: T201  # standard output is the protocol


if __name__ == "__main__":
    main()

"""SGLang's prefix trees over its paged allocators with page size 16 on the CPU.

Keys are `array('q')`, as in its scheduler.
"""

from __future__ import annotations

from array import array
from typing import Any

import engine_stubs
import workloads as work

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
        import sglang.srt.mem_cache.rust_tree_core.adapter  # noqa: F401 - imported here so that no row pays for it


class Peer:
    """A tree of kind `core` over an allocator of `pool_tokens`; the calls the rows are made of."""

    components: tuple[str, ...] = ("FULL",)
    window: int | None = None

    def __init__(self, core: str, pool_tokens: int, *, events: bool = False) -> None:
        import torch
        from sglang.srt.mem_cache import base_prefix_cache as base
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        self.torch, self.base, self.new_key = torch, base, RadixKey
        self.pool = self.make_pool(pool_tokens)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.pool,
            page_size=PAGE,
            enable_kv_cache_events=events,
            sliding_window_size=self.window,
            tree_components=tuple(ComponentType[name] for name in self.components),
            tree_core_backend=BACKENDS.get(core),
        )
        if core == "legacy":
            self.tree: Any = RadixCache(params)
            self.take_events = self.tree.kv_events.take
        else:
            from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

            self.tree = UnifiedRadixCache(params)
            self.take_events = self.tree.take_events

    def make_pool(self, pool_tokens: int) -> Any:
        """Return the allocator of the tree's slots."""
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        torch = self.torch
        return PagedTokenToKVPoolAllocator(
            pool_tokens, PAGE, torch.float16, "cpu", None, need_sort=False
        )

    def key(self, tokens: work.Tokens) -> array[int]:
        """Return `tokens` as SGLang's requests hold them."""
        return array("q", tokens.astype("int64").tobytes())

    def match(self, key: array[int]) -> Any:
        """Look `key` up."""
        return self.tree.match_prefix(self.base.MatchPrefixParams(key=self.new_key(key)))

    def path(self, found: Any) -> Any:
        """Return the slots of what a match found."""
        return self.tree.path_device_indices(found.last_device_node)

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
        self.insert(key, self.torch.cat((self.path(found), new)), cached)
        return key

    def serve(self, key: array[int]) -> int:
        """Do what one request of a serve loop does; return how many tokens were cached."""
        found = self.match(key)
        cached = found.device_prefix_len
        lock = self.tree.lock(found.last_device_node)
        new = self.allocate(len(key) // PAGE * PAGE - cached)
        self.insert(key, self.torch.cat((self.path(found), new)), cached)
        self.tree.unlock(lock)
        return cached


class HybridPeer(Peer):
    """The same over two pools of `pool_tokens` each: full attention, and a sliding window."""

    components = ("FULL", "SWA")
    window = work.WINDOW

    def make_pool(self, pool_tokens: int) -> Any:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        dtype = self.torch.float16
        tensors = SWAKVPool(
            size=pool_tokens,
            size_swa=pool_tokens,
            page_size=PAGE,
            dtype=dtype,
            head_num=1,
            head_dim=1,
            full_attention_layer_ids=[0],
            swa_attention_layer_ids=[1],
            device="cpu",
            token_to_kv_pool_class=NoTensors,
        )
        return SWATokenToKVPoolAllocator(
            pool_tokens, pool_tokens, PAGE, dtype, "cpu", tensors, need_sort=False
        )

    def allocate(self, tokens: int) -> Any:
        """Return slots for `tokens` tokens in both pools, evicting when one is short.

        These are the two allocations and the mapping between them that `alloc` makes at page size
        1. At larger ones the engine calls `alloc_extend`, a GPU kernel whose stand-in for CPUs
        takes some forty tensor operations, which would be no measure of the tree.
        """
        self.pool.evict_to_free_tokens(self.tree, tokens)
        full = self.pool.full_attn_allocator.alloc(tokens)
        self.pool.set_full_to_swa_mapping(full, self.pool.swa_attn_allocator.alloc(tokens))
        return full

    def evict_sliding(self, tokens: int) -> None:
        """Evict at least `tokens` tokens from the sliding layers."""
        self.tree.evict(self.base.EvictParams(num_tokens=0, swa_num_tokens=tokens))


class NoTensors:
    """K and V of no layers: what the pools hand out is measured, not what is stored there."""

    post_capture_active = False

    def __init__(self, **_: object) -> None: ...

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Return the bytes of K and of V."""
        return 0, 0

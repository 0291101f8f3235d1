"""vLLM's KVCacheManager on the CPU, prefix caching on, with its default block hash (SHA-256).

Prompts are lists of ints, as its requests hold them.
"""

from __future__ import annotations

import statistics
from functools import partial
from itertools import count
from typing import Any

import timing
import workloads as work


def load() -> None:
    """Import what a user of the cache manager imports."""
    import vllm.v1.core.kv_cache_manager  # noqa: F401 - imported here so that no row pays for it


class Peer:
    """A cache manager over `pool_tokens` tokens and the calls the rows are made of.

    With a `window`, a group of sliding layers stands beside the one of full attention. The two share
    one pool in vLLM, so it is made twice as large.
    """

    def __init__(
        self,
        block_size: int,
        pool_tokens: int,
        *,
        window: int | None = None,
        events: bool = False,
    ) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.request import Request

        init_none_hash(sha256)
        layer: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
        specs: list[Any] = [FullAttentionSpec(block_size=block_size, **layer)]
        if window:
            specs.append(SlidingWindowSpec(block_size=block_size, sliding_window=window, **layer))
        config = KVCacheConfig(
            num_blocks=len(specs) * pool_tokens // block_size,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([str(i)], spec) for i, spec in enumerate(specs)],
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


def decode_row(name: str, peer: Peer, prompts: list[work.Tokens]) -> timing.Row:
    """Return the row of decode steps over requests with these prompts."""
    running = [peer.admit(prompt.tolist())[0] for prompt in prompts]
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
    return {
        "name": name,
        "median_us": statistics.median(steps[work.DECODE_WARMUP :]),
        "reserve_only_us": statistics.median(reserves[work.DECODE_WARMUP :]),
    }

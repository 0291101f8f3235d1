"""The worth of memory on a trace: hits, seconds of prefill, time to the first token."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire_sim.hardware import MemoryTier, ModelFacts, ModelTimes
from quire_sim.reuse import Counts, Reuses, lru_steps

GIB = 1 << 30


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """A trace with so much memory below the device.

    `below`            bytes of each tier, by name; empty: the device alone
    `token_hit`        share of all prompt tokens found anywhere, `device_hit` in the device
    `prefill_gpu_s`    device seconds of all prefills, each alone
    `saved_gpu_s`      less than with the device alone
    `ttft_s`           mean time to the first token of a request that runs alone, fetches included
    `fetched`          share of the tokens found below the device that were worth fetching
    """

    below: dict[str, int]
    token_hit: float
    device_hit: float
    prefill_gpu_s: float
    saved_gpu_s: float
    ttft_s: float
    fetched: float


class LruHits:
    """A trace as hits by capacity: exact for LRU, request by request, in one pass over it.

    `prompt_tokens`  tokens of all prompts, `mean_prompt` of one
    `unique_tokens`  tokens of all different blocks: a cache of this size never evicts
    """

    def __init__(self, read: Reuses) -> None:
        if not read.num_requests:
            raise ConfigError("the trace has no requests; there is nothing to plan for")
        self.read = read
        self.prompt_tokens = int(read.prompt_tokens.sum())
        self.mean_prompt = max(1, round(self.prompt_tokens / read.num_requests))
        self.unique_tokens = read.num_unique * read.block_size
        self._steps = lru_steps(read)

    def cached_tokens(self, capacity_tokens: int) -> Counts:
        """Return the tokens that each prompt finds at this capacity, int64 [requests].

        At least one token of a prompt is always computed.
        """
        read = self.read
        found = self._steps.found_by(capacity_tokens // read.block_size, read.num_requests)
        return np.minimum(found * read.block_size, read.prompt_tokens - 1)

    def token_hit(self, capacity_tokens: int) -> float:
        """Return the share of all prompt tokens that is found at this capacity."""
        return float(self.cached_tokens(capacity_tokens).sum()) / max(1, self.prompt_tokens)

    def bytes_per_token(self, model: ModelFacts) -> float:
        """Return the bytes of a cached token of a mean prompt, windows and states included."""
        return model.kv.of(self.mean_prompt) / self.mean_prompt


def worth_of(
    hits: LruHits,
    timing: ModelTimes,
    device_bytes: int,
    hierarchies: Sequence[Sequence[MemoryTier]],
) -> list[Worth]:
    """Return the worth of memory below the device, for each hierarchy, fastest tier first.

    The tiers are exclusive: what falls out of one goes down to the next. The head of a prefix
    is used last, so the device has the head and the slowest tier the end. Each request fetches
    down to the tier that makes its first token come soonest, from all tiers at once, while it
    computes the rest.
    """
    per_token = hits.bytes_per_token(timing.model)
    prompts: list[int] = hits.read.prompt_tokens.tolist()
    heads: list[int] = hits.cached_tokens(int(device_bytes / per_token)).tolist()
    alone = [
        timing.prefill_s(prompt - head, head) for prompt, head in zip(prompts, heads, strict=True)
    ]
    all_gpu_s = sum(alone) * timing.num_gpus
    rows: list[Worth] = []
    for tiers in hierarchies:
        known: list[list[int]] = []
        capacity = device_bytes
        for tier in tiers:
            capacity += tier.capacity_bytes
            known.append(hits.cached_tokens(int(capacity / per_token)).tolist())
        busy = waited = 0.0
        found = taken = 0
        for index, prompt in enumerate(prompts):
            head, depths = heads[index], [each[index] for each in known]
            device = alone[index], alone[index], head
            below = list(zip(depths, tiers, strict=True))
            first_s, computed_s, cached = _soonest(timing, prompt, device, below)
            waited += first_s
            busy += computed_s
            taken += cached - head
            found += depths[-1] if depths else head
        brought = found - sum(heads)
        rows.append(
            Worth(
                below={tier.name: tier.capacity_bytes for tier in tiers},
                token_hit=found / hits.prompt_tokens,
                device_hit=sum(heads) / hits.prompt_tokens,
                prefill_gpu_s=busy * timing.num_gpus,
                saved_gpu_s=all_gpu_s - busy * timing.num_gpus,
                ttft_s=waited / len(prompts),
                fetched=taken / brought if brought else 1.0,
            )
        )
    return rows


def _soonest(
    timing: ModelTimes,
    prompt: int,
    best: tuple[float, float, int],
    tiers: Sequence[tuple[int, MemoryTier]],
) -> tuple[float, float, int]:
    """Return time to the first token, computed seconds and cached tokens of the best depth.

    `best` is that of the device alone; each tier holds the prefix up to the tokens beside it.
    """
    above, fetches = best[2], 0.0
    for known, tier in tiers:
        if known > above:
            fetches = max(fetches, timing.fetch_s(known - above, tier))
            computed = timing.prefill_s(prompt - known, known)
            first = max(computed, fetches)
            if first < best[0]:
                best = (first, computed, known)
        above = known
    return best

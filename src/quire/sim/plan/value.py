"""What memory is worth on a trace: hits, seconds of prefill, time to the first token."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire.sim.hardware import Roofline, Tier
from quire.sim.reuse import Counts, Reuses
from quire.sim.stacks import Steps, lru_steps

GIB = 1 << 30


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """A trace with so much memory below the device.

    `below_bytes`      memory of the tier beside the device
    `token_hit`        share of all prompt tokens found in either, `device_hit` in the device
    `prefill_gpu_s`    device seconds of all prefills, each alone
    `saved_gpu_s`      less than with the device alone
    `ttft_s`           mean time to the first token of a request that runs alone, fetches included
    `fetched`          share of the tier's hits that were worth fetching, in tokens
    """

    below_bytes: int
    token_hit: float
    device_hit: float
    prefill_gpu_s: float
    saved_gpu_s: float
    ttft_s: float
    fetched: float


class Workload:
    """A trace as hits by capacity: exact for LRU, request by request, in one pass over it."""

    def __init__(self, reuses: Reuses) -> None:
        if not reuses.num_requests:
            raise ConfigError("the trace has no requests; there is nothing to plan for")
        self._reuses = reuses
        self._steps: Steps = lru_steps(reuses)

    @property
    def block_size(self) -> int:
        """Tokens per block of the trace."""
        return self._reuses.block_size

    @property
    def num_requests(self) -> int:
        """Requests."""
        return self._reuses.num_requests

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self._reuses.prompt_tokens.sum())

    @property
    def unique_tokens(self) -> int:
        """Tokens of all different blocks: a cache of this size never evicts."""
        return self._reuses.num_unique * self.block_size

    @property
    def mean_prompt(self) -> int:
        """Tokens of a mean prompt."""
        return max(1, round(self.prompt_tokens / self.num_requests))

    def share_above(self, num_tokens: int) -> float:
        """Return the share of prompts longer than this."""
        return float((self._reuses.prompt_tokens > num_tokens).mean())

    def cached_tokens(self, capacity_tokens: int) -> Counts:
        """Return what each prompt finds in an LRU cache of this capacity, int64 [requests].

        At least one token of a prompt is always computed.
        """
        steps, reuses = self._steps, self._reuses
        blocks = np.clip(capacity_tokens // self.block_size - steps.below, 0, steps.width)
        found = np.zeros(reuses.num_requests, np.int64)
        np.add.at(found, steps.request, blocks)
        return np.minimum(found * self.block_size, reuses.prompt_tokens - 1)

    def token_hit(self, capacity_tokens: int) -> float:
        """Return the share of all prompt tokens that an LRU cache of this capacity finds."""
        return float(self.cached_tokens(capacity_tokens).sum()) / max(1, self.prompt_tokens)

    def worth(
        self, roofline: Roofline, tier: Tier, device_bytes: int, below_bytes: Sequence[int]
    ) -> list[Worth]:
        """Return what memory below the device is worth, for each of these sizes.

        Memory counts in tokens at what a mean prompt takes per token, windows and states included.
        The tiers are exclusive: what falls out of the device goes down. The head of a prefix is
        used last, so it is in the device and its tail in the tier. A tail is fetched where that is
        sooner than computing it.
        """
        per_token = roofline.model.kv.of(self.mean_prompt) / self.mean_prompt
        prompts = self._reuses.prompt_tokens
        in_device = self.cached_tokens(int(device_bytes / per_token))
        rows: list[Worth] = []
        for below in below_bytes:
            cached = self.cached_tokens(int((device_bytes + below) / per_token))
            busy = waited = 0.0
            taken = 0
            for prompt, head, known in zip(
                prompts.tolist(), in_device.tolist(), cached.tolist(), strict=True
            ):
                alone = roofline.prefill_s(prompt - head, head)
                computed = first = alone
                if known > head:
                    computed = roofline.prefill_s(prompt - known, known)
                    first = max(computed, roofline.fetch_s(known - head, tier))
                    if first < alone:
                        taken += known - head
                    else:
                        computed = first = alone
                busy += computed
                waited += first
            gpu_s = busy * roofline.num_gpus
            below_tokens = int(cached.sum() - in_device.sum())
            rows.append(
                Worth(
                    below_bytes=below,
                    token_hit=float(cached.sum()) / self.prompt_tokens,
                    device_hit=float(in_device.sum()) / self.prompt_tokens,
                    prefill_gpu_s=gpu_s,
                    saved_gpu_s=rows[0].prefill_gpu_s - gpu_s if rows else 0.0,
                    ttft_s=waited / self.num_requests,
                    fetched=taken / below_tokens if below_tokens else 1.0,
                )
            )
        return rows

"""A roofline as the timing of a simulation, and how many blocks its device has for K and V."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.config import format_bytes
from quire.errors import ConfigError
from quire.sim.hardware import Roofline
from quire.sim.serving.timing import Chunk, Contexts, Seconds

MEMORY_SHARE = 0.9
"""The share of a device's memory that weights and cache may take, as engines do by default."""


class RooflineTiming:
    """`Roofline.step_s`, with the decoding part of a step as a few array operations.

    A step of prompts alone is `Roofline.step_s` itself. Where sequences decode, FLOPs and bytes are
    sums over an array of contexts; they equal those of `Roofline` up to rounding.
    """

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        model, kv = roofline.model, roofline.model.kv
        mfu = roofline.mfu if roofline.attention_mfu is None else roofline.attention_mfu
        self._flops_rate = roofline.accelerator.peak_flops * roofline.num_gpus
        self._attention_rate = self._flops_rate * mfu
        self._byte_rate = roofline.byte_rate
        self._pair_flops = model.pair_flops
        self._window_pair_flops = model.window_pair_flops
        self._kv = kv
        self._has_window = bool(kv.window_tokens)
        self._written = kv.of(1)
        self._fixed: dict[int, tuple[float, float, float]] = {}

    def prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        return self.roofline.prefill_s(new_tokens, cached_tokens)

    def step_s(self, chunks: Sequence[Chunk], contexts: Contexts) -> float:
        if not len(contexts):
            return self.roofline.step_s(chunks)
        roofline = self.roofline
        num_tokens, flops, num_bytes = len(contexts), 0.0, 0.0
        for new, before in chunks:
            num_tokens += new
            flops += roofline.attention_flops(new, before)
            num_bytes += self._kv.of(before) + self._kv.of(new)
        moved = roofline.cached_token_s * sum(before for _, before in chunks)
        return float(self._seconds(num_tokens, flops, num_bytes, contexts, 1)[0]) + moved

    def decode_run_s(self, contexts: Contexts, num_steps: int) -> Seconds:
        return self._seconds(len(contexts), 0.0, 0.0, contexts, num_steps)

    def _seconds(
        self, num_tokens: int, flops: float, num_bytes: float, contexts: Contexts, num_steps: int
    ) -> Seconds:
        """Return the durations of steps; `flops` and `num_bytes` are those of prompts in them."""
        kv, n = self._kv, len(contexts)
        product_s, weight_bytes, added_s = self._per_tokens(num_tokens)
        growth = np.arange(num_steps)
        seen = int(contexts.sum()) + n * growth
        pairs = (seen + n) * float(self._pair_flops)
        traffic = seen * float(kv.per_token) + float(n * (self._written + kv.state_bytes))
        if self._has_window:
            each = contexts[:, None] + growth
            limit = kv.window_tokens
            pairs += np.minimum(each + 1, limit).sum(0) * float(self._window_pair_flops)
            traffic += (kv.window_bytes * np.minimum(each, limit) // limit).sum(0)
        compute = product_s + (pairs + flops) / self._attention_rate
        kv_bytes = (traffic + num_bytes) * self.roofline.kv_copies
        reading = (kv_bytes + weight_bytes) / self._byte_rate
        return np.maximum(compute, reading) + added_s + seen * self.roofline.cached_token_s

    def _per_tokens(self, num_tokens: int) -> tuple[float, float, float]:
        """Return the terms that depend on the tokens of a step alone, kept for the next one."""
        known = self._fixed.get(num_tokens)
        if known is None:
            roofline = self.roofline
            known = self._fixed[num_tokens] = (
                roofline.product_flops(num_tokens) / (self._flops_rate * roofline.mfu),
                roofline.model.weight_bytes_read(num_tokens),
                roofline.collectives_s(num_tokens) + roofline.overhead_s,
            )
        return known


def blocks_that_fit(
    roofline: Roofline, block_size: int, *, max_sequences: int, memory_share: float = MEMORY_SHARE
) -> int:
    """Return the KV blocks for which a replica's devices have room beside the weights.

    Windows and states are held for `max_sequences` running sequences; blocks are what the
    layers that see the whole prefix keep. Raises `ConfigError` if that leaves nothing.
    """
    if not 0 < memory_share <= 1:
        raise ConfigError(f"the share of memory is above 0 and at most 1, got {memory_share:g}")
    model, kv = roofline.model, roofline.model.kv
    memory = int(roofline.accelerator.memory_bytes * roofline.num_gpus * memory_share)
    devices = f"{roofline.num_gpus} x {roofline.accelerator.name}"
    what = f"{memory_share:.0%} of {devices} is {format_bytes(memory)}"
    left = memory - model.weight_bytes
    if left <= 0:
        raise ConfigError(
            f"{what}, but the weights of {model.name} are {format_bytes(model.weight_bytes)}; "
            "take more devices per replica, larger ones, or weights of fewer bits"
        )
    copies = roofline.kv_copies
    per_sequence = round((kv.window_bytes + kv.state_bytes) * copies)
    rest = left - per_sequence * max_sequences
    num_blocks = int(rest // (max(kv.per_token, 1) * block_size * copies))
    if num_blocks < 1:
        able = f", for example {left // (2 * per_sequence)}" if per_sequence else ""
        raise ConfigError(
            f"{what}: beside the weights, {format_bytes(left)} are left for {max_sequences} "
            f"sequences with {format_bytes(per_sequence)} of windows and states each and for blocks; "
            f"that is none. Run fewer sequences{able}, or take more devices per replica"
        )
    return num_blocks

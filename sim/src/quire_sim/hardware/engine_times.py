"""The duration of an engine's steps, from data sheets alone: kernel by kernel, with few constants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.config import check_count
from quire_sim.hardware.collectives import all_reduce_s, gather_s
from quire_sim.hardware.facts import ModelFacts
from quire_sim.hardware.left_out import FigureErrors, errors_like
from quire_sim.hardware.roofline import (
    BYTES_PER_ACTIVATION,
    Chunk,
    Contexts,
    ModelTimes,
    RankWork,
    Seconds,
    causal_pairs,
)

MATRIX_SHARE = 0.75
"""Share of what the matrix units could do that matrix products of many rows reach."""

STREAM_SHARE = 0.94
"""Share of the memory bandwidth at which weights and activations are read."""

CACHE_SHARE = 0.85
"""The same for K and V of sequences in a step that only decodes."""

JOINT_SHARE = 1.5
"""The same where a step has prompts too, and K and V are read for each query head: in part from caches."""

JOINT_TILE = 64
"""Rows that attention computes for a decoding sequence and query head beside prompts; one of them counts."""

ATTENTION_SHARE = 0.5
"""Share of the peak that attention over prompts reaches."""

GROUPED_SHARE = 0.6
"""Share of `MATRIX_SHARE` that products with routed experts reach."""

TILE, EXPERT_TILE = 64, 16
"""Rows that a matrix product computes at least, and in multiples of: of one, and of one expert's."""

OVERLAP = 2.0
"""Exponent of the norm of computing and reading of a product: the larger of both at infinity."""

ACTIVATION_SHARE = 0.65
"""Share of the activations between kernels that passes the memory; the rest stays in caches."""

LAYER_S, EXPERT_LAYER_S = 30e-6, 10e-6
"""Seconds in which the kernels of a layer start and run out, and those of routed experts beside them."""

STEP_S = 0.2e-3
"""Seconds of a step beside its layers: inputs, sampling, the next graph."""

HOST_S, EAGER_LAYER_S = 2e-3, 120e-6
"""Seconds that the host needs at least for a step, and for each layer where it starts every kernel."""

LOGIT_PASSES = 2
"""Times that 32-bit logits are read or written until a token is chosen."""


class EngineTimes(ModelTimes, frozen=True):
    """Seconds of steps of an engine like vLLM on devices that share a model.

    `data_parallel`  groups of `num_gpus` devices that share the routed experts and step together;
                     a step's tokens are spread evenly over them
    `eager`          the host starts every kernel: no graphs

    A step is a sum: matrix products, as a norm of computing tiles of rows and reading
    weights, attention over prompts by pairs, over cached tokens by bytes, activations and logits by
    bytes, collectives of the link, and what each layer and each step costs whatever is in it.
    Nothing is fitted to a device: two devices differ by their data sheets. Raises `ConfigError`
    for devices that cannot share the model.
    """

    data_parallel: int = 1
    eager: bool = False

    def __post_init__(self) -> None:
        check_count("num_gpus", self.num_gpus)
        check_count("data_parallel", self.data_parallel)
        self.model.check_shared(self.num_gpus)

    @property
    def basis(self) -> str:
        return "data sheets, with constants from measured layer kernels and recorded runs of vLLM"

    def figure_errors(self) -> FigureErrors:
        return errors_like(self.accelerator.name, experts=bool(self.model.expert_params))

    def known_error(self) -> float | None:
        return self.figure_errors().largest

    @property
    def matrix_rate(self) -> float:
        """FLOPs per second of a large matrix product on one device."""
        device = self.accelerator
        peak, units = device.peak_flops, device.unit_flops
        if self.model.weight_bytes_per_param == 1.0 and device.fp8_flops:
            peak, units = device.fp8_flops, device.fp8_flops * (units or peak) / peak
        return min(peak, MATRIX_SHARE * (units or peak))

    def steps_s(self, chunks: Sequence[Chunk], contexts: Contexts, num_steps: int) -> Seconds:
        """Return the seconds of steps that decode these sequences, [num_steps], and compute the chunks.

        Where groups step together, each has an even share of all.
        """
        groups = self.data_parallel
        own_s = self._own_s(chunks, contexts, num_steps, groups)
        tokens = len(contexts) + sum(new for new, _ in chunks)
        return self._whole(own_s + self._shared_s(tokens / groups, tokens))

    def ranks_s(self, ranks: Sequence[RankWork], num_steps: int) -> Seconds:
        """Return the seconds of steps in which each group does its own work, [num_steps].

        All layers with experts wait for the group that comes last.
        """
        own_s = [self._own_s(*work, num_steps, 1) for work in ranks]
        tokens = [len(contexts) + sum(new for new, _ in chunks) for chunks, contexts in ranks]
        return self._whole(np.max(own_s, axis=0) + self._shared_s(max(tokens), sum(tokens)))

    def _whole(self, seconds: Seconds) -> Seconds:
        """Return the seconds of whole steps: the host needs some for each."""
        least_s = max(HOST_S, self.model.num_layers * EAGER_LAYER_S if self.eager else 0.0)
        return np.maximum(seconds + self._started_s(), least_s)

    def _own_s(
        self, chunks: Sequence[Chunk], contexts: Contexts, num_steps: int, ways: int
    ) -> Seconds:
        """Return the seconds in which a group does its work, one of `ways` even shares of it."""
        tokens = (len(contexts) + sum(new for new, _ in chunks)) / ways
        sampled = (len(contexts) + len(chunks)) / ways
        params = self.model.dense_params / self.num_gpus
        steady_s = (
            self._product_s(2 * _filled(tokens, TILE) * params, self._bytes(params))
            + self._head_s(sampled)
            + self._prompt_attention_s(chunks) / ways
            + self._activations_s(tokens)
        )
        return steady_s + self._cached_s(contexts, num_steps, joint=bool(chunks)) / ways

    def _shared_s(self, tokens: float, all_tokens: float) -> float:
        """Return the seconds in which devices work together, for so many tokens of one group and of all."""
        model, device = self.model, self.accelerator
        token_bytes = model.hidden * BYTES_PER_ACTIVATION
        seconds = 0.0
        if model.expert_params:
            seconds += self._experts_s(all_tokens)
            if self.data_parallel > 1:
                gathered = all_tokens * token_bytes
                seconds += 2 * model.num_layers * gather_s(device, self.data_parallel, gathered)
        if self.num_gpus > 1:
            reduced = tokens * token_bytes
            seconds += 2 * model.num_layers * all_reduce_s(device, self.num_gpus, reduced)
        return seconds

    def _experts_s(self, tokens: float) -> float:
        """Return the seconds of the products with routed experts, for tokens of all groups."""
        model = self.model
        chosen = 1 - (1 - model.experts_per_token / model.num_experts) ** tokens
        used = model.expert_params * chosen / (self.num_gpus * self.data_parallel)
        each = tokens * model.experts_per_token / (model.num_experts * chosen) if chosen else 0.0
        flops = 2 * _filled(each, EXPERT_TILE) * used / GROUPED_SHARE
        return self._product_s(flops, self._bytes(used))

    def _head_s(self, sampled: float) -> float:
        """Return the seconds from hidden states to tokens."""
        model, devices = self.model, self.num_gpus
        params = model.head_params / devices
        flops = 2 * _filled(sampled, TILE) * params
        seconds = self._product_s(flops, params * model.end_bytes)
        if devices > 1:
            gathered = sampled * model.vocab * BYTES_PER_ACTIVATION
            seconds += gather_s(self.accelerator, devices, gathered)
        return seconds + sampled * model.vocab * 4 * LOGIT_PASSES / self._stream_rate

    def _prompt_attention_s(self, chunks: Sequence[Chunk]) -> float:
        flops = sum(_attention_flops(self.model, new, before) for new, before in chunks)
        return flops / (self.num_gpus * self.accelerator.peak_flops * ATTENTION_SHARE)

    def _activations_s(self, tokens: float) -> float:
        """Return the seconds in which norms, activations and residuals are read and written."""
        model = self.model
        per_layer = 8 * model.hidden * model.num_layers
        used = model.active_params - model.lookup_params - model.head_params
        numbers = per_layer + used / model.hidden / self.num_gpus
        passed = tokens * numbers * BYTES_PER_ACTIVATION * ACTIVATION_SHARE
        return passed / self._stream_rate

    def _started_s(self) -> float:
        model = self.model
        per_layer = LAYER_S + (EXPERT_LAYER_S if model.expert_params else 0.0)
        return STEP_S + model.num_layers * per_layer

    def _cached_s(self, contexts: Contexts, num_steps: int, *, joint: bool) -> Seconds:
        """Return the seconds of attention over the cached tokens of decoding sequences, [num_steps].

        `joint`: beside prompts. Kernels that do not pack the query heads of a KV head then read K and V
        for each of them, and compute a tile of rows for one.
        """
        kv, num = self.model.kv, len(contexts)
        growth = np.arange(num_steps)
        seen = int(contexts.sum()) + num * (growth + 1)
        traffic = seen * float(kv.per_token)
        windows = np.zeros(num_steps)
        if kv.window_tokens and num:
            each, limit = contexts[:, None] + growth + 1, kv.window_tokens
            windows = np.minimum(each, limit).sum(0) / limit
            traffic += kv.window_bytes * windows
        device, devices = self.accelerator, self.num_gpus
        rate = device.bandwidth * devices
        states_s = num * kv.state_bytes / (rate * CACHE_SHARE)
        packed_s = traffic * (self.kv_copies / (rate * CACHE_SHARE))
        if joint and not device.packs_heads and self.model.num_kv_heads > 1:
            pairs = seen * float(self.model.pair_flops)
            pairs += windows * kv.window_tokens * float(self.model.window_pair_flops)
            reads = traffic * (self.model.num_heads / self.model.num_kv_heads)
            computed_s = JOINT_TILE * pairs / (device.peak_flops * devices * ATTENTION_SHARE)
            joint_s = np.maximum(computed_s, reads / (rate * JOINT_SHARE))
            packed_s = np.maximum(packed_s, joint_s)
        return (packed_s + states_s).astype(np.float64)

    @property
    def _stream_rate(self) -> float:
        return self.accelerator.bandwidth * STREAM_SHARE

    def _bytes(self, params: float) -> float:
        return params * self.model.weight_bytes_per_param

    def _product_s(self, flops: float, num_bytes: float) -> float:
        """Return the seconds of products on one device: computing and reading, mostly side by side."""
        computing = flops / self.matrix_rate
        reading = num_bytes / self._stream_rate
        return (computing**OVERLAP + reading**OVERLAP) ** (1 / OVERLAP)


def _filled(rows: float, tile: int) -> float:
    """Return the rows that are computed for so many: of the last tile half is empty, on average."""
    return max(rows + tile / 2, tile)


def _attention_flops(model: ModelFacts, new: int, before: int) -> float:
    flops = model.pair_flops * causal_pairs(new, before)
    window = model.kv.window_tokens
    if window:
        growing = min(max(window - before, 0), new)
        pairs = causal_pairs(growing, before) + (new - growing) * window
        flops += model.window_pair_flops * pairs
    return flops

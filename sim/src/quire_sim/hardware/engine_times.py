"""The duration of an engine's steps, from data sheets alone: kernel by kernel, with few constants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.config import check_count
from quire_sim.hardware.collectives import all_reduce_s, gather_s
from quire_sim.hardware.facts import ModelFacts
from quire_sim.hardware.roofline import (
    BYTES_PER_ACTIVATION,
    Chunk,
    Contexts,
    ModelTimes,
    Seconds,
    causal_pairs,
)

MATRIX_SHARE = 0.8
"""Share of what the matrix units could do that matrix products of a few hundred rows or more reach."""

STREAM_SHARE = 0.92
"""Share of the memory bandwidth at which weights and activations are read."""

CACHE_SHARE = 0.65
"""The same for K and V, which lie in blocks."""

ATTENTION_SHARE = 0.5
"""Share of the peak that attention over prompts reaches."""

GROUPED_SHARE = 0.6
"""Share of `MATRIX_SHARE` that products with routed experts reach."""

TILE, EXPERT_TILE = 64, 16
"""Rows that a matrix product computes at least, and in multiples of: of one, and of one expert's."""

OVERLAP = 3.0
"""Exponent of the norm of computing and reading of a product: the larger of both at infinity."""

LAYER_S, EXPERT_LAYER_S = 20e-6, 10e-6
"""Seconds in which the kernels of a layer start and run out, and those of routed experts beside them."""

STEP_S = 0.4e-3
"""Seconds of a step beside its layers: inputs, sampling, the next graph."""

HOST_S, EAGER_LAYER_S = 2e-3, 120e-6
"""Seconds that the host needs at least for a step, and for each layer where it starts every kernel."""

KNOWN_ERROR = 0.04
"""The largest error of a mean or 99th percentile of times in the recorded runs that the constants
above were chosen on: docs/serving-simulation.md. It says nothing of devices unlike those."""

LOGIT_PASSES = 6
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
        return "data sheets, with constants from recorded runs of vLLM on an RTX 4090 and RTX PRO 6000s"

    def known_error(self) -> float | None:
        return KNOWN_ERROR

    @property
    def matrix_rate(self) -> float:
        """FLOPs per second of a large matrix product on one device."""
        device = self.accelerator
        peak, units = device.peak_flops, device.unit_flops
        if self.model.weight_bytes_per_param == 1.0 and device.fp8_flops:
            peak, units = device.fp8_flops, device.fp8_flops * (units or peak) / peak
        return min(peak, MATRIX_SHARE * (units or peak))

    def steps_s(self, chunks: Sequence[Chunk], contexts: Contexts, num_steps: int) -> Seconds:
        """Return the seconds of steps that decode these sequences, [num_steps], and compute the chunks."""
        num = len(contexts)
        tokens = (num + sum(new for new, _ in chunks)) / self.data_parallel
        sampled = (num + len(chunks)) / self.data_parallel
        steady_s: float = (
            self._products_s(tokens)
            + self._head_s(sampled)
            + self._prompt_attention_s(chunks)
            + self._activations_s(tokens)
            + self._collectives_s(tokens, sampled)
            + self._started_s()
        )
        total_s = steady_s + self._cached_s(contexts, num_steps)
        layers = self.model.num_layers
        least_s = max(HOST_S, layers * EAGER_LAYER_S if self.eager else 0.0)
        return np.maximum(total_s, least_s)

    def _products_s(self, tokens: float) -> float:
        """Return the seconds of all matrix products of the layers, for tokens of one group."""
        model = self.model
        params = model.dense_params / self.num_gpus
        rows = _filled(tokens, TILE)
        seconds = self._product_s(2 * rows * params, self._bytes(params))
        if not model.expert_params:
            return seconds
        all_tokens = tokens * self.data_parallel
        chosen = 1 - (1 - model.experts_per_token / model.num_experts) ** all_tokens
        used = model.expert_params * chosen / (self.num_gpus * self.data_parallel)
        each = all_tokens * model.experts_per_token / (model.num_experts * chosen)
        flops = 2 * _filled(each, EXPERT_TILE) * used / GROUPED_SHARE
        return seconds + self._product_s(flops, self._bytes(used))

    def _head_s(self, sampled: float) -> float:
        """Return the seconds from hidden states to tokens."""
        params = self.model.head_params / self.num_gpus
        logits = sampled * self.model.vocab * 4 * LOGIT_PASSES
        flops = 2 * _filled(sampled, TILE) * params
        product_s = self._product_s(flops, params * self.model.end_bytes)
        return product_s + logits / self._stream_rate

    def _prompt_attention_s(self, chunks: Sequence[Chunk]) -> float:
        flops = sum(_attention_flops(self.model, new, before) for new, before in chunks)
        devices = self.num_gpus * self.data_parallel
        return flops / (devices * self.accelerator.peak_flops * ATTENTION_SHARE)

    def _activations_s(self, tokens: float) -> float:
        """Return the seconds in which norms, activations and residuals are read and written."""
        model = self.model
        per_layer = 8 * model.hidden * model.num_layers
        used = model.active_params - model.lookup_params - model.head_params
        numbers = per_layer + used / model.hidden / self.num_gpus
        return tokens * numbers * BYTES_PER_ACTIVATION / self._stream_rate

    def _collectives_s(self, tokens: float, sampled: float) -> float:
        model, device = self.model, self.accelerator
        size = tokens * model.hidden * BYTES_PER_ACTIVATION
        seconds = 0.0
        if self.num_gpus > 1:
            logits = sampled * model.vocab * BYTES_PER_ACTIVATION
            seconds += 2 * model.num_layers * all_reduce_s(device, self.num_gpus, size)
            seconds += gather_s(device, self.num_gpus, logits)
        if self.data_parallel > 1 and model.expert_params:
            parts = size * self.data_parallel
            seconds += 2 * model.num_layers * gather_s(device, self.data_parallel, parts)
        return seconds

    def _started_s(self) -> float:
        model = self.model
        per_layer = LAYER_S + (EXPERT_LAYER_S if model.expert_params else 0.0)
        return STEP_S + model.num_layers * per_layer

    def _cached_s(self, contexts: Contexts, num_steps: int) -> Seconds:
        """Return the seconds of attention over the cached tokens of decoding sequences, [num_steps]."""
        kv, num = self.model.kv, len(contexts)
        growth = np.arange(num_steps)
        seen = int(contexts.sum()) + num * (growth + 1)
        traffic = seen * float(kv.per_token) + float(num * kv.state_bytes)
        if kv.window_tokens and num:
            each, limit = contexts[:, None] + growth + 1, kv.window_tokens
            traffic += (kv.window_bytes * np.minimum(each, limit) // limit).sum(0)
        devices = self.num_gpus * self.data_parallel
        rate = self.accelerator.bandwidth * CACHE_SHARE * devices
        return (traffic * (self.kv_copies / rate)).astype(np.float64)

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

"""The duration of a step of a model: the larger of computing and reading, and additions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import TypeAlias

import msgspec
import numpy as np

from quire.config import check_count
from quire.errors import ConfigError
from quire_sim.distributions import check_positive
from quire_sim.hardware.accelerators import Accelerator
from quire_sim.hardware.collectives import all_reduce_s
from quire_sim.hardware.facts import ModelFacts
from quire_sim.hardware.left_out import FigureErrors
from quire_sim.hardware.tiers import MemoryTier

BYTES_PER_ACTIVATION = 2

Contexts: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
"""For each decoding sequence the tokens that have KV before the step, int64 [n]."""

Seconds: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]

Chunk: TypeAlias = tuple[int, int]
"""A part of a prompt to compute: (new tokens, tokens before them that have KV)."""

RankWork: TypeAlias = tuple[Sequence[Chunk], Contexts]
"""The work of one of several groups in a step: parts of prompts, and sequences that decode."""

NOBODY: Contexts = np.empty(0, np.int64)


class Attention(Enum):
    """The pairs of tokens that attention is charged for."""

    CAUSAL = "causal"
    """each new token with the cached ones, those before it and itself: n x (p + (n + 1) / 2)"""
    ALL_PAIRS = "all pairs"
    """each new token with the cached and all new ones: n x (p + n)"""

    def pairs(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the pairs of `new_tokens` after `cached_tokens`."""
        seen = (new_tokens + 1) / 2 if self is Attention.CAUSAL else new_tokens
        return new_tokens * (cached_tokens + seen)


class ModelTimes(msgspec.Struct, frozen=True):
    """Seconds of steps of a model on an accelerator, whatever says how long one takes.

    `num_gpus`  tensor-parallel devices: each has a share of FLOPs, weights and K and V
    """

    model: ModelFacts
    accelerator: Accelerator
    num_gpus: int = 1

    @property
    def basis(self) -> str:
        """The source of the times, for people."""
        raise NotImplementedError

    def known_error(self) -> float | None:
        """Return by which share times were off where they were calibrated; None where they were not."""
        raise NotImplementedError

    def figure_errors(self) -> FigureErrors | None:
        """Return by which share figures were off on recorded runs left out; None where that was not tried."""
        return None

    def step_s(self, work: Iterable[Chunk], contexts: Contexts = NOBODY) -> float:
        """Return the seconds of one step over parts of prompts, and one token for each decoding sequence.

        An empty step takes none. Raises `ConfigError` for counts below zero.
        """
        chunks = checked_chunks(work)
        if not chunks and not len(contexts):
            return 0.0
        return float(self.steps_s(chunks, contexts, 1)[0])

    def decode_run_s(self, contexts: Contexts, num_steps: int) -> Seconds:
        """Return the seconds of so many steps in a row that only decode these sequences, [num_steps].

        Contexts grow by one token a step. Equals `step_s` called for each step, to the bit.
        """
        return self.steps_s((), contexts, num_steps)

    def steps_s(self, chunks: Sequence[Chunk], contexts: Contexts, num_steps: int) -> Seconds:
        """Return the seconds of steps that decode these sequences, [num_steps], each with these parts of prompts."""
        raise NotImplementedError

    def ranks_s(self, ranks: Sequence[RankWork], num_steps: int) -> Seconds:
        """Return the seconds of steps that several groups do together, each its own work, [num_steps]."""
        return np.max([self.steps_s(*work, num_steps) for work in ranks], axis=0)

    @property
    def kv_copies(self) -> float:
        """Copies of K and V: more than one where devices outnumber the KV heads."""
        return self.model.kv_copies(self.num_gpus)

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return the seconds of computing `new_tokens` after `cached_tokens` of one sequence."""
        return self.step_s([(new_tokens, cached_tokens)])

    def decode_s(self, contexts: Sequence[int]) -> float:
        """Return the seconds of one decode step: one token for each sequence, after its context."""
        return self.step_s((), np.asarray(contexts, np.int64))

    def ttft_s(
        self, new_tokens: int, cached_tokens: int = 0, tier: MemoryTier | None = None
    ) -> float:
        """Return the seconds until the first token of a request that runs alone.

        With a `tier`, the cached tokens are fetched from it, layer by layer while the layers before
        are computed: the longer of the two counts.
        """
        compute = self.prefill_s(new_tokens, cached_tokens)
        return compute if tier is None else max(self.fetch_s(cached_tokens, tier), compute)

    def fetch_s(self, num_tokens: int, tier: MemoryTier) -> float:
        """Return the seconds of fetching a cached prefix: latency + bytes / bandwidth."""
        return tier.fetch_s(self.model.kv.of(num_tokens)) if num_tokens else 0.0


def causal_pairs(new_tokens: int, cached_tokens: int) -> float:
    """Return the pairs of tokens of causal attention: each new one with those before it and itself."""
    return new_tokens * (cached_tokens + (new_tokens + 1) / 2)


def checked_chunks(work: Iterable[Chunk]) -> list[Chunk]:
    """Return the parts of prompts that have tokens. Raises `ConfigError` for counts below zero."""
    chunks = [(new, before) for new, before in work if new]
    if wrong := [chunk for chunk in chunks if min(chunk) < 0]:
        new, before = wrong[0]
        raise ConfigError(f"a step over {new} new tokens after {before}; both are 0 or more")
    return chunks


class Roofline(ModelTimes, frozen=True):
    """Seconds of steps: max(FLOPs / (peak x mfu), bytes / (bandwidth x efficiency)) + collectives.

    `mfu`            share of the peak that matrix multiplications reach; 0.5 is an assumption
    `attention_mfu`  the same for attention; None is as `mfu`
    `bandwidth_efficiency`  share of the memory bandwidth that steps reach; 0.8 is an assumption
    `overhead_s`     seconds that a step takes whatever is in it; none unless calibrated
    `attention`      which pairs of tokens are charged

    `error`          largest error on the measured steps that it was calibrated on; None: on none

    `cached_token_s` seconds per cached token of each sequence, beside all else: 0 where attention
                     reads K and V in place, more where an engine gathers or concatenates them

    FLOPs are 2 x active parameters x tokens, and `pair_flops` x pairs of tokens; the recurrence of
    linear layers is left out (about 1 % of their projections). Bytes are the weights that a step
    reads, once, and the K and V that it reads and writes. Collectives are two all-reduces a layer
    (`quire_sim.hardware.collectives`).
    Raises `ConfigError` for values that cannot be.
    """

    mfu: float = 0.5
    bandwidth_efficiency: float = 0.8
    overhead_s: float = 0.0
    attention: Attention = Attention.CAUSAL
    attention_mfu: float | None = None
    cached_token_s: float = 0.0
    error: float | None = None

    def __post_init__(self) -> None:
        check_count("num_gpus", self.num_gpus)
        for name in ("mfu", "bandwidth_efficiency", "attention_mfu"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        if not self.overhead_s >= 0 or not self.cached_token_s >= 0:
            raise ConfigError(
                f"overhead_s is {self.overhead_s} and cached_token_s {self.cached_token_s}; both are "
                "0 or more"
            )

    @property
    def basis(self) -> str:
        return (
            f"a roofline at {self.mfu:.0%} of the peak FLOP/s and {self.bandwidth_efficiency:.0%} of the "
            "bandwidth"
        )

    def known_error(self) -> float | None:
        return self.error

    @property
    def byte_rate(self) -> float:
        """Bytes per second that all devices read together."""
        return self.accelerator.bandwidth * self.bandwidth_efficiency * self.num_gpus

    def step_s(self, work: Iterable[Chunk], contexts: Contexts = NOBODY) -> float:
        steps = checked_chunks(work)
        if len(contexts):
            return float(self.steps_s(steps, contexts, 1)[0])
        if not steps:
            return 0.0
        busy = max(self.compute_s(steps), self.step_bytes(steps) / self.byte_rate)
        return busy + self._added_s(sum(new for new, _ in steps), steps)

    def compute_s(self, work: Iterable[Chunk]) -> float:
        """Return the seconds of the FLOPs of a step."""
        flops = 0.0
        for new, before in work:
            flops += self.product_flops(new) / self.mfu
            flops += self.attention_flops(new, before) / (self.attention_mfu or self.mfu)
        return flops / (self.accelerator.peak_flops * self.num_gpus)

    def product_flops(self, num_tokens: int) -> float:
        """Return the FLOPs of the matrix multiplications for `num_tokens` tokens."""
        return 2.0 * self.model.active_params * num_tokens

    def attention_flops(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return the FLOPs of attention of `new_tokens` after `cached_tokens`."""
        model = self.model
        flops = model.pair_flops * self.attention.pairs(new_tokens, cached_tokens)
        if model.window_pair_flops:
            flops += model.window_pair_flops * self._window_pairs(new_tokens, cached_tokens)
        return flops

    def step_bytes(self, work: Iterable[Chunk]) -> float:
        """Return the bytes that a step reads and writes: weights once, K, V and states.

        K and V count once for each device that holds the same of them: there are several where
        devices outnumber the KV heads.
        """
        work = list(work)
        num_tokens = sum(new for new, _ in work)
        return self.model.weight_bytes_read(num_tokens) + self._kv_bytes(work)

    def collectives_s(self, num_tokens: int) -> float:
        """Return the seconds of the all-reduces of a step over `num_tokens`."""
        if self.num_gpus == 1:
            return 0.0
        num_bytes = num_tokens * self.model.hidden * BYTES_PER_ACTIVATION
        one_s = all_reduce_s(self.accelerator, self.num_gpus, num_bytes)
        return 2 * self.model.num_layers * one_s

    def steps_s(self, chunks: Sequence[Chunk], contexts: Contexts, num_steps: int) -> Seconds:
        """Return the seconds of steps in which these sequences decode, and these prompts are computed.

        FLOPs and bytes of the sequences are sums over arrays: the same as one by one, up to rounding.
        """
        model, kv, n = self.model, self.model.kv, len(contexts)
        growth = np.arange(num_steps)
        seen = int(contexts.sum()) + n * growth
        pairs = (seen + n) * float(model.pair_flops)
        traffic = seen * float(kv.per_token) + float(n * (kv.of(1) + kv.state_bytes))
        if kv.window_tokens:
            each, limit = contexts[:, None] + growth, kv.window_tokens
            pairs += np.minimum(each + 1, limit).sum(0) * float(model.window_pair_flops)
            traffic += (kv.window_bytes * np.minimum(each, limit) // limit).sum(0)
        mfu, peak = self.attention_mfu or self.mfu, self.accelerator.peak_flops * self.num_gpus
        compute = self.product_flops(n) / (self.mfu * peak) + pairs / (mfu * peak)
        num_tokens = n + sum(new for new, _ in chunks)
        num_bytes = model.weight_bytes_read(num_tokens) + self._kv_bytes(chunks)
        busy = np.maximum(
            compute + self.compute_s(chunks),
            (num_bytes + traffic * self.kv_copies) / self.byte_rate,
        )
        return busy + self._added_s(num_tokens, chunks) + seen * self.cached_token_s

    def _kv_bytes(self, work: Iterable[Chunk]) -> float:
        kv = self.model.kv
        return sum(kv.of(before) + kv.of(new) for new, before in work) * self.kv_copies

    def _added_s(self, num_tokens: int, work: Iterable[Chunk]) -> float:
        """Return the seconds beside computing and reading of a step over so many tokens."""
        moved = self.cached_token_s * sum(before for _, before in work)
        return self.collectives_s(num_tokens) + self.overhead_s + moved

    def _window_pairs(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the pairs in layers with a window: no token sees more than the window."""
        window = self.model.kv.window_tokens
        if self.attention is Attention.ALL_PAIRS:
            return new_tokens * min(cached_tokens + new_tokens, window)
        growing = min(max(window - cached_tokens, 0), new_tokens)
        return self.attention.pairs(growing, cached_tokens) + (new_tokens - growing) * window

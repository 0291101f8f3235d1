"""The duration of a step of a model: the larger of computing and reading, and additions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from quire.errors import ConfigError
from quire.sim.hardware.accelerators import Accelerator
from quire.sim.hardware.facts import ModelFacts
from quire.sim.hardware.tiers import MemoryTier

BYTES_PER_ACTIVATION = 2


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


class Roofline(msgspec.Struct, frozen=True):
    """Seconds of steps: max(FLOPs / (peak x mfu), bytes / (bandwidth x efficiency)) + collectives.

    `num_gpus`       tensor-parallel devices: each has a share of FLOPs, weights and K and V
    `mfu`            share of the peak that matrix multiplications reach; 0.5 is an assumption
    `attention_mfu`  the same for attention; None is as `mfu`
    `bandwidth_efficiency`  share of the memory bandwidth that steps reach; 0.8 is an assumption
    `overhead_s`     seconds that a step takes whatever is in it; none unless calibrated
    `attention`      which pairs of tokens are charged

    `cached_token_s` seconds per cached token of each sequence, beside all else: 0 where attention
                     reads K and V in place, more where an engine gathers or concatenates them

    FLOPs are 2 x active parameters x tokens, and `pair_flops` x pairs of tokens; the recurrence of
    linear layers is left out (about 1 % of their projections). Bytes are the weights that a step
    reads, once, and the K and V that it reads and writes. Collectives are two all-reduces a layer:
    2 (N - 1) / N of the activations over the link between peers, and the latency of a message.
    Raises `ConfigError` for values that cannot be.
    """

    model: ModelFacts
    accelerator: Accelerator
    num_gpus: int = 1
    mfu: float = 0.5
    bandwidth_efficiency: float = 0.8
    overhead_s: float = 0.0
    attention: Attention = Attention.CAUSAL
    attention_mfu: float | None = None
    cached_token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ConfigError(f"num_gpus is {self.num_gpus}; it is at least 1")
        if not self.mfu > 0 or not self.bandwidth_efficiency > 0:
            raise ConfigError(
                f"mfu is {self.mfu} and bandwidth_efficiency {self.bandwidth_efficiency}; both are "
                "above 0, and at most about 1 on real hardware"
            )
        if self.attention_mfu is not None and not self.attention_mfu > 0:
            raise ConfigError(f"attention_mfu is {self.attention_mfu}; it is above 0, or None")
        if not self.overhead_s >= 0 or not self.cached_token_s >= 0:
            raise ConfigError(
                f"overhead_s is {self.overhead_s} and cached_token_s {self.cached_token_s}; both are "
                "0 or more"
            )

    @property
    def kv_copies(self) -> float:
        """Copies of K and V: more than one where devices outnumber the KV heads."""
        return self.model.kv_copies(self.num_gpus)

    @property
    def byte_rate(self) -> float:
        """Bytes per second that all devices read together."""
        return self.accelerator.bandwidth * self.bandwidth_efficiency * self.num_gpus

    def prefill_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return the seconds of computing `new_tokens` after `cached_tokens` of one sequence."""
        return self.step_s([(new_tokens, cached_tokens)])

    def decode_s(self, contexts: Sequence[int]) -> float:
        """Return the seconds of one decode step: one token for each sequence, after its context."""
        return self.step_s([(1, context) for context in contexts])

    def step_s(self, work: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of one step over (new tokens, tokens before them) of each sequence.

        An empty step takes none. Raises `ConfigError` for counts below zero.
        """
        steps = [(new, before) for new, before in work if new]
        num_tokens = sum(new for new, _ in steps)
        if not num_tokens:
            return 0.0
        if wrong := [step for step in steps if min(step) < 0]:
            new, before = wrong[0]
            raise ConfigError(f"a step over {new} new tokens after {before}; both are 0 or more")
        busy = max(self.compute_s(steps), self.step_bytes(steps) / self.byte_rate)
        moved = self.cached_token_s * sum(before for _, before in steps)
        return busy + self.collectives_s(num_tokens) + self.overhead_s + moved

    def compute_s(self, work: Iterable[tuple[int, int]]) -> float:
        """Return the seconds of the FLOPs of a step."""
        flops = 0.0
        mfu = self.mfu if self.attention_mfu is None else self.attention_mfu
        for new, before in work:
            flops += self.product_flops(new) / self.mfu + self.attention_flops(new, before) / mfu
        return flops / (self.accelerator.peak_flops * self.num_gpus)

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

    def product_flops(self, num_tokens: int) -> float:
        """Return the FLOPs of the matrix multiplications for so many tokens."""
        return 2.0 * self.model.active_params * num_tokens

    def attention_flops(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Return the FLOPs of attention of `new_tokens` after `cached_tokens`."""
        model = self.model
        flops = model.pair_flops * self.attention.pairs(new_tokens, cached_tokens)
        if model.window_pair_flops:
            flops += model.window_pair_flops * self._window_pairs(new_tokens, cached_tokens)
        return flops

    def step_bytes(self, work: Iterable[tuple[int, int]]) -> float:
        """Return the bytes that a step reads and writes: weights once, K, V and states.

        K and V count once for each device that holds the same of them: there are several where
        devices outnumber the KV heads.
        """
        kv = self.model.kv
        num_tokens, traffic = 0, 0
        for new, before in work:
            num_tokens += new
            traffic += kv.of(before) + kv.of(new)
        return self.model.weight_bytes_read(num_tokens) + traffic * self.kv_copies

    def collectives_s(self, num_tokens: int) -> float:
        """Return the seconds of the all-reduces of a step over `num_tokens`."""
        if self.num_gpus == 1:
            return 0.0
        num_bytes = num_tokens * self.model.hidden * BYTES_PER_ACTIVATION
        share = 2 * (self.num_gpus - 1) / self.num_gpus
        one = share * num_bytes / self.accelerator.peer_bandwidth + self.accelerator.peer_latency_s
        return 2 * self.model.num_layers * one

    def _window_pairs(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the pairs in layers with a window: no token sees more than the window."""
        window = self.model.kv.window_tokens
        if self.attention is Attention.ALL_PAIRS:
            return new_tokens * min(cached_tokens + new_tokens, window)
        growing = min(max(window - cached_tokens, 0), new_tokens)
        return self.attention.pairs(growing, cached_tokens) + (new_tokens - growing) * window

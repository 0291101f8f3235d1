"""A model as numbers: bytes of its cache, FLOPs of its layers, bytes of its weights."""

from __future__ import annotations

import msgspec

from quire.errors import ConfigError
from quire_sim.names import unknown

BITS = {
    "float32": 32.0, "fp32": 32.0,
    "bfloat16": 16.0, "bf16": 16.0, "float16": 16.0, "fp16": 16.0,
    "float8": 8.0, "fp8": 8.0, "int8": 8.0,
    "nvfp4": 4.5, "mxfp4": 4.25, "int4": 4 + 20 / 128,
}  # fmt: skip
"""Bits per number, scales included: one of 8 bits per 16 (nvfp4) or 32 (mxfp4) numbers, and 20 bits
per 128 (int4 in groups, as AWQ and GPTQ store it)."""


OWN_FORMATS = ("auto", "bfloat16", "float16", "half", "mxfp4", "modelopt", "compressed-tensors")
"""What engines call formats that a model's own config has told already."""


class KVBytes(msgspec.Struct, frozen=True):
    """The bytes of a cached sequence, in three parts.

    `per_token`      bytes per token, over all layers that see the whole prefix
    `window_bytes`   bytes of one full window, over all layers with a window
    `window_tokens`  tokens of that window; 0 where no layer has one
    `state_bytes`    bytes of the recurrent states at one stored boundary
    """

    per_token: int
    window_bytes: int = 0
    window_tokens: int = 0
    state_bytes: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                said = f"{name} is {getattr(self, name)}"
                raise ConfigError(f"{said}; bytes and tokens are 0 or more")
        if bool(self.window_bytes) != bool(self.window_tokens):
            raise ConfigError(
                f"a window has bytes and tokens, got window_bytes {self.window_bytes} and "
                f"window_tokens {self.window_tokens}; set both or neither"
            )

    def of(self, num_tokens: int, boundaries: int = 1) -> int:
        """Return the bytes of a cached sequence with states at `boundaries` of its lengths."""
        seen = min(num_tokens, self.window_tokens)
        window = self.window_bytes * seen // (self.window_tokens or 1)
        states = self.state_bytes * boundaries if num_tokens else 0
        return self.per_token * num_tokens + window + states


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as far as a simulation needs it. Counts are numbers, not bytes, unless they say so.

    `params`           all parameters of the language model
    `active_params`    those that one token is multiplied with: all but the experts it is not
                       routed to (embeddings count, as in published figures)
    `lookup_params`    those that are looked up and never multiplied: the embedding of tokens, but
                       where it is the last layer's matrix as well
    `num_experts`, `experts_per_token`  routed experts per layer; 0 in a dense model
    `weight_bytes_per_param`            mean over the checkpoint, the ends apart where they have their own
    `end_bytes_per_param`  of the embedding and the last layer, which checkpoints of few bits mostly leave in 16;
                       0: as the rest
    `num_kv_heads`     1 where K and V are one latent (MLA)
    `kv`               bytes of cached sequences
    `pair_flops`       FLOPs of attention per query and visible key, over all layers that see the
                       whole prefix: 4 x layers x heads x head_dim where K and V are equally wide
    `window_pair_flops`  the same over the layers with a window
    `max_context`      tokens the model was made for; 0 where its config does not say
    """

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    params: int
    active_params: int
    kv: KVBytes
    pair_flops: int
    window_pair_flops: int = 0
    lookup_params: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    weight_bytes_per_param: float = 2.0
    end_bytes_per_param: float = 0.0
    max_context: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        ends = self.lookup_params + self.head_params
        layers = self.params - ends
        return round(layers * self.weight_bytes_per_param + ends * self.end_bytes)

    @property
    def end_bytes(self) -> float:
        """Bytes per parameter of the embedding and the last layer."""
        return self.end_bytes_per_param or self.weight_bytes_per_param

    @property
    def head_params(self) -> int:
        """Parameters of the last layer, from hidden states to the vocabulary."""
        return self.vocab * self.hidden

    @property
    def expert_params(self) -> int:
        """Parameters of all routed experts; 0 where each token takes them all."""
        idle = self.params - self.active_params
        unchosen = self.num_experts - self.experts_per_token
        return round(idle * self.num_experts / unchosen) if unchosen else 0

    @property
    def dense_params(self) -> int:
        """Parameters that all tokens are multiplied with, the last layer apart."""
        return self.params - self.lookup_params - self.head_params - self.expert_params

    def weight_bytes_read(self, num_tokens: int) -> float:
        """Bytes of weights that a step over `num_tokens` reads.

        Of the routed experts, those that at least one token chose, if each chooses
        independently and evenly: a share of 1 - (1 - k/E)^num_tokens.
        """
        if not self.num_experts:
            return self.weight_bytes
        chosen = self.experts_per_token / self.num_experts
        idle = self.params - self.active_params
        unread = idle / (1 - chosen) * (1 - chosen) ** num_tokens if chosen < 1 else 0.0
        return self.weight_bytes - unread * self.weight_bytes_per_param

    def check_shared(self, num_gpus: int) -> None:
        """Raise `ConfigError` unless so many devices can share the heads evenly."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % num_gpus or (kv_heads % num_gpus and num_gpus % kv_heads):
            able = [n for n in range(1, heads + 1) if not heads % n]
            able = [n for n in able if not (kv_heads % n and n % kv_heads)]
            raise ConfigError(
                f"{num_gpus} devices cannot share the {heads} heads and {kv_heads} KV heads of "
                f"{self.name} evenly; take one of {', '.join(map(str, able))}"
            )

    def kv_copies(self, num_gpus: int) -> float:
        """Return the copies of K and V: more than one where devices outnumber the KV heads."""
        return max(1.0, num_gpus / self.num_kv_heads)

    def stored_as(self, weights: str | None = None, kv: str | None = None) -> ModelFacts:
        """Return this model with weights, or K and V, in another number format.

        Formats are the names in `BITS`. Recurrent states stay as they are, and the embedding and the last layer
        have 16 bits at least. Raises `ConfigError`.
        """
        bytes_per_param, ends = self.weight_bytes_per_param, self.end_bytes_per_param
        if weights is not None:
            bytes_per_param = bits(weights) / 8
            ends = 2.0 if bytes_per_param < 2 else 0.0
        kept = self.kv
        if kv is not None:
            share = bits(kv) / 16
            kept = KVBytes(
                round(kept.per_token * share),
                round(kept.window_bytes * share),
                kept.window_tokens,
                kept.state_bytes,
            )
        return msgspec.structs.replace(
            self, weight_bytes_per_param=bytes_per_param, end_bytes_per_param=ends, kv=kept
        )


def number_format(engine_name: str) -> str | None:
    """Return the format that an engine's name for weights, or K and V, stands for; None: the model's own.

    `torch.bfloat16`, `half`, `fp8_e4m3`, `awq_marlin` and the like. Raises `ConfigError`.
    """
    name = engine_name.lower().removeprefix("torch.")
    if name in OWN_FORMATS:
        return None
    if name.startswith(("fp8", "float8", "fbgemm_fp8", "ptpc_fp8")):
        return "fp8"
    if name.startswith(("awq", "gptq", "bitsandbytes")):
        return "int4"
    name = {"float": "float32", "modelopt_fp4": "nvfp4"}.get(name, name)
    bits(name)
    return name


def bits(dtype: str) -> float:
    """Return the bits per number of a format. Raises `ConfigError` for an unknown one."""
    name = dtype.lower().removeprefix("torch.")
    if name not in BITS:
        raise unknown("number format", dtype, BITS)
    return BITS[name]

"""Token mixers of layers: their parameters, stored bytes, and FLOPs of a pair of tokens.

K and V are counted in elements per token; states in bytes, since some are kept in 32 bits whatever
the rest is. Sources: the modelling code of transformers, whose parameter counts the tests compare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

from quire.errors import ConfigError
from quire_sim.hardware.keys import Config

_QK_NORM = ("qwen3", "gemma3", "gemma4", "lfm2")
_GATED = ("qwen3_next", "qwen3_5")


class Layer(msgspec.Struct, frozen=True):
    """One layer, or one part of it. `expert_params` are the routed experts among `params`."""

    params: int
    expert_params: int = 0
    kv: int = 0
    pair_flops: int = 0
    state_bytes: int = 0

    def plus(self, params: int, expert_params: int = 0) -> Layer:
        """Return this layer with more parameters."""
        sums = {"params": self.params + params, "expert_params": self.expert_params + expert_params}
        return msgspec.structs.replace(self, **sums)


def mixer(config: Config, index: int, kind: str, count: int) -> Layer:
    """Return the part of layer `index` of `count` that mixes tokens. Raises `ConfigError`."""
    match kind:
        case "recurrent" if config.get("linear_num_value_heads") is not None:
            return _gated_delta(config)
        case "recurrent" if config.get("mamba_num_heads", "mamba_n_heads") is not None:
            return _mamba2(config)
        case "recurrent":
            raise ConfigError(
                "the config has recurrent layers, but neither linear_num_value_heads (gated delta "
                "rule) nor mamba_num_heads (Mamba-2); the size of their state is not known"
            )
        case "conv":
            return _short_convolution(config)
        case "full" | "window" if config.get("kv_lora_rank") is not None:
            return _latent(config)
        case "full" | "window":
            shared = config.count("num_kv_shared_layers", default=0)
            return _grouped(config, index, kind, owns_kv=index < count - shared)
        case _:
            raise ConfigError(
                f"a layer that only feeds forward ({kind}) stands alone in no {config.family}"
            )


def head_dim(config: Config) -> int:
    """Return the width of a head, where the config leaves it to the others as well."""
    heads = config.size("num_attention_heads")
    return config.size("head_dim", default=max(1, config.count("hidden_size") // heads))


def kv_head_count(config: Config) -> int:
    """Return the number of heads of K and V."""
    heads = config.size("num_attention_heads")
    one = config.flag("multi_query") and not config.flag("new_decoder_architecture")
    return 1 if one else config.size("num_key_value_heads", "num_kv_heads", default=heads)


def _grouped(config: Config, index: int, kind: str, *, owns_kv: bool) -> Layer:
    hidden, heads = config.count("hidden_size"), config.size("num_attention_heads")
    kv_heads, width = kv_head_count(config), head_dim(config)
    keys_are_values = False
    if kind == "full" and config.family.startswith("gemma4"):
        width = config.size("global_head_dim", default=width)
        if config.flag("attention_k_eq_v"):
            keys_are_values = True
            kv_heads = config.size("num_global_key_value_heads", default=kv_heads)
    own = _own_settings(config, index)
    width = own.size("head_dim", default=width)
    kv_heads = own.size("num_key_value_heads", default=kv_heads)
    queries, keys = heads * width, kv_heads * width
    projected = 2 if keys_are_values else 3
    gate = queries if config.family.startswith(_GATED) else 0
    params = hidden * (2 * queries + gate)
    if owns_kv:
        params += hidden * keys * (projected - 1)
    if config.flag("attention_bias"):
        params += queries + gate + (2 * keys if owns_kv else 0) + hidden
    elif config.family.startswith("qwen2") or config.flag("qkv_bias"):
        params += queries + 2 * keys
    if config.family.startswith(_QK_NORM):
        params += 2 * width if owns_kv else width
    if config.family == "gpt_oss":
        params += heads
    return Layer(params, kv=2 * keys if owns_kv else 0, pair_flops=4 * queries)


def _own_settings(config: Config, index: int) -> Config:
    """Return the settings of one layer in `per_layer_config`."""
    every: Any = config.get("per_layer_config")
    if not isinstance(every, Mapping):
        return Config({})
    for key, value in cast("Mapping[str, Any]", every).items():
        if str(key).isdigit() and int(key) == index and isinstance(value, Mapping):
            return Config(dict(cast("Mapping[str, Any]", value)))
    return Config({})


def _latent(config: Config) -> Layer:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    It stores one latent and one rotary key per token. Keys and values are expanded from them for
    all heads, which is what a prefill computes.
    """
    hidden, heads = config.count("hidden_size"), config.size("num_attention_heads")
    latent, rotary = config.size("kv_lora_rank"), config.size("qk_rope_head_dim")
    plain, values = config.size("qk_nope_head_dim"), config.size("v_head_dim")
    query_rank = config.count("q_lora_rank", default=0)
    keyed = heads * (plain + rotary)
    params = hidden * query_rank + query_rank + query_rank * keyed if query_rank else hidden * keyed
    params += hidden * (latent + rotary) + latent + latent * heads * (plain + values)
    params += heads * values * hidden
    return Layer(params, kv=latent + rotary, pair_flops=2 * heads * (plain + rotary + values))


def _state(config: Config, recurrent: int, convolved: int, kernel: int) -> int:
    """Return the bytes of a state: the matrices, and the last `kernel` inputs of the convolution.

    16 bits, or what `mamba_ssm_cache_dtype` says, for both.
    """
    width = 4 if "32" in str(config.get("mamba_ssm_cache_dtype") or "") else 2
    return (recurrent + convolved * kernel) * width


def _mamba2(config: Config) -> Layer:
    """Mamba-2 (arXiv 2405.21060, section 7)."""
    hidden = config.count("hidden_size")
    heads = config.size("mamba_num_heads", "mamba_n_heads")
    inner = heads * config.size("mamba_head_dim", "mamba_d_head")
    states = config.size("ssm_state_size", "mamba_d_state")
    groups = config.size("n_groups", "mamba_n_groups", default=1)
    kernel = config.size("conv_kernel", "mamba_d_conv", default=4)
    convolved = inner + 2 * groups * states
    bias = convolved if config.flag("use_conv_bias", default=True) else 0
    params = hidden * (inner + convolved + heads) + convolved * kernel + bias
    params += 3 * heads + inner + inner * hidden
    return Layer(params, state_bytes=_state(config, inner * states, convolved, kernel))


def _gated_delta(config: Config) -> Layer:
    """Gated delta rule (arXiv 2412.06464), as in Qwen3-Next and Qwen3.5."""
    hidden = config.count("hidden_size")
    heads, width = config.size("linear_num_value_heads"), config.size("linear_value_head_dim")
    key_width = config.size("linear_key_head_dim")
    keys, values = config.size("linear_num_key_heads") * key_width, heads * width
    kernel = config.size("linear_conv_kernel_dim", default=4)
    convolved = 2 * keys + values
    params = hidden * (convolved + values + 2 * heads) + convolved * kernel
    params += 2 * heads + width + values * hidden
    return Layer(params, state_bytes=_state(config, values * key_width, convolved, kernel))


def _short_convolution(config: Config) -> Layer:
    """Gated short convolutions, as in LFM2."""
    hidden, kernel = config.count("hidden_size"), config.size("conv_L_cache", default=3)
    return Layer(
        4 * hidden * hidden + hidden * kernel, state_bytes=_state(config, 0, hidden, kernel)
    )

"""Feed-forward layers: dense, routed, shared."""

from __future__ import annotations

from quire_sim.hardware.keys import Config
from quire_sim.hardware.mixers import Layer

_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
_TWO_MATRICES = ("nemotron", "nemotron_h", "gpt_neox", "falcon", "starcoder2", "phi")


def routing(config: Config) -> tuple[int, int]:
    """Return the routed experts of a layer, and how many of them a token takes."""
    experts = config.size(*_EXPERTS)
    return experts, min(experts, config.size(*_TOP_K))


def is_sparse(config: Config, index: int) -> bool:
    """Whether layer `index` has routed experts."""
    if not config.count(*_EXPERTS, default=0) or not config.flag("enable_moe_block", default=True):
        return False
    types = config.listed("mlp_layer_types", count=index + 1)
    if types:
        return types[index] == "sparse"
    listed = config.listed("moe_layers")
    if listed is not None:
        return index in listed
    config = config.at(index, "moe_layer_freq")
    step = config.count(
        "decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", default=1
    )
    return (
        index >= config.count("first_k_dense_replace", "num_dense_layers", default=0)
        and index not in (config.listed("mlp_only_layers") or ())
        and step > 0
        and (index + 1) % step == 0
    )


def feed_forward(config: Config, index: int, *, moe: bool) -> Layer:
    """Return the feed-forward part of layer `index`."""
    config = config.at(index, "intermediate_size", "intermediate_size_mlp")
    hidden = config.count("hidden_size")
    matrices = 2 if config.family in _TWO_MATRICES else 3
    if not moe:
        width = _dense_width(config)
        bias = (matrices - 1) * width + hidden if config.flag("mlp_bias") else 0
        return Layer(matrices * hidden * width + bias)
    experts, _ = routing(config)
    width = config.size("moe_intermediate_size", "intermediate_size")
    latent = config.count("moe_latent_size", default=0)
    routed = experts * matrices * (latent or hidden) * width
    others = hidden * experts + 2 * hidden * latent + _shared(config, hidden, width, matrices)
    if config.family == "gpt_oss":
        routed += experts * (2 * width + hidden)
        others += experts
    if config.family.startswith("gemma4"):
        others += matrices * hidden * config.size("intermediate_size") + 4 * hidden + experts
    return Layer(routed + others, routed)


def _dense_width(config: Config) -> int:
    if config.family == "falcon":
        return config.count("ffn_hidden_size", default=4 * config.count("hidden_size"))
    width = config.count("intermediate_size_mlp", "block_ff_dim", "intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", default=config.family == "lfm2"):
        return width
    unit = config.size("block_multiple_of", default=256)
    return -(-(2 * width // 3) // unit) * unit


def _shared(config: Config, hidden: int, width: int, matrices: int) -> int:
    """Return the parameters that every token passes through beside its experts."""
    one = config.count(
        "shared_expert_intermediate_size",
        "moe_shared_expert_intermediate_size",
        "shared_intermediate_size",
        default=0,
    )
    if config.family.startswith("llama4"):
        one = width
    gate = hidden if config.get("shared_expert_intermediate_size") else 0
    shared = config.count("n_shared_experts", "num_shared_experts", default=1 if one else 0)
    if not one:
        one = width * shared
    return matrices * hidden * one + gate


def per_layer_embedding(config: Config, num_layers: int) -> int:
    """Return the parameters of inputs that each layer has of its own (Gemma 3n and 4)."""
    width = config.count("hidden_size_per_layer_input", default=0)
    if not width:
        return 0
    hidden = config.count("hidden_size")
    table = config.count("vocab_size_per_layer_input", default=config.count("vocab_size"))
    return num_layers * (table * width + 3 * hidden * width + hidden) + width

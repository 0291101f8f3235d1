"""Hugging Face configs read with care: every number checked, every layer given its kind."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from quire.config import read_bytes
from quire.errors import ConfigError
from quire_sim.hardware import feed, mixers
from quire_sim.hardware.facts import KVBytes, ModelFacts
from quire_sim.hardware.keys import MOST_LAYERS, Config

KINDS = {
    "full_attention": "full", "attention": "full", "global": "full", "*": "full",
    "sliding_attention": "window", "sliding_window": "window", "local": "window",
    "chunked_attention": "window",
    "linear_attention": "recurrent", "mamba": "recurrent", "mamba2": "recurrent", "M": "recurrent",
    "conv": "conv", "moe": "moe", "E": "moe", "mlp": "mlp", "-": "mlp",
}  # fmt: skip
"""Names of layer kinds in configs, and what they are here."""

_RECURRENT_KEYS = (
    "attn_layer_period", "linear_attn_config", "attn_type_list", "mamba_dt_rank", "mamba_d_state",
    "mamba_n_heads", "mamba_num_heads", "ssm_state_size", "linear_num_value_heads", "ssm_cfg",
)  # fmt: skip
"""Keys that only models with recurrent layers have."""


def model_facts(config: Mapping[str, Any] | str | Path, name: str | None = None) -> ModelFacts:
    """Return the facts of any decoder that transformers describes.

    `config`: the dict of a `config.json`, its path, or the folder it lies in. Grouped-query and
    latent attention, windows by layer, routed experts, and recurrent layers (Mamba-2, gated
    delta rule, short convolutions) are derived from it; K and V are counted in 16 bits.
    Raises `ConfigError` for what is missing, impossible, or of a kind that is not known.
    """
    if isinstance(config, (str, Path)):
        path = Path(config).expanduser()
        path = path / "config.json" if path.is_dir() else path
        name = name or (path.parent.name if path.name == "config.json" else path.stem)
        config = _read(path)
    return _derived(_language_model(config), name)


def _derived(config: Config, name: str | None) -> ModelFacts:
    kinds = layer_kinds(config)
    hidden, vocab = config.size("hidden_size"), config.size("vocab_size")
    layers = [_layer(config, index, kind, len(kinds)) for index, kind in enumerate(kinds)]
    tied = config.flag("tie_word_embeddings", default=config.family.startswith(("gemma", "falcon")))
    params = vocab * hidden * (1 if tied else 2) + hidden + sum(each.params for each in layers)
    per_layer = feed.per_layer_embedding(config, len(kinds))
    params += per_layer
    experts = sum(each.expert_params for each in layers)
    num_experts, per_token = feed.routing(config) if experts else (0, 0)
    idle = experts * (num_experts - per_token) // num_experts if num_experts else 0
    windows = [each for each, kind in zip(layers, kinds, strict=True) if kind == "window"]
    others = [each for each, kind in zip(layers, kinds, strict=True) if kind != "window"]
    window = window_tokens(config) if windows else 0
    window_kv = 2 * sum(each.kv for each in windows)
    return ModelFacts(
        name=name or config.family or "model",
        num_layers=len(kinds),
        hidden=hidden,
        num_heads=config.size("num_attention_heads"),
        num_kv_heads=1 if config.get("kv_lora_rank") is not None else mixers.kv_head_count(config),
        head_dim=mixers.head_dim(config),
        vocab=vocab,
        params=params,
        active_params=params - idle,
        kv=KVBytes(
            2 * sum(each.kv for each in others),
            window_kv * window,
            window if window_kv else 0,
            sum(each.state_bytes for each in layers),
        ),
        pair_flops=sum(each.pair_flops for each in others),
        window_pair_flops=sum(each.pair_flops for each in windows),
        lookup_params=(0 if tied else vocab * hidden) + per_layer,
        num_experts=num_experts,
        experts_per_token=per_token,
        weight_bytes_per_param=_weight_bits(config, experts / params) / 8,
        max_context=config.count("max_position_embeddings", default=0),
    )


def _language_model(config: object) -> Config:
    """Return a config's language model as a `Config`. Raises `ConfigError` for what is none."""
    if not isinstance(config, Mapping):
        raise ConfigError(f"a config is a dict (or a path to config.json), got {config!r:.80}")
    values = dict(cast("Mapping[str, Any]", config))
    for part in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = values.get(part)
        if isinstance(inner, Mapping):
            tied = values.get("tie_word_embeddings")
            values = values | dict(cast("Mapping[str, Any]", inner))
            if isinstance(tied, bool) and "tie_word_embeddings" not in inner:
                values["tie_word_embeddings"] = tied
    return Config(values)


def _read(path: Path) -> dict[str, Any]:
    content = read_bytes(path)
    try:
        return json.loads(content.decode("utf-8"))
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is no config.json: {error}") from error


def layer_kinds(config: Config) -> list[str]:
    """Return the kind of each layer: full, window, recurrent, conv, or a feed-forward of its own."""
    listed = config.listed("hybrid_override_pattern", "layers_block_type", "layer_types")
    if listed:
        try:
            return [KINDS[str(each)] for each in listed]
        except KeyError as error:
            raise ConfigError(
                f"layer kind {error} in the config is not known; known are {', '.join(KINDS)}"
            ) from None
    count = config.size("num_hidden_layers")
    if count > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers in the config is {count}, above {MOST_LAYERS}")
    every = config.count("full_attention_interval", default=0)
    if every:
        return ["full" if (index + 1) % every == 0 else "recurrent" for index in range(count)]
    indices = config.listed("attn_layer_indices")
    if indices is not None:
        return ["full" if index in indices else "recurrent" for index in range(count)]
    recurrent = [key for key in _RECURRENT_KEYS if config.get(key) is not None]
    if recurrent:
        raise ConfigError(
            f"the config has {recurrent[0]}, so layers are recurrent, but not in a way that is known "
            "here: Mamba-2, gated delta rule or short convolutions, with the kind of each layer in "
            "layer_types, full_attention_interval or attn_layer_indices"
        )
    ropes = config.listed("no_rope_layers")
    if ropes and config.get("attention_chunk_size"):
        return ["window" if rope else "full" for rope in ropes]
    return _windows(config, count)


def window_tokens(config: Config) -> int:
    """Return the tokens a layer with a window sees."""
    return config.count("sliding_window", "attention_chunk_size", "sliding_window_size")


def _windows(config: Config, count: int) -> list[str]:
    if not config.get("sliding_window"):
        return ["full"] * count
    pattern = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}.get(config.family, 0)
    pattern = config.count("sliding_window_pattern", default=pattern)
    if pattern:
        return ["full" if (index + 1) % pattern == 0 else "window" for index in range(count)]
    if not config.flag("use_sliding_window", default=not config.family.startswith("qwen")):
        return ["full"] * count
    full = config.count("max_window_layers", default=0)
    return ["full"] * min(full, count) + ["window"] * max(0, count - full)


def _layer(config: Config, index: int, kind: str, count: int) -> mixers.Layer:
    hidden = config.count("hidden_size")
    if config.family == "nemotron_h":
        mixed = (
            feed.feed_forward(config, index, moe=kind == "moe")
            if kind in {"moe", "mlp"}
            else mixers.mixer(config, index, kind, count)
        )
        return mixed.plus(params=hidden)
    norms = (4 if config.family.startswith(("gemma2", "gemma3", "gemma4")) else 2) * hidden
    mixed = mixers.mixer(config, index, kind, count)
    fed = feed.feed_forward(config, index, moe=feed.is_sparse(config, index))
    return mixed.plus(params=fed.params + norms, expert_params=fed.expert_params)


def _weight_bits(config: Config, expert_share: float) -> float:
    """Return the mean bits per parameter of the checkpoint."""
    plain = 32.0 if "32" in str(config.get("dtype", "torch_dtype") or "bfloat16") else 16.0
    quantized: Any = config.get("quantization_config")
    if not isinstance(quantized, Mapping):
        return plain
    settings = Config(dict(cast("Mapping[str, Any]", quantized)))
    match str(settings.get("quant_method")):
        case "fp8" | "fbgemm_fp8":
            return 8.0
        case "mxfp4":
            return 4.25 * expert_share + plain * (1 - expert_share)
        case "awq" | "gptq" | "bitsandbytes":
            width = settings.count(
                "bits", "w_bit", default=4 if settings.get("load_in_4bit") else 8
            )
            return width + 20 / 128
        case _:
            return plain

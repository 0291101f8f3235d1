"""What a transformers config says about a model's KV, and which models can be cached.

The border to transformers' untyped configs: values are read as `Any` here, checked once, and
leave typed. transformers is imported when a config is read, so that layouts made by hand need
torch only.
"""

from dataclasses import dataclass
from typing import Any, cast

from quire.errors import UnsupportedModel

_REASONS = {
    "sliding_attention": "a sliding window keeps the last tokens only",
    "chunked_attention": "chunked attention keeps the current chunk only",
    "linear_attention": "linear attention keeps a recurrent state, not K and V per token",
    "conv": "a convolution keeps a state, not K and V per token",
    "hybrid": "a hybrid layer keeps a recurrent state beside K and V",
    "hybrid_sliding": "a hybrid layer keeps a recurrent state beside a sliding window",
    "indexed_attention": "indexed attention keeps indexer keys beside K and V",
    "dummy": "the layer keeps no K and V of its own",
}
_RECURRENT_FIELDS = (
    "ssm_cfg",
    "ssm_state_size",
    "state_size",
    "mamba_d_state",
    "mamba_num_heads",
    "layers_block_type",
    "block_types",
    "lru_width",
    "rescale_every",
)


MEDIA_MODELS = frozenset({"internvl", "llava", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "voxtral"})
"""Composite models whose media stand in the text as placeholders of their own, one for each feature."""

_COMPOSITE_REASONS = {
    "mllama": "its cross-attention layers keep K and V of images, which belong to no token",
    "paligemma": "its prompt is not causal: K and V of each token depend on the tokens after it",
}


@dataclass(frozen=True, slots=True)
class KVShape:
    """Layers, heads and widths of the KV of a decoder."""

    num_layers: int
    kv_heads: int
    k_width: int
    v_width: int


def decoder_config(config: Any) -> Any:
    """Return the part of `config` that describes the text decoder."""
    return config.get_text_config(decoder=True)


def layer_kinds(config: Any) -> list[str]:
    """Return the attention kind of each layer of the text decoder, in transformers' words."""
    from transformers.cache_utils import (  # noqa: PLC0415 - see the module docstring
        get_layer_types_and_kwargs,  # pyright: ignore[reportUnknownVariableType]
    )

    try:
        kinds = get_layer_types_and_kwargs(decoder_config(config))[0]
    except AttributeError as error:
        raise UnsupportedModel(
            f"{model_type(config)} does not say what its layers are: {error}"
        ) from error
    return list(kinds)


def check_cacheable(config: Any) -> None:
    """Raise `UnsupportedModel` unless each layer's KV is a function of the tokens before it.

    That is so for decoders whose layers are all full causal attention with fixed positions.
    """
    name = model_type(config)
    text = decoder_config(config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{name} is an encoder-decoder: its decoder's KV depend on the encoder's input as "
            "well, which a prefix of tokens does not name; use a decoder-only model"
        )
    if text is not config and name not in MEDIA_MODELS:
        reason = _COMPOSITE_REASONS.get(name, "quire does not know how its media enter the text")
        raise UnsupportedModel(
            f"{name} is a composite model that cannot be cached: {reason}. Known are "
            f"{', '.join(sorted(MEDIA_MODELS))}; use the text decoder as a model of its own"
        )
    recurrent = [field for field in _RECURRENT_FIELDS if getattr(text, field, None) is not None]
    if recurrent or getattr(_layer_configs(text)[0], "num_attention_heads", None) is None:
        raise UnsupportedModel(
            f"{name} has recurrent layers or no attention (its config sets "
            f"{', '.join(recurrent) or 'no num_attention_heads'}): a state is valid at one "
            "position only and cannot be shared by prefix; use a model with full attention"
        )
    other: dict[str, list[int]] = {}
    for index, kind in enumerate(layer_kinds(config)):
        if kind != "full_attention":
            other.setdefault(kind, []).append(index)
    if other:
        listed = "; ".join(
            f"layers {_ranges(layers)} are {kind} ({_REASONS.get(kind, 'not full attention')})"
            for kind, layers in other.items()
        )
        raise UnsupportedModel(
            f"{name} cannot be cached yet: {listed}. quire caches models whose layers are all "
            "full_attention"
        )
    rope = _length_dependent_rope(text)
    if rope is not None:
        raise UnsupportedModel(
            f"{name} uses {rope!r} rope scaling in all {_count(text, 'num_hidden_layers')} layers: "
            "its K depends on the length of the whole input, so that a prefix computed for one "
            "prompt is wrong for a longer one; use a fixed rope scaling ('linear', 'yarn', "
            "'llama3')"
        )


def kv_shape(text: Any) -> KVShape:
    """Return layers, heads and widths that transformers 5.23 caches for the decoder config `text`.

    Raises `UnsupportedModel` when layers differ.
    """
    per_layer = [_layer_shape(layer) for layer in _layer_configs(text)]
    heads, k_width, v_width = per_layer[0]
    differing = [index for index, shape in enumerate(per_layer) if shape != per_layer[0]]
    if differing:
        raise UnsupportedModel(
            f"{model_type(text)} has layers of different KV shapes: layers {_ranges(differing)} "
            f"differ from layer 0 (kv_heads {heads}, K width {k_width}, V width {v_width}); "
            "quire needs one shape for all layers"
        )
    return KVShape(len(per_layer), heads, k_width, v_width)


def model_type(config: Any) -> str:
    """Return the model's name for messages."""
    return cast("str", getattr(config, "model_type", "")) or type(config).__name__


def _layer_configs(text: Any) -> list[Any]:
    per_layer = getattr(text, "per_layer_config", None)
    if per_layer:
        return list(per_layer)
    return [text] * _count(text, "num_hidden_layers")


def _layer_shape(text: Any) -> tuple[int, int, int]:
    latent, rope = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    if latent and rope:
        return 1, int(latent), int(rope)
    heads = _count(text, "num_attention_heads")
    head_dim = getattr(text, "head_dim", None) or _count(text, "hidden_size") // heads
    return _kv_heads(text, heads), int(head_dim), int(head_dim)


def _kv_heads(text: Any, heads: int) -> int:
    # Falcon: one head for the old architecture with multi_query, whatever num_kv_heads says.
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    for field in ("num_key_value_heads", "num_kv_heads"):
        value = getattr(text, field, None)
        if value is not None:
            return int(value)
    return heads


def _count(text: Any, field: str) -> int:
    value = getattr(text, field, None)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(
            f"{model_type(text)} has no usable {field} (it is {value!r}), so the shape of its "
            "KV is unknown"
        )
    return value


def _length_dependent_rope(text: Any) -> str | None:
    found: list[str] = []

    def look(value: Any) -> None:
        if not isinstance(value, dict):
            return
        entry = cast("dict[str, Any]", value)
        kind = entry.get("rope_type") or entry.get("type")
        if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind):
            found.append(kind)
        for inner in entry.values():
            look(inner)

    look(getattr(text, "rope_parameters", None))
    look(getattr(text, "rope_scaling", None))
    return found[0] if found else None


def _ranges(layers: list[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    parts: list[str] = []
    start = previous = layers[0]
    for layer in [*layers[1:], -1]:
        if layer == previous + 1:
            previous = layer
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = layer
    return ", ".join(parts)

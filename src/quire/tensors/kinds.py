"""Layers and KV of a model, as its transformers config has them, and models that cannot be cached.

The border to transformers' untyped configs: values are read as `Any` here, checked once, and
leave typed. transformers is imported when a config is read, so that layouts made by hand need
torch only.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from quire.errors import UnsupportedModel
from quire.tensors.slots import runs

_TOKEN_KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "hybrid": "full",
    "hybrid_sliding": "sliding",
}
_STATE_KINDS = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
_REASONS = {
    "indexed_attention": "indexed attention keeps indexer keys beside K and V",
    "compressed_sparse_attention": "compressed attention keeps sums over runs of tokens",
    "heavily_compressed_attention": "compressed attention keeps sums over runs of tokens",
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


MEDIA_MODELS = frozenset(
    {
        "aya_vision",
        "cohere2_vision",
        "gemma3",
        "got_ocr2",
        "idefics2",
        "idefics3",
        "internvl",
        "llama4",
    }
    | {"llava", "llava_next", "mistral3", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_vl"}
    | {"qwen3_vl_moe", "smolvlm", "vipllava", "voxtral"}
)
"""Composite models whose media stand in the text as placeholders of their own, one for each feature."""

_COMPOSITE_REASONS = {
    "mllama": "its cross-attention layers keep K and V of images, which belong to no token",
    "paligemma": "its prompt is not causal: K and V of each token depend on the tokens after it",
}
_RECURRENT_TEXT = "its text has recurrent layers, whose state after an image cannot go back to where the image begins"


@dataclass(frozen=True, slots=True)
class KVShape:
    """Heads and widths of the K and V of one layer."""

    kv_heads: int
    k_width: int
    v_width: int


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The memory of one layer between two forwards.

    word    transformers' name of the kind
    tokens  reach of its attention: "full", "sliding", "chunked"; None: it keeps no K and V
    window  tokens that a sliding layer sees, its own included, or of a chunk; None: all
    states  recurrent states (a convolution's and its recurrence's counted as one); 0: none

    A layer may keep both (a hybrid), or nothing (no attention, or another layer's K and V).
    """

    word: str
    tokens: str | None
    window: int | None
    states: int


def decoder_config(config: Any) -> Any:
    """Return the part of `config` that describes the text decoder."""
    return config.get_text_config(decoder=True)


def layer_kinds(config: Any) -> list[LayerKind]:
    """Return the kind of each layer of the text decoder.

    Raises `UnsupportedModel` for kinds that keep something else.
    """
    words, arguments = _words_and_arguments(config)
    other: dict[str, list[int]] = {}
    kinds: list[LayerKind] = []
    for index, (word, given) in enumerate(zip(words, arguments, strict=True)):
        if word not in _TOKEN_KINDS and word not in _STATE_KINDS and word != "dummy":
            other.setdefault(word, []).append(index)
        tokens = _TOKEN_KINDS.get(word)
        window = given.get("sliding_window") if tokens in ("sliding", "chunked") else None
        if tokens in ("sliding", "chunked") and window is None:
            tokens = "full"
        states = given.get("number_of_states", 1) if word in _STATE_KINDS else 0
        kinds.append(LayerKind(word, tokens, window, states))
    if other:
        listed = "; ".join(
            f"layers {_ranges(layers)} are {word} ({_REASONS.get(word, 'of a kind of their own')})"
            for word, layers in other.items()
        )
        raise UnsupportedModel(
            f"{model_type(config)} cannot be cached: {listed}. quire knows full, sliding, chunked, "
            "recurrent and hybrid layers"
        )
    return kinds


def _words_and_arguments(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    from transformers.cache_utils import (  # noqa: PLC0415 - see the module docstring
        get_layer_types_and_kwargs,  # pyright: ignore[reportUnknownVariableType]
    )

    try:
        words, arguments = cast("Any", get_layer_types_and_kwargs)(decoder_config(config))
    except AttributeError as error:
        raise UnsupportedModel(
            f"{model_type(config)} does not say what its layers are: {error}"
        ) from error
    return list(words), list(arguments)


def check_cacheable(config: Any) -> None:
    """Raise `UnsupportedModel` unless what each layer keeps is a function of the tokens before it.

    That is so for decoders with fixed positions, of layers that `layer_kinds` knows.
    """
    name = model_type(config)
    text = decoder_config(config)
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{name} is an encoder-decoder: its decoder's KV depend on the encoder's input as "
            "well, which a prefix of tokens does not name; use a decoder-only model"
        )
    if text is not config and name not in MEDIA_MODELS:
        reason = _COMPOSITE_REASONS.get(name) or _composite_reason(config)
        raise UnsupportedModel(
            f"{name} is a composite model that cannot be cached: {reason}. Known are "
            f"{', '.join(sorted(MEDIA_MODELS))}; use the text decoder as a model of its own"
        )
    kinds = layer_kinds(config)
    if text is not config and any(kind.states for kind in kinds):
        raise UnsupportedModel(
            f"{name} is a composite model that cannot be cached: {_RECURRENT_TEXT}; use the text decoder as a "
            "model of its own"
        )
    fields = [field for field in _RECURRENT_FIELDS if getattr(text, field, None) is not None]
    hidden = bool(fields) and not any(kind.states for kind in kinds)
    if hidden or all(kind.tokens is None for kind in kinds) or not _has_heads(text):
        raise UnsupportedModel(
            f"{name} keeps nothing but recurrent states, or keeps them outside the cache (its "
            f"config sets {', '.join(fields) or 'no num_attention_heads'}): where a prefix ends "
            "cannot be read from them; use a model that has attention layers as well"
        )
    rope = _length_dependent_rope(text)
    if rope is not None:
        raise UnsupportedModel(
            f"{name} uses {rope!r} rope scaling in all {_count(text, 'num_hidden_layers')} layers: "
            "its K depends on the length of the whole input, so that a prefix computed for one "
            "prompt is wrong for a longer one; use a fixed rope scaling ('linear', 'yarn', "
            "'llama3')"
        )


def _composite_reason(config: Any) -> str:
    """Return what is known of why media of a composite model cannot be named."""
    words, _ = _words_and_arguments(config)
    if any(word in _STATE_KINDS for word in words):
        return _RECURRENT_TEXT
    return "quire does not know how its media enter the text"


def kv_shapes(config: Any) -> list[KVShape]:
    """Return the shape that transformers 5.23 caches for K and V of each layer of `config`."""
    return [_layer_shape(layer) for layer in _layer_configs(decoder_config(config))]


def model_type(config: Any) -> str:
    """Return the model's name for messages."""
    return cast("str", getattr(config, "model_type", "")) or type(config).__name__


def _layer_configs(text: Any) -> list[Any]:
    per_layer = getattr(text, "per_layer_config", None)
    if per_layer:
        return list(per_layer)
    return [text] * _count(text, "num_hidden_layers")


def _has_heads(text: Any) -> bool:
    return getattr(_layer_configs(text)[0], "num_attention_heads", None) is not None


def _layer_shape(text: Any) -> KVShape:
    latent, rope = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    if latent and rope:
        return KVShape(1, int(latent), int(rope))
    heads = _count(text, "num_attention_heads")
    head_dim = getattr(text, "head_dim", None) or _count(text, "hidden_size") // heads
    return KVShape(_kv_heads(text, heads), int(head_dim), int(head_dim))


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
    found = runs(np.array(layers, np.int64))
    return ", ".join(
        f"{layers[at]}-{layers[at + count - 1]}" if count > 1 else f"{layers[at]}"
        for at, count in found
    )

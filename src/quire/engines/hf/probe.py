"""Finding out, by running it, what a model writes into its cache, and whether that can be reused."""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from quire.errors import ConfigError, UnsupportedModel
from quire.tensors.copy import KV
from quire.tensors.kinds import check_cacheable, model_type
from quire.tensors.layout import KVLayout

_NUM_TOKENS = 8
_NUM_FIRST = 5
_LAYERS_IN_PARTS = 2
# Relative L2 distances of K and V. The same tokens with other tokens after them give at most
# rounding, as shapes are equal; a layer that sees them gives 1e-3 with random weights and
# about 1 with trained ones. In two pieces instead of one, shapes differ as well: 1e-6 in
# float32 and 1e-2 in half precision, in the first layers (later ones may route tokens to
# other experts); state outside the cache gives about 1.
_TOLERANCE = {torch.float32: (1e-4, 1e-3), torch.float64: (1e-4, 1e-3)}
_TOLERANCE_HALF = (0.03, 0.15)


def probe_layout(model: Any, block_size: int, dtype: torch.dtype | None) -> KVLayout:
    """Return the layout of what `model` really caches; `dtype` None stores K and V as computed.

    Runs four short forwards. Raises `UnsupportedModel` for a model whose KV is not a function of
    the tokens before it, with the layers and the reason, and `ConfigError` for one that is in
    training mode or spread over devices.
    """
    _check_model(model)
    whole = _run(model, [_NUM_TOKENS])
    parts = _run(model, [_NUM_FIRST, _NUM_TOKENS - _NUM_FIRST])
    other = _run(model, [_NUM_TOKENS], other_end=True)
    name = model_type(model.config)
    shapes = {(tuple(k.shape), tuple(v.shape)) for k, v in whole}
    if not whole or {k.shape[-2] for k, _ in whole + parts + other} != {_NUM_TOKENS}:
        raise UnsupportedModel(
            f"{name} did not write {_NUM_TOKENS} columns of K and V into the cache it was given "
            f"for {_NUM_TOKENS} tokens, in each layer; its KV cannot be kept per token"
        )
    if len(shapes) != 1:
        raise UnsupportedModel(
            f"{name} has layers of different KV shapes: {sorted(shapes)}; quire needs one shape"
        )
    causal, split = _TOLERANCE.get(whole[0][0].dtype, _TOLERANCE_HALF)
    for layer, (one, two) in enumerate(zip(whole, other, strict=True)):
        if not _distance(one, two, _NUM_FIRST) <= causal:
            raise UnsupportedModel(
                f"{name}: K or V of layer {layer} depend on the tokens that follow; such a layer "
                "is not causal, and a prefix of it cannot be reused"
            )
    for layer, (one, two) in enumerate(zip(whole, parts, strict=True)):
        if layer < _LAYERS_IN_PARTS and not _distance(one, two, _NUM_TOKENS) <= split:
            raise UnsupportedModel(
                f"{name}: K or V of layer {layer} differ when the tokens are fed in two pieces; "
                "such a layer keeps state outside the cache, and a prefix of it cannot be reused"
            )
    k, v = whole[0]
    return KVLayout(
        num_layers=len(whole),
        kv_heads=k.shape[1],
        k_width=k.shape[-1],
        v_width=v.shape[-1],
        dtype=dtype or k.dtype,
        block_size=block_size,
    )


def _check_model(model: Any) -> None:
    check_cacheable(model.config)
    name = model_type(model.config)
    if hasattr(model, "get_base_model") or hasattr(model, "_orig_mod"):
        raise UnsupportedModel(
            f"{type(model).__name__} wraps the model that computes, and quire watches that one: "
            "pass model.get_base_model() of an adapter, which is seen in the modules, or the model "
            "from before torch.compile"
        )
    if not hasattr(model, "generate") or not model.can_generate():
        raise UnsupportedModel(
            f"{type(model).__name__} cannot generate; load the model with a language model head, "
            "for example AutoModelForCausalLM"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(
            f"{name} keeps a recurrent state, which is valid at one position only; use a model "
            "with full attention"
        )
    if model.training:
        raise ConfigError(
            "the model is in training mode, where dropout changes K and V; call model.eval() first"
        )
    devices = {str(p.device) for p in model.parameters()}
    if len(devices) > 1:
        raise ConfigError(
            f"the model lies on {len(devices)} devices ({', '.join(sorted(devices))}); "
            "quire keeps its pool on one: load the model onto one device"
        )
    attention = getattr(model.config, "_attn_implementation", None)
    if attention is not None and attention not in ALL_MASK_ATTENTION_FUNCTIONS.valid_keys():
        raise UnsupportedModel(
            f"{name} uses the attention function {attention!r}, for which no mask function is "
            "registered: it would get no mask, which is right for a whole prompt only and wrong "
            f"behind a cached prefix; call AttentionMaskInterface.register({attention!r}, ...)"
        )


def _run(model: Any, pieces: list[int], *, other_end: bool = False) -> list[KV]:
    vocab = model.get_input_embeddings().num_embeddings
    ids = (torch.arange(1, _NUM_TOKENS + 1, device=model.device) * 7919) % vocab
    if other_end:
        ids[_NUM_FIRST:] = (ids[_NUM_FIRST:] + 1) % vocab
    cache = DynamicCache()
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None  # the position offset of an earlier call
    done = 0
    with torch.no_grad():
        for piece in pieces:
            model(
                input_ids=ids[None, done : done + piece],
                past_key_values=cache,
                use_cache=True,
            )
            done += piece
    kv: list[KV] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, torch.Tensor) or not isinstance(values, torch.Tensor):
            return []
        kv.append((keys, values))
    return kv


def _distance(one: KV, two: KV, num_tokens: int) -> float:
    """Return the larger relative distance of K and of V over the first `num_tokens` tokens."""
    pairs = [
        (a[..., :num_tokens, :], b[..., :num_tokens, :]) for a, b in zip(one, two, strict=True)
    ]
    return max(_norm(a - b) / max(_norm(a), 1e-12) for a, b in pairs)


def _norm(states: torch.Tensor) -> float:
    return float(states.float().square().sum().sqrt())

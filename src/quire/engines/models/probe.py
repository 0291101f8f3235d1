"""The probe: it runs a model to find what it writes into its cache, and whether that can be reused."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from quire.engines.models.cache_factory import CacheFactory, make_layers
from quire.engines.models.column_tokens import TokenLedger
from quire.engines.models.distance import limit_for, relative
from quire.engines.models.quantized import check_quantized, rounds_activations, why_far, why_mixed
from quire.engines.models.supported import num_embeddings
from quire.engines.models.working_cache import WorkingCache
from quire.errors import ConfigError, UnsupportedModel
from quire.tensors.kinds import (
    KVShape,
    LayerKind,
    check_cacheable,
    layer_kinds,
    model_type,
)
from quire.tensors.layout import StateShape
from quire.tensors.model import ModelLayout

_NUM_TOKENS = 8
_NUM_FIRST = 5
_NUM_PADDING = 3
_FIRST_LAYERS = 2
# Relative L2 distances of K and V. The same tokens with other tokens after them give at most
# rounding, as shapes are equal; a layer that sees them gives 1e-3 with random weights and
# about 1 with trained ones. In two pieces or behind padding, shapes differ as well: 1e-6 in
# float32 and 1e-2 in half precision, in the first layers (later ones may route tokens to
# other experts); state outside the cache, and positions that count padding, give about 1.
_CAUSAL = (1e-4, 0.03)
_SHAPED = (1e-3, 0.15)
# A recurrent state in two pieces, against what it is when the second begins with a blank one: with
# a layer that goes on from its state, rounding only; with one that does not, the same (1).
_FORGOTTEN = 0.25
_STATE_ROUNDING = (1e-4, 0.02)


def probe_model(model: Any, block_size: int) -> tuple[list[LayerKind], ModelLayout]:
    """Return the kinds of the layers of `model`, and its layer groups, as it computes them.

    Runs four or five short forwards of the model itself. What its kind does with longer texts and
    with batches is seen on a twin (`battery.py`). Raises `UnsupportedModel` for a model for which
    what is kept is not a function of the tokens before it, with the layer, the reason, the distance
    and its limit, and `ConfigError` for one that is in training mode or spread over devices.
    """
    _check_model(model)
    name, kinds = model_type(model.config), layer_kinds(model.config)
    run = _Run(model, kinds)
    whole = run(_NUM_TOKENS)
    if any(layer.length != _NUM_TOKENS for layer in whole.kv_layers.values()) or not all(
        layer.names() for layer in whole.state_layers
    ):
        raise UnsupportedModel(
            f"{name} did not write {_NUM_TOKENS} columns of K and V for {_NUM_TOKENS} tokens, or a "
            "state, into each layer of the cache it was given; what it keeps elsewhere cannot be "
            "reused"
        )
    layout = _layout(kinds, whole, block_size)
    causal = limit_for(_dtype(whole), _CAUSAL)
    shaped = limit_for(_dtype(whole), _SHAPED, coarse=rounds_activations(model))
    other, factory = run(_NUM_TOKENS, other_end=True), CacheFactory(kinds, layout, model.device)
    if found := _beyond(causal, whole, other, whole.kv_layers, _NUM_FIRST):
        raise UnsupportedModel(
            f"{name}: K or V of layer {found[0]} depend on the tokens that follow ({found[1]}); such a "
            f"layer is not causal, and a prefix of it cannot be reused{why_mixed(model)}"
        )
    first = run(_NUM_FIRST) if whole.state_layers else other
    parts, blank = _rebuilt(first, factory), _rebuilt(first, factory, blank=True)
    run.go_on(parts)
    if found := _beyond(shaped, whole, parts, range(_FIRST_LAYERS)):
        raise UnsupportedModel(
            f"{name}: K or V of layer {found[0]} differ when the tokens are fed in two pieces "
            f"({found[1]}); such a layer keeps state outside the cache, and a prefix of it cannot be "
            f"reused{why_far(model)}"
        )
    if whole.state_layers:
        run.go_on(blank)
        if (far := _forgotten(whole, parts, blank)) > _FORGOTTEN:
            raise UnsupportedModel(
                f"{name}: its recurrent layers do not go on from their state when they are fed "
                f"several tokens at once (distance {far:.2g} of that from a blank state, limit "
                f"{_FORGOTTEN}): transformers starts them anew, or keeps state outside the cache; "
                "what was computed before cannot be reused"
            )
        return kinds, layout  # rows with states are computed one by one, without padding
    padded = run(_NUM_TOKENS, padding=_NUM_PADDING)
    if found := _beyond(shaped, whole, padded, range(_FIRST_LAYERS)):
        raise UnsupportedModel(
            f"{name}: K or V of layer {found[0]} differ behind {_NUM_PADDING} columns of padding "
            f"({found[1]}): its positions count padding, or its mask does not hide it, so that rows "
            f"of a batch cannot be found again{why_far(model)}"
        )
    return kinds, layout


class _Run:
    """Runs a model over the same few tokens, into caches of its kinds of layers."""

    def __init__(self, model: Any, kinds: Sequence[LayerKind]) -> None:
        self._model = model
        self._kinds = kinds
        vocab = num_embeddings(model)
        self._ids = (torch.arange(1, _NUM_TOKENS + 1, device=model.device) * 7919)[None] % vocab
        self._vocab = vocab
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    def __call__(
        self, num_tokens: int, *, other_end: bool = False, padding: int = 0
    ) -> WorkingCache:
        """Feed the first tokens at once, behind so many columns of padding.

        `other_end`: other ones from `_NUM_FIRST` on.
        """
        ids = self._ids.clone()
        if other_end:
            ids[:, _NUM_FIRST:] = (ids[:, _NUM_FIRST:] + 1) % self._vocab
        ledger = TokenLedger(ids[:, :0], np.array([padding]))
        columns = torch.nn.functional.pad(ids[:, :num_tokens], (padding, 0))
        return self._feed(WorkingCache(make_layers(self._kinds), ledger), columns, 0)

    def go_on(self, cache: WorkingCache) -> None:
        """Feed the tokens that a cache without padding lacks."""
        start = cache.get_seq_length()
        self._feed(cache, self._ids[:, start:], start)

    def _feed(self, cache: WorkingCache, ids: torch.Tensor, start: int) -> WorkingCache:
        model: Any = self._model
        offset = hasattr(model.base_model, "rope_deltas")
        if offset:
            model.base_model.rope_deltas = None  # the position offset of an earlier call
        padding = int(cache.ledger.pads[0])
        columns = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        given: dict[str, Any] = {}
        if self._takes_positions and (padding or not offset):
            given["position_ids"] = (columns - padding).clamp_min(0)
        if padding:
            given["attention_mask"] = (columns >= padding).long()
        try:
            with torch.no_grad():
                model(input_ids=ids, past_key_values=cache, use_cache=True, **given)
        except Exception as error:  # a model may raise anything for a cache that it does not know
            raise UnsupportedModel(
                f"{model_type(model.config)} does not compute with a transformers cache of one "
                f"layer per decoder layer: {error}"
            ) from error
        return cache


def _check_model(model: Any) -> None:
    check_cacheable(model.config)
    name = model_type(model.config)
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModel(
            f"{type(model).__name__} wraps the model that computes, and quire watches that one: call "
            "model.compile() in place of torch.compile(model), and pass the model itself"
        )
    if not hasattr(model, "generate") or not model.can_generate():
        raise UnsupportedModel(
            f"{type(model).__name__} cannot generate; load the model with a language model head, "
            "for example AutoModelForCausalLM"
        )
    if model.training:
        raise ConfigError(
            "the model is in training mode, where dropout changes K and V; call model.eval() first"
        )
    check_quantized(model)
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


def _rebuilt(cache: WorkingCache, factory: CacheFactory, *, blank: bool = False) -> WorkingCache:
    """Return a new cache with what a token behind `_NUM_FIRST` needs of `cache`, and nothing else.

    `blank`: with the sums of recurrences as they are before any token.
    """
    column = _NUM_FIRST
    rebuilt = factory.cache(cache.ledger.tokens, np.zeros(1, dtype=np.int64))
    for group, memory in factory.token_groups:
        for layer in group.layers:
            new = rebuilt.kv_layers[layer]
            targets = new.start_with(column, factory.like(memory, 1))
            for target, states in zip(
                targets, cache.kv_layers[layer].row(0, new.first, column), strict=True
            ):
                target.copy_(states[None])
    if cache.state_layers:
        states = [
            [
                torch.zeros_like(held) if blank and name.startswith("recurrent") else held
                for name, held in zip(names, layer, strict=True)
            ]
            for names, layer in zip(factory.state_names, cache.row_states(0), strict=True)
        ]
        rebuilt.fill_states([states], factory.state_names)
    return rebuilt


def _layout(kinds: Sequence[LayerKind], cache: WorkingCache, block_size: int) -> ModelLayout:
    """Read the layer groups from what a model has written."""
    shapes: list[KVShape | None] = [None] * len(kinds)
    for index, layer in cache.kv_layers.items():
        k, v = layer.row(0, layer.first, layer.length)
        shapes[index] = KVShape(k.shape[0], k.shape[-1], v.shape[-1])
    states: list[tuple[StateShape, ...]] = [()] * len(kinds)
    recurrent = [index for index, kind in enumerate(kinds) if kind.states]
    for index, layer in zip(recurrent, cache.state_layers, strict=True):
        states[index] = tuple(
            StateShape(name, tuple(held.shape), held.dtype)
            for name, held in zip(layer.names(), layer.read(0), strict=True)
        )
    return ModelLayout.of_layers(kinds, shapes, states, _dtype(cache), block_size)


def _dtype(cache: WorkingCache) -> torch.dtype:
    layer = next(iter(cache.kv_layers.values()))
    return layer.row(0, layer.first, layer.length)[0].dtype


def _beyond(
    limit: float,
    whole: WorkingCache,
    other: WorkingCache,
    layers: Iterable[int],
    stop: int = _NUM_TOKENS,
) -> tuple[int, str] | None:
    """Return the first of some layers whose K or V is further away in `other` than a limit, and how far.

    Over the tokens up to `stop` that both caches hold; `whole` has no padding.
    """
    pad = int(other.ledger.pads[0])
    for layer in layers:
        if (held := other.kv_layers.get(layer)) is not None:
            start = max(held.first - pad, 0)
            one = whole.kv_layers[layer].row(0, start, stop)
            two = held.row(0, pad + start, pad + stop)
            far = max(relative(a - b, a) for a, b in zip(one, two, strict=True))
            if not far <= limit:
                return layer, f"distance {far:.2g}, limit {limit:g}"
    return None


def _forgotten(whole: WorkingCache, parts: WorkingCache, blank: WorkingCache) -> float:
    """Return how near the first recurrent layer ends to where it does from a blank state.

    0: in two pieces as in one, but for rounding; 1: as if the second had begun with a blank state.
    """
    largest = 0.0
    ends = (cache.state_layers[0].read(0) for cache in (whole, parts, blank))
    for one, two, three in zip(*ends, strict=True):
        if relative(one - two, one) > limit_for(one.dtype, _STATE_ROUNDING):
            largest = max(largest, relative(one - two, one - three))
    return largest

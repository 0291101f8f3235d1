"""A model in each of its states, and plain forwards of it by transformers alone, with adapters merged."""

import copy
import warnings
from dataclasses import dataclass
from functools import cache

import numpy as np
import peft
import torch
from passages_help import made

from quire.core import Scope
from quire_passages import Segments

STATES = [(changed, adapter) for changed in (False, True) for adapter in (None, "one", "two")]
"""Whether weights are changed, and the adapter that takes part."""

NEAR = 2e-3
ROUNDED = 0.03
"""The largest difference of exact K and V, and of those kept in eight bits, as a share of the largest number."""

_MOST_KNOWN = 400


@cache
def adapted():
    """Return a Llama with two LoRA adapters, wrapped by PEFT."""
    torch.manual_seed(0)
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
    one, two = (
        peft.LoraConfig(r=rank, lora_alpha=16, target_modules=modules, init_lora_weights=False)
        for rank in (4, 2)
    )
    wrapped = peft.get_peft_model(made("Llama", {}), one, "one")
    wrapped.add_adapter("two", two)
    return wrapped.eval()


def scale(model, factor):
    """Multiply the weights of all keys, adapters apart."""
    with torch.no_grad():
        for layer in model.model.layers:
            weight = getattr(layer.self_attn.k_proj, "base_layer", layer.self_attn.k_proj)
            weight.weight.mul_(factor)


class Changing:
    """A model of PEFT, whose adapters are switched and whose weights are written."""

    def __init__(self):
        self.wrapped = copy.deepcopy(adapted())
        self.model, self.state = self.wrapped.get_base_model(), (False, "one")

    def turn(self, state):
        was, self.state, adapter = self.state, state, state[1]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if adapter is None:
                self.wrapped.base_model.disable_adapter_layers()
            else:
                self.wrapped.base_model.enable_adapter_layers()
                self.wrapped.set_adapter(adapter)
        if was[0] != state[0]:
            scale(self.model, 2.0 if state[0] else 0.5)


@cache
def _merged(state):
    is_changed, adapter = state
    wrapped = copy.deepcopy(adapted())
    if is_changed:
        scale(wrapped.get_base_model(), 2.0)
    return wrapped.merge_and_unload(adapter_names=[adapter]) if adapter else wrapped.unload()


@dataclass
class Claim:
    """K and V `[heads, tokens, width]` of each layer, said to be those of a text from `start` on in a state."""

    layers: object
    state: tuple
    text: bytes
    start: int = 0
    rounded: bool = False
    what: object = None


@dataclass
class AskedFor:
    """A request as it came: for whom, and in which state of the model."""

    tokens: np.ndarray
    segments: Segments | None
    scope: Scope | None
    bound: Scope
    state: tuple


_known: dict = {state: {} for state in STATES}


def compute(state, texts):
    """Compute those texts (ids as bytes) that are the beginning of no known one, in one batch."""
    known = _known[state]
    lacking = {text for text in texts if _longer(state, text) is None}
    lacking = [
        text
        for text in lacking
        if not any(each.startswith(text) for each in lacking if each != text)
    ]
    if not lacking:
        return
    if len(known) > _MOST_KNOWN:
        known.clear()
    size = max(map(len, lacking)) // 4
    ids = np.zeros((len(lacking), size), np.int64)
    for row, text in zip(ids, lacking, strict=True):
        row[: len(text) // 4] = np.frombuffer(text, np.int32)
    with torch.no_grad():
        found = _merged(state)(input_ids=torch.from_numpy(ids), use_cache=True)
    for row, text in enumerate(lacking):
        kv = [(each.keys[row], each.values[row]) for each in found.past_key_values.layers]
        known[text] = kv, found.logits[row]


def _longer(state, text):
    known = _known[state]
    if text in known:
        return known[text]
    return next((found for each, found in known.items() if each.startswith(text)), None)


def logits(state, ids):
    """Return the logits `[tokens, vocab]` of a plain forward."""
    text = ids.tobytes()
    compute(state, [text])
    return _longer(state, text)[1][: ids.size]


def check(claims):
    """Compare claims with plain forwards."""
    for state in STATES:
        mine = [each for each in claims if each.state == state]
        for at in range(0, len(mine), 64):
            some = mine[at : at + 64]
            compute(state, [each.text for each in some])
            for each in some:
                _check(each, _longer(state, each.text) or _again(state, each.text))


def _again(state, text):
    compute(state, [text])
    return _longer(state, text)


def _check(claim, known):
    stop = len(claim.text) // 4
    for at, (layer, whole) in enumerate(zip(claim.layers, known[0], strict=True)):
        for got, each in zip(layer, whole, strict=True):
            right = each[:, claim.start : stop]
            assert got.shape == right.shape, claim.what
            apart = (got - right).abs().amax((0, 2))
            most = max(float(right.abs().max()), 1.0)
            wrong = (~(apart <= (ROUNDED if claim.rounded else NEAR) * most)).nonzero().flatten()
            tokens = [claim.start + each for each in wrong.tolist()]
            assert not tokens, (
                f"layer {at}: tokens {tokens} of {stop} off",
                claim.what,
                claim.state,
            )


def owner_of(bound):
    """Return whose verdict counts a scope's prompts."""
    if bound.tenant is None:
        return bound
    return Scope(tenant=bound.tenant, lora=bound.lora, model=bound.model)

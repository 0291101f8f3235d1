"""Adapters that PEFT has put around a model's layers, and those that take part in a forward."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch

from quire.errors import UnsupportedModel

BASE_CHILDREN = frozenset({"base_layer", "original_module", "token_adapter"})
"""Children of a wrapper that hold what was there before it."""

OWN_STATE = frozenset({"_disable_adapters", "_active_adapter", "merged_adapters", "_adapters"})
"""Attributes of a wrapper that `in_use` has read."""


class InUse(NamedTuple):
    """The adapters of one layer that take part in its output.

    active, merged  names, in the order in which they are applied
    unused          names of the layer's other adapters
    undone          merged ones are disabled: the next forward takes them out of the weights
    """

    active: tuple[str, ...]
    merged: tuple[str, ...]
    unused: frozenset[str]
    undone: bool


def inside(model: Any) -> Any:
    """Return the model of transformers inside a `PeftModel`; any other model as it is."""
    is_wrapper = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_wrapper else model


def follow_settings(wrapper: Any, model: Any) -> None:
    """Give the model inside a `PeftModel` the generation settings that the wrapper's own `generate` gives it."""
    if wrapper is not model and hasattr(cast("Any", type(wrapper)), "generate"):
        settings = wrapper.generation_config
        if model.generation_config is not settings:
            model.generation_config = settings


def check_wrapper(wrapper: Any) -> None:
    """Raise `UnsupportedModel` unless a `PeftModel` computes what the model inside it computes.

    A learned prompt stands before the tokens (prefix tuning, prompt tuning, P-tuning), and activated LoRA looks for
    its invocation in the prompt: both do so in calls of the wrapper alone.
    """
    if getattr(wrapper, "_adapters_disabled", False):
        return
    active = cast("str | Iterable[str]", getattr(wrapper, "active_adapters", None) or ())
    for name in [active] if isinstance(active, str) else active:
        config = wrapper.peft_config.get(name)
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModel(
                f"the adapter {name!r} of the {type(wrapper).__name__} is a learned prompt ({kind}), which stands before the "
                "tokens and which quire does not keep, nor its base model alone compute; call this model's own "
                "model.generate, without a cache, or disable the adapter"
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise UnsupportedModel(
                f"the adapter {name!r} of the {type(wrapper).__name__} is an activated LoRA, whose part in K and V "
                "depends on where its invocation tokens stand in the prompt; call this model's own model.generate"
            )


def is_adapted(kind: type[object]) -> bool:
    """Whether modules of this class are wrappers of PEFT (`BaseTunerLayer`, `AuxiliaryTrainingWrapper`)."""
    return hasattr(kind, "adapter_layer_names") and hasattr(kind, "active_adapters")


def in_use(module: Any) -> InUse:
    """Return the adapters of a wrapper, by the part that they take now."""
    known = set(cast("Iterable[str]", getattr(module, "_adapters", ())))
    for attribute in module.adapter_layer_names:
        holder: object = module
        for name in attribute.split("."):
            holder = getattr(holder, name, None)
        if isinstance(holder, (Mapping, torch.nn.ModuleDict, torch.nn.ParameterDict)):
            known.update(cast("Iterable[str]", holder.keys()))
    merged = tuple(cast("Iterable[str]", getattr(module, "merged_adapters", ())))
    disabled = bool(module.disable_adapters)
    active = () if disabled else tuple(name for name in module.active_adapters if name in known)
    return InUse(active, merged, frozenset(known.difference(active, merged)), disabled)

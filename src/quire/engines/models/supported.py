"""The model of a cache: the models that are supported, and the model's attributes on the cache."""

from itertools import chain
from typing import Any, NoReturn, cast

import torch

from quire.engines.models.adapters import (
    BASE_CHILDREN,
    check_wrapper,
    follow_settings,
    inside,
    is_adapted,
)
from quire.errors import ConfigError, UnsupportedModel

_SPREAD = cast(
    "tuple[type[object], ...]",
    (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel),
)
_LOAD = "AutoModelForCausalLM.from_pretrained({!r}).eval()"


def checked_model(model: object, cache: str) -> Any:
    """Return the model of transformers that a cache is of: of a `PeftModel` the one inside.

    Raises `ConfigError` unless it is a module whose weights are in memory, and `UnsupportedModel` for a `PeftModel`
    that computes something else than the model inside it, and for a wrapper that spreads a model over devices.
    """
    if not isinstance(model, torch.nn.Module):
        what, do = f"model is a {type(model).__name__}", "a model of transformers"
        if isinstance(model, str | bytes) or hasattr(model, "__fspath__"):
            what, do = (
                f"model is {model!r}, a name",
                f"the model itself: {_LOAD.format(str(model))}",
            )
        elif isinstance(getattr(model, "model", None), torch.nn.Module):
            do = f"its model: {cache}(it.model)"
        raise ConfigError(f"{what}; pass {do}")
    if isinstance(model, _SPREAD):
        raise UnsupportedModel(
            f"model is a {type(cast('object', model)).__name__}, which copies the model or its gradients between devices in each forward, "
            f"and K and V are kept on one: pass its model, {cache}(it.module), and make a cache per device for more"
        )
    named = chain(model.named_parameters(), model.named_buffers())
    absent = [name for name, tensor in named if tensor.is_meta]
    if absent:
        raise ConfigError(
            f"{len(absent)} of the model's tensors (the first one is {absent[0]!r}) are not in memory: they "
            "are offloaded, and brought in while the model computes, or were never loaded. KV is bound to "
            "the weights that are there: load the model onto one device whole, without cpu_offload, "
            "disk_offload or a device_map that offloads"
        )
    within = inside(model)
    if within is not model:
        check_wrapper(model)
    return within


def num_embeddings(model: Any) -> int:
    """Return the number of tokens that a model has embeddings for, an adapter around them or not."""
    layer: Any = model.get_input_embeddings()
    while is_adapted(cast("type[object]", type(layer))):
        layer = next(child for name, child in layer.named_children() if name in BASE_CHILDREN)
    return layer.num_embeddings


class _OfModel:
    """An attribute of a cache that is its model's own."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, cache: Any, kind: type) -> Any:
        return self if cache is None else getattr(cache._model, self._name)  # noqa: SLF001 - the descriptor's owner


class _OfGenerate(_OfModel):
    """The generation settings of the model as it was given; set on a cache, they are set on that."""

    def __get__(self, cache: Any, kind: type) -> Any:
        if cache is not None:
            cache._follow_settings()  # noqa: SLF001 - the descriptor's owner
        return super().__get__(cache, kind)

    def __set__(self, cache: Any, settings: object) -> None:
        for model in (cache._given, cache._model):  # noqa: SLF001 - the descriptor's owner
            model.generation_config = settings


class ModelFace:
    """The model's attributes that a pipeline of transformers reads, on a cache in the model's place.

        pipe = pipeline("text-generation", model=cache, tokenizer=tokenizer)

    All of it is the model's own. `_given` is the model as the caller gave it, `_model` the one that computes.
    """

    _given: Any
    _model: Any

    @property
    def model(self) -> Any:
        """The model that this cache belongs to, as it was given. Setting it raises `ConfigError`."""
        return self._given

    @model.setter
    def model(self, model: object) -> None:
        name = type(self).__name__
        raise ConfigError(
            f"this cache holds K and V of its {type(self._given).__name__}, and of no {type(model).__name__}; "
            f"make a new {name} for another model (load_state_dict changes the weights of this one)"
        )

    device = _OfModel()
    dtype = _OfModel()
    config = _OfModel()
    generation_config = _OfGenerate()
    name_or_path = _OfModel()
    main_input_name = _OfModel()
    input_modalities = _OfModel()
    output_modalities = _OfModel()
    can_generate = _OfModel()

    def _follow_settings(self) -> None:
        """Take the generation settings that the model as it was given generates with."""
        follow_settings(self._given, self._model)

    def to(self, device: torch.device | str | int) -> Any:
        """Return this cache if it is on that device. Raises `ConfigError` if not: pools do not move."""
        wanted = torch.empty(0, device=device).device
        if wanted != self.device:
            raise ConfigError(
                f"the model and the pools are on {self.device}, and do not move to {wanted}; move the model "
                "first and make a new cache, or give the pipeline device=cache.device"
            )
        return self

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a forward of one's own belongs in a session."""
        name = type(self).__name__
        raise ConfigError(
            f"a {name} is not called as its model is; use cache.generate(...), or for forwards of your own "
            "with cache.session(input_ids) as past: model(..., past_key_values=past)"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled or copied."""
        name = type(self).__name__
        raise ConfigError(
            f"a {name} holds memory and requests, and is not pickled or copied; pass the model on and make "
            "a cache there, with tiers or save() and load() for what this one has"
        )

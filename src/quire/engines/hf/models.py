"""The model of a cache: what can be one, and what others ask a cache about its own."""

from itertools import chain
from typing import Any, NoReturn

import torch

from quire.errors import ConfigError

_LOAD = "AutoModelForCausalLM.from_pretrained({!r}).eval()"


def check_model(model: object, cache: str) -> None:
    """Raise `ConfigError` unless `model` is a module whose weights are in memory."""
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
    named = chain(model.named_parameters(), model.named_buffers())
    absent = [name for name, tensor in named if tensor.is_meta]
    if absent:
        raise ConfigError(
            f"{len(absent)} of the model's tensors (the first one is {absent[0]!r}) are not in memory: they "
            "are offloaded, and brought in while the model computes, or were never loaded. KV is bound to "
            "the weights that are there: load the model onto one device whole, without cpu_offload, "
            "disk_offload or a device_map that offloads"
        )


class ModelFace:
    """What a pipeline of transformers asks its model, for a cache that stands in the place of one.

        pipe = pipeline("text-generation", model=cache, tokenizer=tokenizer)

    All of it is the model's own.
    """

    _model: Any

    @property
    def model(self) -> Any:
        """The model that this cache belongs to. Setting it raises `ConfigError`."""
        return self._model

    @model.setter
    def model(self, model: object) -> None:
        name = type(self).__name__
        raise ConfigError(
            f"this cache holds K and V of its {type(self._model).__name__}, and of no {type(model).__name__}; "
            f"make a new {name} for another model (load_state_dict changes the weights of this one)"
        )

    @property
    def device(self) -> torch.device:
        """Where the model is, and the pools are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's weights."""
        return self.model.dtype

    @property
    def config(self) -> Any:
        """The config of the model."""
        return self.model.config

    @property
    def generation_config(self) -> Any:
        """The generation settings in force where a call gives none."""
        return self.model.generation_config

    @property
    def name_or_path(self) -> str:
        """Where the model was loaded from."""
        return self.model.name_or_path

    @property
    def main_input_name(self) -> str:
        """What `generate` calls a prompt."""
        return self.model.main_input_name

    @property
    def input_modalities(self) -> Any:
        """What the model reads."""
        return self.model.input_modalities

    @property
    def output_modalities(self) -> Any:
        """What the model gives."""
        return self.model.output_modalities

    def can_generate(self) -> bool:
        """Whether `generate` works: a cache is made for such models only."""
        return self.model.can_generate()

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

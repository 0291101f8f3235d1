"""A model whose decoder layers are called through somebody else, while the model itself is not touched.

Which rows a layer computes, and under which mask, is for a hook to say. But hooks registered at a
model are met by whoever else calls it. So the modules on the way down to its decoder layers are
copied, shallow: they share all weights and buffers, and only their list of layers is another.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch

from quire.errors import UnsupportedModel
from quire.tensors.kinds import model_type
from quire_passages.hf.attention import NAME

Given = dict[str, Any]
"""Arguments of a layer by name."""

Through = Callable[[int, Callable[..., Any], Given], Any]
"""Calls a decoder layer: its index, what calls it, and its arguments by name, the hidden states among them."""


Look = Callable[[int, torch.Tensor], None]
"""Is shown the attention of a layer: its index, and probabilities `[1, heads, rows, columns]`."""


def shadow_of(model: Any, num_layers: int, through: Through, look: Look | None = None) -> Any:
    """Return a model that shares all that `model` has, and calls its layers by `through`.

    look  is shown the attention of each layer, which is then computed the eager way

    Raises `UnsupportedModel` where the decoder layers are not found.
    """
    path = _path_to_layers(model, num_layers)
    modules: list[Any] = [model]
    for name in path:
        modules.append(modules[-1]._modules[name])  # noqa: SLF001 - what a module has is there alone
    copies = [_shallow(each) for each in modules]
    for name, above, below in zip(path, copies, copies[1:], strict=False):
        above._modules[name] = below  # noqa: SLF001 - in the dict that was copied for it
    layers = copies[-1]._modules  # noqa: SLF001 - by name, to be replaced there
    for index, (name, layer) in enumerate(list(layers.items())):
        seen = _by_rows(layer) if look is None else _looked_at(layer, index, look)
        layers[name] = _ShadowLayer(seen, index, through)
    return copies[0]


class _ShadowLayer(torch.nn.Module):
    """Stands for a decoder layer: its calls go through another, all else that is asked is the layer's own."""

    def __init__(self, layer: torch.nn.Module, index: int, through: Through) -> None:
        super().__init__()
        self.layer = layer
        self._index = index
        self._through = through
        parameters = inspect.signature(layer.forward).parameters.values()
        self._names = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        return self._through(self._index, self.layer, given)


class _ShadowAttention(torch.nn.Module):
    """Stands for the attention of a layer: what it returns beside its output is shown to another."""

    def __init__(self, attention: Any, index: int, look: Look) -> None:
        super().__init__()
        self.attention = attention
        self._index = index
        self._look = look

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output: Any = self.attention(*args, **kwargs)
        given = cast("tuple[Any, ...]", output) if isinstance(output, tuple) else ()
        if len(given) > 1 and isinstance(given[1], torch.Tensor):
            self._look(self._index, given[1])
        return cast("Any", output)


def _by_rows(layer: Any) -> Any:
    """Return a layer that shares all that `layer` has, with its attention by rows where it is sdpa's."""
    twin = _shallow(layer)
    for name, child in layer.named_children():
        config: Any = getattr(child, "config", None)
        if "att" in name and getattr(config, "_attn_implementation", None) == "sdpa":
            own = _shallow(child)
            own.config = copy.copy(config)
            own.config._attn_implementation_internal = NAME  # noqa: SLF001 - read in each forward
            twin._modules[name] = own  # noqa: SLF001 - as above
    return twin


def _looked_at(layer: Any, index: int, look: Look) -> Any:
    """Return a layer that shares all that `layer` has, with its attention computed the eager way and shown."""
    twin = _shallow(layer)
    for name, child in layer.named_children():
        if "att" not in name or not hasattr(child, "config"):
            continue
        eager = _shallow(child)
        eager.config = copy.copy(child.config)
        eager.config._attn_implementation_internal = "eager"  # noqa: SLF001 - read in each forward
        twin._modules[name] = _ShadowAttention(eager, index, look)  # noqa: SLF001
    return twin


def _path_to_layers(model: Any, num_layers: int) -> list[str]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers:
            return name.split(".")
    raise UnsupportedModel(
        f"{model_type(model.config)} has no list of {num_layers} decoder layers that quire finds; rows cannot "
        "be chosen in its forward"
    )


def _shallow(module: Any) -> Any:
    twin: Any = object.__new__(cast("type[object]", type(module)))
    twin.__dict__.update(module.__dict__)
    twin.__dict__["_modules"] = dict(module._modules)  # noqa: SLF001 - a dict of its own
    return twin

"""What a model's K and V are computed from: every tensor and every setting that its modules hold."""

# ruff: noqa: SLF001 - the registers of a module have no other names, and walking them is faster
# pyright: reportPrivateUsage=false

import dataclasses
import enum
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import output_capturing

from quire.engines.hf.adapters import BASE_CHILDREN, OWN_STATE, in_use, is_adapted
from quire.engines.hf.watched import SeenForward
from quire.engines.hf.watching import Place, Watch, stamps_of

Stamp = tuple[Place, bytes, tuple[str, ...] | None]
"""What a tensor's values are known by without reading all of them: its place, a sample of them, and the
adapters that are merged into it (None where PEFT has not wrapped the layer)."""

_ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)
# Attributes that every module has: registers, which are read as such, and hooks of gradients and loading.
_OF_MODULES = frozenset(vars(torch.nn.Module())) - {"training"} | {"_is_hf_initialized"}
# What transformers notes about a model, what `generate` alone reads, and the offset of the last call's
# positions, which quire sets before it computes. Private attributes are plans of loading and placing.
_OF_MODELS = frozenset(
    {"name_or_path", "peft_config", "generation_config", "loss_type", "hf_device_map"}
    | {"all_tied_weights_keys", "warnings_issued", "kernel_config", "rope_deltas"}
)
_NOTES_OF_CONFIG = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "architectures", "_commit_hash"}
    | {"id2label", "label2id", "problem_type", "_post_init_done", "use_cache"}
)
_MAX_DEPTH = 8


class Weight(NamedTuple):
    """A tensor where it is held; `owner` is the buffer or attribute, None for a parameter."""

    path: str
    owner: str | None
    added: bool
    are_floats: bool
    merged: tuple[str, ...] | None
    tensor: torch.Tensor


class Held:
    """An object of any other kind that a module holds: equal to itself alone."""

    __slots__ = ("thing",)

    def __init__(self, thing: object) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


class Values(NamedTuple):
    """Stands among settings for a tensor, which is a place of its own."""

    are_floats: bool


class Sight:
    """A model at a moment: all that decides its K and V, as far as it can be seen.

    facts    settings, by path: classes and their `forward`, numbers, hooks, the config
    added    the same of adapters that take part; the wrapper around a layer, and adapters that take
             no part, leave no trace elsewhere
    names    the adapters that take part
    classes  those of all modules that compute, with their `forward`
    weights  all tensors but those of adapters that take no part; `stamps` are theirs

    """

    def __init__(self, model: Any) -> None:
        self.facts: dict[str, object] = _surroundings(model)
        self.added: dict[str, object] = {}
        self.names: set[str] = set()
        self.classes: set[tuple[type[object], object]] = set()
        self.weights: list[Weight] = []
        self._first: dict[int, str] = {}
        self._watch = Watch(functools.partial(_surroundings, model))
        self._note(model, "", None)
        self._watch.seal()
        places = stamps_of([weight.tensor for weight in self.weights])
        self.stamps: list[Stamp] = [
            (*place, weight.merged) for place, weight in zip(places, self.weights, strict=True)
        ]

    def holds(self, *, sampled: bool = True) -> bool:
        """Whether the model is still as it was, as `Watch` tells."""
        return self._watch.holds(sampled=sampled)

    def forget_tensors(self) -> "Sight":
        """Keep the stamps alone, so that weights which are replaced can be freed."""
        self.weights = [weight._replace(tensor=_GONE) for weight in self.weights]
        return self

    def changes(self, other: "Sight") -> dict[str, bool]:
        """Return the paths at which two sights differ; a buffer or an attribute stands for its tensors.

        True marks what a model may note in its own forward: a count, a flag or an offset. Numbers
        with a fraction are none: K and V may depend on them.
        """
        changed: dict[str, bool] = {}
        for path in self.facts.keys() | other.facts.keys():
            if (
                path not in self.facts
                or path not in other.facts
                or self.facts[path] != other.facts[path]
            ):
                both = (self.facts.get(path), other.facts.get(path))
                is_attribute = path.startswith(".") and not path.endswith(".training")
                changed[path] = is_attribute and all(map(_is_note, both))
        for path in self.added.keys() | other.added.keys():
            if self.added.get(path) != other.added.get(path):
                changed[path] = False
        mine, theirs = (
            dict(zip((weight.path for weight in each.weights), each.stamps, strict=True))
            for each in (self, other)
        )
        for weight in (*self.weights, *other.weights):
            if mine.get(weight.path) != theirs.get(weight.path):
                is_note = not (weight.owner is None or weight.added or weight.are_floats)
                path = weight.owner or weight.path
                changed[path] = changed.get(path, True) and is_note
        return changed

    def _note(self, module: torch.nn.Module, path: str, merged: tuple[str, ...] | None) -> None:
        """Note a module of the model, and what is below it."""
        if is_adapted(type(module)):
            self._note_wrapper(module, path, merged)
            return
        first = self._first.setdefault(id(module), path)
        if first is not path:
            if first != path:
                self.facts[path] = ("the module at", first)
            return
        self._note_own(module, path, merged)
        for name, child in _children(module):
            if child is not None:
                self._note(child, f"{path}.{name}", merged)

    def _note_wrapper(
        self, module: torch.nn.Module, path: str, merged: tuple[str, ...] | None
    ) -> None:
        use = in_use(module)
        self._watch.modules += [
            module,
            *(child for _, child in _children(module) if child is not None),
        ]
        self._watch.containers += [each for each in vars(module).values() if isinstance(each, list)]
        if use.active or use.merged:
            self.names.update(use.active, use.merged)
            where = f"{path}+"
            while where in self.added:
                where += "+"
            self._note_added(module, where, use.unused, set())
            self.added[f"{where}in use"] = (use.active, use.merged, use.undone)
        for name, child in _children(module):
            if name in BASE_CHILDREN and child is not None:
                self._note(child, path, (merged or ()) + use.merged)

    def _note_added(
        self, module: torch.nn.Module, path: str, unused: frozenset[str], above: set[int]
    ) -> None:
        """Note a part of a wrapper, and what is below it, but no entry named `unused`."""
        self._note_own(module, path, None, unused, added=True)
        below = unused if not above else frozenset[str]()
        for name, child in _children(module):
            if child is None or name in unused or name in BASE_CHILDREN or id(child) in above:
                continue
            if not is_adapted(cast("type[object]", type(child))):
                self._note_added(child, f"{path}.{name}", below, {*above, id(module)})

    def _note_own(
        self,
        module: Any,
        path: str,
        merged: tuple[str, ...] | None,
        unused: frozenset[str] = frozenset(),
        *,
        added: bool = False,
    ) -> None:
        """Note the class, the attributes, the hooks and the tensors of a module."""
        facts = self.added if added else self.facts
        kind = cast("Any", type(module))
        facts[path] = (kind, kind.forward)
        self.classes.add((kind, kind.forward))
        self._watch.modules.append(module)
        is_model = issubclass(kind, PreTrainedModel)
        for name, value in tuple(cast("dict[str, Any]", vars(module)).items()):
            if name in _OF_MODULES or (is_model and (name in _OF_MODELS or name[0] == "_")):
                continue
            if added and name in OWN_STATE:
                continue
            if isinstance(value, SeenForward):  # of open sessions
                value = value.beneath()  # noqa: PLW2901
                if value is None:
                    continue
            if type(value) in _ATOMS:
                facts[f"{path}.{name}"] = value
            else:
                kept = _without(value, unused) if unused else value
                if kept is not value:
                    self._watch.containers.append(value)
                facts[f"{path}.{name}"] = self._frozen(kept, f"{path}.{name}", added=added)
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if hooks := tuple(hook for hook in hooks if not _only_looks(hook)):
            facts[f"{path} hooks"] = hooks
        for name, tensor in module._parameters.items():
            if tensor is not None and name not in unused:
                self._note_tensor(f"{path}.{name}", None, tensor, merged, added=added)
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in unused:
                owner = f"{path}.{name}"
                self._note_tensor(owner, owner, tensor, merged, added=added)

    def _note_tensor(
        self,
        path: str,
        owner: str | None,
        tensor: Any,
        merged: tuple[str, ...] | None,
        *,
        added: bool,
    ) -> None:
        if hasattr(
            cast("object", type(tensor)), "__tensor_flatten__"
        ):  # a quantized weight, made of several
            for name in tensor.__tensor_flatten__()[0]:
                part = getattr(tensor, name)
                self._note_tensor(f"{path}.{name}", owner, part, merged, added=added)
        else:
            floats = tensor.is_floating_point()
            self.weights.append(Weight(path, owner, added, floats, merged, tensor))

    def _frozen(self, value: Any, path: str, *, added: bool, owner: str = "") -> object:
        """Return what an attribute holds as something that compares and stays as it is."""
        owner = owner or path
        if type(value) in _ATOMS or isinstance(value, (enum.Enum, type)):
            return value
        if isinstance(value, torch.Tensor):
            self._note_tensor(path, owner, value, None, added=added)
            self._watch.loose.append(value)
            return Values(value.is_floating_point())
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
            return value
        if path.count("/") > _MAX_DEPTH:
            return Held(cast("object", value))
        if isinstance(value, (list, dict, set)):
            self._watch.containers.append(value)
        if isinstance(value, (list, tuple, set, frozenset)):
            items = enumerate(cast("Iterable[Any]", value))
            parts = [
                self._frozen(item, f"{path}/{index}", added=added, owner=owner)
                for index, item in items
            ]
            return frozenset(parts) if isinstance(value, (set, frozenset)) else tuple(parts)
        if isinstance(value, torch.nn.Module):
            if not added and id(value) not in self._first:
                self._note(value, path, None)
            return Held(cast("object", value))
        entries: Mapping[Any, Any] | None = None
        if isinstance(value, PreTrainedConfig):
            first = self._first.setdefault(id(value), path)
            if first is not path:
                return ("the config at", first)
            self._watch.containers.append(vars(value))
            entries = {k: v for k, v in vars(value).items() if k not in _NOTES_OF_CONFIG}
        elif isinstance(value, Mapping):
            entries = cast("Mapping[Any, Any]", value)
        elif dataclasses.is_dataclass(value):
            entries = vars(value) if hasattr(value, "__dict__") else None
        if entries is None:
            return Held(cast("object", value))
        return tuple(
            (key, self._frozen(item, f"{path}/{key}", added=added, owner=owner))
            for key, item in entries.items()
        )


_GONE = torch.empty(0)


def _only_looks(hook: object) -> bool:
    """Whether it is a hook by which transformers collects hidden states and attentions."""
    return getattr(hook, "__module__", None) == output_capturing.__name__


def _is_note(fact: object) -> bool:
    return fact is None or type(fact) in (bool, int) or fact == Values(are_floats=False)


def _surroundings(model: Any) -> dict[str, object]:
    """Return what decides K and V outside the model."""
    kind = model.device.type
    state: dict[str, object] = {
        "default dtype": torch.get_default_dtype(),
        "matmul precision": torch.get_float32_matmul_precision(),
    }
    if torch.is_autocast_enabled(kind):
        state["autocast"] = torch.get_autocast_dtype(kind)
    everywhere = cast("Any", torch.nn.modules.module)
    hooks = (
        *everywhere._global_forward_hooks.values(),
        *everywhere._global_forward_pre_hooks.values(),
    )
    if hooks:
        state["hooks"] = hooks
    return state


def _without(value: Any, unused: frozenset[str]) -> Any:
    if isinstance(value, dict):
        entries = cast("dict[Any, Any]", value)
        return {key: item for key, item in entries.items() if key not in unused}
    return value


def _children(module: Any) -> Iterable[tuple[str, Any]]:
    return module._modules.items()

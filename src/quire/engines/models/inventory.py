"""A model at a moment: every tensor and every setting that its K and V are computed from."""

# ruff: noqa: SLF001 - the registers of a module have no other names, and walking them is faster
# pyright: reportPrivateUsage=false

import dataclasses
import enum
import functools
import types
from collections.abc import Iterable, Mapping
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import output_capturing
from transformers.utils.quantization_config import QuantizationMethod

from quire.engines.models.adapters import BASE_CHILDREN, OWN_STATE, in_use, is_adapted
from quire.engines.models.compiled import CALLED_BY, is_compiled, replaced, uncompiled
from quire.engines.models.folded import Mark, fold_of, is_folded, unfolded
from quire.engines.models.inventory_entries import Held, ModelSpot, Values, Weight
from quire.engines.models.tensor_stamps import (
    Place,
    forms_of,
    samples_of,
    stamps_of,
    values_of,
    writes_of,
)

Stamp = tuple[Place, bytes, tuple[str, ...] | None]
"""A tensor's place, a sample of its values, and the adapters that are merged into it (None where PEFT has
not wrapped the layer): its values are known by them without reading all."""

_ATOMS = frozenset(
    {int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size}
)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
# Attributes that every module may have: registers, which are read as such, hooks of gradients and loading, how it is drawn.
_OF_MODULES = (
    frozenset(vars(torch.nn.Module())) - {"training"}
    | {"_is_hf_initialized", "_is_torch_compile", "extra_repr"}
    | CALLED_BY
)
# What transformers notes about a model, what `generate` alone reads, and the offset of the last call's
# positions, which quire sets before it computes. Private attributes are plans of loading and placing.
# Modules hold the settings of a quantizer that they compute with; the model holds the quantizer itself.
_OF_MODELS = frozenset(
    {"name_or_path", "peft_config", "generation_config", "loss_type", "hf_device_map"}
    | {"all_tied_weights_keys", "warnings_issued", "kernel_config", "rope_deltas"}
    | {"hf_quantizer", "is_quantized", "quantization_method"}
)
# `_model_name_or_path` is the title in a GGUF file.
_NOTES_OF_CONFIG = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "architectures", "_commit_hash"}
    | {"id2label", "label2id", "problem_type", "_post_init_done", "use_cache"}
    | {"_model_name_or_path"}
)
# Notes that a GGUF file leaves in a config. Its weights are unpacked into plain modules, or stay packed in
# modules that hold their types themselves.
_NOTES_OF_GGUF = frozenset({"quantization_config", "_is_quantized"})
_MAX_DEPTH = 8
_GONE = torch.empty(0)
_forward, _values = attrgetter("forward"), methodcaller("values")


class Inventory:
    """A model at a moment: all that decides its K and V, as far as it can be seen.

    facts    settings, by path: classes and their `forward`, numbers, hooks, the config
    added    the same of adapters that take part; the wrapper around a layer, and adapters that take
             no part, leave no trace elsewhere
    names    the adapters that take part
    classes  those of all modules that compute, with their `forward`
    weights  all tensors but those of adapters that take no part; `stamps` are theirs

    Weights are not kept alive after `forget_tensors`, but modules that the model has replaced are, as
    long as the inventory is.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device: str = model.device.type
        self._surroundings = _surroundings(self._device)
        self.facts: dict[str, object] = dict(self._surroundings)
        self.added: dict[str, object] = {}
        self.names: set[str] = set()
        self.classes: set[tuple[type[object], object]] = set()
        self.weights: list[Weight] = []
        self._first: dict[int, str] = {}
        self._modules: list[Any] = []
        self._containers: list[Any] = []
        self._loose: list[torch.Tensor] = []
        self._note(model, ModelSpot(""))
        self._seal()
        stamps = stamps_of([weight.tensor for weight in self.weights])
        self.stamps: list[Stamp] = [
            (*stamp, weight.merged) for stamp, weight in zip(stamps, self.weights, strict=True)
        ]

    def holds(self, *, sampled: bool = True) -> bool:
        """Whether the model is still as it was, found without walking it; values are looked at if `sampled`.

        Compared where they lie: attributes and registers of modules, the containers that they hold, the
        classes' `forward`, the places and a few values of tensors. False may be a false alarm.
        """
        try:
            return (
                list(map(type, self._modules)) == self._kinds
                and not any(self._empty)
                and list(map(len, self._holders)) == self._lengths
                and self._contents == self._copies
                and list(map(_forward, self._classes)) == self._forwards
                and list(chain.from_iterable(self._holders)) == self._names
                and _surroundings(self._device) == self._surroundings
                and self._tensors_hold(sampled=sampled)
            )
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return False  # tensors and arrays that are no longer the same object do not compare

    def is_unwritten(self) -> bool:
        """Whether tensors are at the same addresses and torch has counted no write to them.

        It takes a third of the time of `holds`, and samples nothing.
        """
        try:
            tensors, marks = self._tensors()
            return marks == self._marks and writes_of(tensors) == self._writes
        except (RuntimeError, NotImplementedError):
            return False

    def forget_tensors(self) -> "Inventory":
        """Keep the stamps alone, so that weights which are replaced can be freed."""
        self.weights = [weight._replace(tensor=_GONE) for weight in self.weights]
        return self

    def changes(self, other: "Inventory") -> dict[str, bool]:
        """Return the paths at which two inventories differ; a buffer or an attribute stands for its tensors.

        True marks what a model may note in its own forward: a count, a flag or an offset. Numbers
        with a fraction are none: K and V may depend on them.
        """
        changed: dict[str, bool] = {}
        for path in self.facts.keys() | other.facts.keys():
            both = self.facts.get(path), other.facts.get(path)
            if both[0] != both[1] or (path in self.facts) != (path in other.facts):
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

    def _seal(self) -> None:
        """Note what `holds` compares, after all modules, containers and loose tensors were found."""
        self._kinds: list[Any] = list(map(type, self._modules))
        self._classes: list[Any] = list(dict.fromkeys(self._kinds))
        self._forwards: list[object] = list(map(_forward, self._classes))
        others: list[dict[str, Any]] = []
        holders: list[dict[str, Any]] = []
        for module in self._modules:
            others += (module._modules, module._forward_hooks, module._forward_pre_hooks)
            holders += (module._parameters, module._buffers)
        self._empty = [each for each in others + holders if not each]
        self._contents = [*map(vars, self._modules), *self._containers, *filter(None, others)]
        self._copies: list[Any] = [each.copy() for each in self._contents]
        self._holders = list(filter(None, holders))
        self._lengths = list(map(len, self._holders))
        self._names: list[str] = list(chain.from_iterable(self._holders))
        self._folded = any(map(is_folded, self._held()))
        tensors, self._marks = self._tensors()
        self._samples = samples_of(tensors)
        self._writes, self._forms = writes_of(tensors), forms_of(tensors)
        self._values = values_of(tensors, self._samples)

    def _held(self) -> list[torch.Tensor]:
        held = chain.from_iterable(map(_values, self._holders))
        return [tensor for tensor in held if tensor is not None] + self._loose

    def _tensors(self) -> tuple[list[torch.Tensor], list[Mark]]:
        return unfolded(self._held(), folded=self._folded)

    def _tensors_hold(self, *, sampled: bool) -> bool:
        tensors, marks = self._tensors()
        if marks != self._marks:
            return False
        if writes_of(tensors) != self._writes or forms_of(tensors) != self._forms:
            return False
        return not sampled or values_of(tensors, self._samples) == self._values

    def _note(self, module: torch.nn.Module, spot: ModelSpot) -> None:
        """Note a module of the model, and what is below it."""
        module = self._within(module, spot)
        if is_adapted(type(module)):
            self._note_wrapper(module, spot)
            return
        first = self._first.setdefault(id(module), spot.path)
        if first is not spot.path:
            if first != spot.path:
                self.facts[spot.path] = ("the module at", first)
            return
        self._note_own(module, spot)
        for name, child in _children(module):
            self._note(child, spot.at(f"{spot.path}.{name}"))

    def _within(self, module: Any, spot: ModelSpot) -> Any:
        """Return the module that torch.compile has wrapped, if it has; note what is not its own in how it is called."""
        while is_compiled(module):
            self._modules.append(module)
            self._note_calls(module, spot.at(f"{spot.path}*"))
            module = module._orig_mod
        return module

    def _note_calls(self, module: Any, spot: ModelSpot) -> None:
        """Note the hooks of a module, and what it is called by in place of its class's `forward`."""
        facts, path = self.added if spot.added else self.facts, spot.path
        for name, value in replaced(module):
            known = isinstance(value, (*_FUNCTIONS, functools.partial))
            at = f"{path}.{name}"
            facts[at] = self._frozen(value, spot.at(at)) if known else value
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if hooks := tuple(uncompiled(hook) for hook in hooks if not only_looks(hook)):
            facts[f"{path} hooks"] = hooks

    def _note_wrapper(self, module: torch.nn.Module, spot: ModelSpot) -> None:
        """Note the adapters of a wrapper that take part, and the layer that it is around."""
        use, children = in_use(module), _children(module)
        self._modules += [module, *(child for _, child in children)]
        self._containers += [each for each in vars(module).values() if isinstance(each, list)]
        if use.active or use.merged:
            self.names.update(use.active, use.merged)
            where = f"{spot.path}+"
            while where in self.added:
                where += "+"
            self._note_added(module, ModelSpot(where, added=True, unused=use.unused), frozenset())
            self.added[f"{where}in use"] = (use.active, use.merged, use.undone)
        for name, child in children:
            if name in BASE_CHILDREN:
                self._note(child, spot._replace(merged=(spot.merged or ()) + use.merged))

    def _note_added(self, module: torch.nn.Module, spot: ModelSpot, above: frozenset[int]) -> None:
        """Note a part of a wrapper, and what is below it, but no entry that takes no part."""
        module = self._within(module, spot)
        self._note_own(module, spot)
        below = spot if not above else spot._replace(unused=frozenset())
        for name, child in _children(module):
            if name in spot.unused or name in BASE_CHILDREN or id(child) in above:
                continue
            if not is_adapted(cast("type[object]", type(child))):
                self._note_added(child, below.at(f"{spot.path}.{name}"), above | {id(module)})

    def _note_own(self, module: Any, spot: ModelSpot) -> None:
        """Note the class, the attributes, the hooks and the tensors of a module."""
        facts = self.added if spot.added else self.facts
        kind, path = cast("Any", type(module)), spot.path
        code = kind, uncompiled(kind.forward)
        facts[path] = code
        self.classes.add(code)
        self._modules.append(module)
        is_model = issubclass(kind, PreTrainedModel)
        for name, value in tuple(cast("dict[str, Any]", vars(module)).items()):
            if name in _OF_MODULES or (is_model and (name in _OF_MODELS or name[0] == "_")):
                continue
            if spot.added and name in OWN_STATE:
                continue
            if spot.unused and isinstance(value, dict):
                self._containers.append(value)
                entries = cast("dict[Any, Any]", value).items()
                value = {k: v for k, v in entries if k not in spot.unused}  # noqa: PLW2901
            at = f"{path}.{name}"
            facts[at] = value if type(value) in _ATOMS else self._frozen(value, spot.at(at))
        self._note_calls(module, spot)
        for held, is_buffer in ((module._parameters, False), (module._buffers, True)):
            for name, tensor in held.items():
                if tensor is not None and name not in spot.unused:
                    at = f"{path}.{name}"
                    self._note_tensor(tensor, spot.at(at), at if is_buffer else None)

    def _note_tensor(self, tensor: Any, spot: ModelSpot, owner: str | None) -> None:
        if not is_folded(tensor):
            floats = tensor.is_floating_point()
            self.weights.append(Weight(spot.path, owner, spot.added, floats, spot.merged, tensor))
            return
        fold, path = fold_of(tensor), spot.path
        at = spot._replace(path=f"{path} is", merged=None, is_of_tensor=True)
        about = Held(tensor) if fold.parts is None else self._frozen(fold.about, at, owner or path)
        facts = self.added if spot.added else self.facts
        facts[at.path] = (fold.kind, about)
        self.classes.add((fold.kind, about))
        for name, part in (fold.parts or {}).items():
            self._note_tensor(part, spot.at(f"{path}.{name}" if name else path), owner)

    def _frozen(self, value: Any, spot: ModelSpot, owner: str = "") -> object:
        """Return the value of an attribute as something that compares and stays as it is."""
        owner, value = owner or spot.path, uncompiled(value)
        if type(value) in _ATOMS or isinstance(value, (enum.Enum, type, *_FUNCTIONS)):
            return value
        if isinstance(value, torch.Tensor):
            self._note_tensor(value, spot._replace(merged=None), owner)
            self._loose.append(value)
            return Values(value.is_floating_point())
        if spot.path.count("/") > _MAX_DEPTH:
            return Held(cast("object", value))
        if isinstance(value, (list, dict, set)):
            self._containers.append(value)
        entries: Iterable[tuple[Any, Any]]
        if isinstance(value, (list, tuple, set, frozenset)):
            entries = enumerate(cast("Iterable[Any]", value))
        elif isinstance(value, torch.nn.Module):
            value = self._within(value, spot)
            if not spot.added and id(value) not in self._first:
                self._note(value, ModelSpot(spot.path))
            return Held(value)
        elif isinstance(value, PreTrainedConfig):
            first = self._first.setdefault(id(value), spot.path)
            if first is not spot.path:
                return ("the config at", first)
            self._containers.append(vars(value))
            entries, spot = _settings(value), spot._replace(config=True)
        elif isinstance(value, functools.partial):
            part = cast("functools.partial[Any]", value)
            entries = enumerate((part.func, part.args, part.keywords))
        elif isinstance(value, Mapping):
            entries = cast("Mapping[Any, Any]", value).items()
            entries = sorted(entries, key=_name) if spot.config else entries
        elif hasattr(value, "__dict__") and (
            spot.is_of_tensor or dataclasses.is_dataclass(cast("object", value))
        ):
            self._containers += [vars(value)] if spot.is_of_tensor else []
            own = cast("dict[str, Any]", vars(value))
            entries = [("", cast("object", type(value))), *own.items()]
        else:
            return Held(cast("object", value))
        frozen = [(k, self._frozen(v, spot.at(f"{spot.path}/{k}"), owner)) for k, v in entries]
        if isinstance(value, (set, frozenset)):
            return frozenset(each for _, each in frozen)
        return (
            tuple(each for _, each in frozen) if isinstance(value, (list, tuple)) else tuple(frozen)
        )


def only_looks(hook: object) -> bool:
    """Whether it is a hook by which transformers collects hidden states and attentions."""
    return getattr(hook, "__module__", None) == output_capturing.__name__


def _is_note(fact: object) -> bool:
    return fact is None or type(fact) in (bool, int) or fact == Values(are_floats=False)


def _surroundings(kind: str) -> dict[str, object]:
    """Return the settings outside a model on a kind of device that decide K and V."""
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


def _settings(config: PreTrainedConfig) -> list[tuple[str, object]]:
    """Return the settings of a config that modules may compute with, by name.

    Saving a model writes its dtype as text, and loading one notes its type.
    """
    notes, quantized = _NOTES_OF_CONFIG, getattr(config, "quantization_config", None)
    if quantized is None or getattr(quantized, "quant_method", None) == QuantizationMethod.GGUF:
        notes |= _NOTES_OF_GGUF  # and what is left of them where the quantizer was taken away
    entries: dict[str, object] = {**vars(config), "model_type": config.model_type}
    entries["dtype"] = str(entries.get("dtype")).removeprefix("torch.")
    return sorted(((k, v) for k, v in entries.items() if k not in notes), key=_name)


def _name(entry: tuple[object, object]) -> str:
    return str(entry[0])


def _children(module: Any) -> list[tuple[str, Any]]:
    return [(name, child) for name, child in module._modules.items() if child is not None]

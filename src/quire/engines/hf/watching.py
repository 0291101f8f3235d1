"""A quick look at a model: whether it is still what it was."""

# ruff: noqa: SLF001 - the registers of a module have no other names, and walking them is faster
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Iterable
from typing import Any

import torch

NUM_SAMPLED = 8
"""Values of each tensor that are looked at in every call."""


class Watch:
    """What a look has seen of a model, to be compared with it again without walking it.

    Everything is compared where it lies: the attributes and registers of modules, the containers that they
    hold, the classes' `forward`, the address, version, shape, strides and a few values of each tensor. True
    from `holds` means that none of it differs; False may be a false alarm.

    Weights are not kept alive by it, but modules that the model has replaced stay until the next look.
    """

    def __init__(self, surroundings: Callable[[], dict[str, object]]) -> None:
        self.modules: list[Any] = []
        self.containers: list[Any] = []
        self.loose: list[torch.Tensor] = []
        self._surroundings = surroundings

    def seal(self) -> None:
        """Note the model as it is, after all modules, containers and loose tensors were given."""
        self._before = self._surroundings()
        self._classes: list[Any] = list(map(type, self.modules))
        self._forwards = [(kind, kind.forward) for kind in dict.fromkeys(self._classes)]
        contents = [*map(vars, self.modules), *self.containers]
        self._registers = [
            register
            for module in self.modules
            for register in (module._modules, module._forward_hooks, module._forward_pre_hooks)
        ]
        self._tensors = [
            register
            for module in self.modules
            for register in (module._parameters, module._buffers)
        ]
        contents += [register for register in self._registers if register]
        self._contents = [(each, each.copy()) for each in contents]
        self._lengths = list(map(len, self._registers))
        self._names = _joined(self._tensors)
        tensors = self._all_tensors()
        self._places = list(map(place_of, tensors))
        self._groups = grouped(tensors)
        self._values = samples(tensors, self._groups)

    def holds(self, *, sampled: bool = True) -> bool:
        """Whether the model is still what it was; values are looked at if `sampled`."""
        try:
            return (
                list(map(type, self.modules)) == self._classes
                and list(map(len, self._registers)) == self._lengths
                and all(now == then for now, then in self._contents)
                and all(kind.forward is forward for kind, forward in self._forwards)
                and _joined(self._tensors) == self._names
                and self._surroundings() == self._before
                and self._tensors_hold(sampled=sampled)
            )
        except (RuntimeError, TypeError, ValueError, NotImplementedError):
            return False  # tensors and arrays that are no longer the same object do not compare

    def _tensors_hold(self, *, sampled: bool) -> bool:
        tensors = self._all_tensors()
        if list(map(place_of, tensors)) != self._places:
            return False
        return not sampled or samples(tensors, self._groups) == self._values

    def _all_tensors(self) -> list[torch.Tensor]:
        held = [tensor for each in self._tensors for tensor in each.values() if tensor is not None]
        return held + self.loose


Place = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Address, version (torch counts writes in place in it), shape and strides of a tensor."""

_Group = list[tuple[int, tuple[int], tuple[int]]]


def place_of(tensor: torch.Tensor) -> Place:
    """Return where a tensor's values lie, and how often they were written."""
    version = 0 if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.shape, tensor.stride()


def samples(tensors: list[torch.Tensor], groups: list[_Group]) -> list[bytes]:
    """Return the sampled values of all tensors as bytes, read at once for each group."""
    with torch.inference_mode():
        values = [
            torch.cat([tensors[index].as_strided(size, step) for index, size, step in group])
            for group in groups
        ]
        return [each.view(torch.uint8).cpu().numpy().tobytes() for each in values]


def grouped(tensors: list[torch.Tensor]) -> list[_Group]:
    """Return which values of each tensor are sampled, by dtype and device.

    They are evenly spaced, or on the diagonal of a tensor that is not contiguous.
    """
    groups: dict[tuple[torch.dtype, torch.device], _Group] = {}
    for index, tensor in enumerate(tensors):
        num_values = tensor.numel()
        if not num_values or tensor.is_meta or tensor.layout != torch.strided:
            continue
        num, between = min(num_values, NUM_SAMPLED), NUM_SAMPLED - 1
        step = (num_values - 1) // max(num - 1, 1)
        if not tensor.is_contiguous():
            num = NUM_SAMPLED
            sides = zip(tensor.shape, tensor.stride(), strict=True)
            step = sum((size - 1) // between * stride for size, stride in sides)
        group = groups.setdefault((tensor.dtype, tensor.device), [])
        group.append((index, (num,), (step,)))
    return list(groups.values())


def stamps_of(tensors: list[torch.Tensor]) -> list[tuple[Place, bytes]]:
    """Return, for each tensor, its place and its sampled values."""
    sampled, groups = [b""] * len(tensors), grouped(tensors)
    for group, data in zip(groups, samples(tensors, groups), strict=True):
        start = 0
        for index, (num,), _ in group:
            stop = start + num * tensors[index].itemsize
            sampled[index], start = data[start:stop], stop
    return [(place_of(tensor), sample) for tensor, sample in zip(tensors, sampled, strict=True)]


def _joined(registers: Iterable[Iterable[str]]) -> list[str]:
    return [name for register in registers for name in register]

"""Entries of an inventory: tensors where they are held, and objects that compare by what they are."""

from typing import NamedTuple

import torch


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
    """The place of a tensor among settings."""

    are_floats: bool


class ModelSpot(NamedTuple):
    """A place in a model, by its path, and what adapters have to do with it.

    merged  adapters merged into the weights there; None where PEFT has not wrapped the layer
    added   whether it belongs to an adapter
    unused  names of adapters whose entries there take no part
    config  whether it is in a config, whose entries mean the same in any order
    is_of_tensor  whether a folded tensor holds it: then objects of any kind are looked into
    """

    path: str
    merged: tuple[str, ...] | None = None
    added: bool = False
    unused: frozenset[str] = frozenset()
    config: bool = False
    is_of_tensor: bool = False

    def at(self, path: str) -> "ModelSpot":
        return ModelSpot(path, *self[1:])

"""Layer groups: layers whose blocks are allocated, found and evicted together."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

import msgspec

from quire.errors import ConfigError


class FullAttention(msgspec.Struct, frozen=True):
    """Every token attends to all before it: a hit needs every block of its length."""


class LayerGroup(msgspec.Struct, frozen=True):
    """A named group of layers with a block pool and block tables of its own.

    `kind` says how its layers look back, and so which cached lengths the group accepts; a hit
    is the largest length that all groups accept.
    """

    name: str
    num_blocks: int
    kind: FullAttention = FullAttention()


def check_groups(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Return the groups as a tuple; raise `ConfigError` if one cannot work."""
    if not groups:
        raise ConfigError("groups is empty; a cache needs at least one layer group")
    for group in groups:
        if not isinstance(group, LayerGroup) or not isinstance(group.kind, FullAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"groups are LayerGroup objects of kind FullAttention, got {group!r}")
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ConfigError(f"layer groups must have distinct names, got {names}")
    for group in groups:
        check_count("num_blocks", group.num_blocks)
    return tuple(groups)


def check_count(name: str, value: object, *, limit: int = 2**31 - 1) -> int:
    """Return a positive integer setting; raise `ConfigError` if it is none."""
    if type(value) is not int:
        value = _as_int(name, value)
    if not 1 <= value <= limit:
        raise ConfigError(f"{name} must be from 1 to {limit}, got {value}")
    return value


def _as_int(name: str, value: object) -> int:
    """Return an integer of another type (NumPy's, say) as an int."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    return index(value)

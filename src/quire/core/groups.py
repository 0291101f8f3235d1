"""Layer groups: layers whose blocks are allocated, found and evicted together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from quire.errors import ConfigError


class GroupKind(Protocol):
    """How the layers of a group look back, and so which cached lengths they accept."""

    @property
    def name(self) -> str: ...

    def accepts(self, present: Sequence[bool], num_blocks: int) -> int:
        """Return the largest hit, at most `num_blocks` long, that this group can serve.

        `present[i]` says whether block i of the matched path is resident in this group.
        """
        ...


class FullAttention(msgspec.Struct, frozen=True):
    """Every token attends to all before it: a hit needs every block."""

    @property
    def name(self) -> str:
        return "full"

    def accepts(self, present: Sequence[bool], num_blocks: int) -> int:
        for index in range(num_blocks):
            if not present[index]:
                return index
        return num_blocks


class LayerGroup(msgspec.Struct, frozen=True):
    """A named group of layers with a block pool of its own."""

    name: str
    num_blocks: int
    kind: FullAttention = FullAttention()


def check_groups(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Return the groups as a tuple; raise `ConfigError` if one cannot work."""
    if not groups:
        raise ConfigError("groups is empty; a cache needs at least one layer group")
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ConfigError(f"layer groups must have distinct names, got {names}")
    for group in groups:
        check_count("num_blocks", group.num_blocks)
    return tuple(groups)


def check_count(name: str, value: object, *, limit: int = 2**31 - 1) -> int:
    """Return a positive integer setting; raise `ConfigError` if it is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {value!r}")
    if not 1 <= value <= limit:
        raise ConfigError(f"{name} must be from 1 to {limit}, got {value}")
    return value

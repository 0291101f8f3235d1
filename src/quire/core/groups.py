"""Layer groups: layers whose blocks are allocated, found and evicted together."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex

import msgspec

from quire.core.sparse import Site, SparseGroup
from quire.errors import ConfigError

MAX_COUNT = 2**31 - 1


class Kind(msgspec.Struct, frozen=True):
    """How the layers of a group look back: what a hit needs of the blocks before it.

    `FullAttention` needs all; `quire.groups` has kinds that need little of a long prefix.
    """

    def check(self, name: str) -> None:
        """Raise `ConfigError` if its numbers cannot work; `name` is that of the group."""

    def group(self, site: Site) -> SparseGroup | None:
        """Return what decides which blocks of a prefix stay; None where all live as long as the prefix."""
        raise NotImplementedError

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Return the blocks that a cached sequence keeps, by which memory is divided among groups."""
        raise NotImplementedError


class FullAttention(Kind, frozen=True):
    """Every token attends to all before it: a hit needs every block of its length."""

    def group(self, site: Site) -> None:
        del site

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        return -(-num_tokens // block_size)


class LayerGroup(msgspec.Struct, frozen=True):
    """A named group of layers with a block pool and block tables of its own.

    `kind` says how its layers look back, and so which cached lengths the group accepts; a hit
    is the largest length that all groups accept.
    """

    name: str
    num_blocks: int
    kind: Kind = FullAttention()


def check_groups(groups: Sequence[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Return the groups as a tuple; raise `ConfigError` if one cannot work."""
    if not groups:
        raise ConfigError("groups is empty; a cache needs at least one layer group")
    for group in groups:
        if not isinstance(group, LayerGroup) or not isinstance(group.kind, Kind):  # pyright: ignore[reportUnnecessaryIsInstance]
            msg = "groups are LayerGroup objects whose kind is a Kind, FullAttention() for instance"
            raise ConfigError(f"{msg}; got {group!r}")
    names = [group.name for group in groups]
    for name in names:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"the name of a layer group is a text, got {name!r}")
    if len(set(names)) != len(names):
        raise ConfigError(f"layer groups must have distinct names, got {names}")
    for group in groups:
        check_count("num_blocks", group.num_blocks)
        group.kind.check(group.name)
    return tuple(groups)


def check_count(name: str, value: object, *, limit: int = MAX_COUNT) -> int:
    """Return a positive integer setting; raise `ConfigError` if it is none."""
    if type(value) is not int:
        value = as_int(name, value)
    if not 1 <= value <= limit:
        raise ConfigError(f"{name} must be from 1 to {limit}, got {value}")
    return value


def check_group(group: int, num_groups: int) -> None:
    """Raise `ConfigError` unless a layer group of this index exists."""
    if type(group) is not int or not 0 <= group < num_groups:
        raise ConfigError(f"layer group {group} does not exist; there are 0 to {num_groups - 1}")


def check_tokens(group: str, name: str, value: object) -> None:
    """Raise `ConfigError` unless a number of tokens in a group's kind is one."""
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        msg = f"{name} of group {group!r} must be an integer from 1 to {MAX_COUNT} tokens"
        raise ConfigError(f"{msg}, got {value!r}")


def as_int(name: str, value: object) -> int:
    """Return an integer of another type (NumPy's, say) as an int."""
    try:
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            return index(value)
    except TypeError:  # an array of several, say
        pass
    raise ConfigError(f"{name} must be an integer, got {value!r}")

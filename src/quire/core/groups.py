"""Layer groups: layers whose blocks are allocated, found and evicted together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.config import check_count
from quire.core.sparse import Site, SparseGroup
from quire.errors import ConfigError


class Kind(msgspec.Struct, frozen=True):
    """The attention of a layer group: the blocks of a prefix that a hit needs.

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


def check_groups(groups: Sequence[LayerGroup]) -> None:
    """Raise `ConfigError` unless these groups can work together."""
    if not groups:
        raise ConfigError("groups is empty; a cache needs at least one layer group")
    for group in groups:
        known = isinstance(group, LayerGroup) and isinstance(group.kind, Kind)  # pyright: ignore[reportUnnecessaryIsInstance]
        if not known or type(group.kind) is Kind:
            msg = "groups are LayerGroup objects of some Kind, FullAttention() for instance"
            raise ConfigError(f"{msg}; got {group!r}")
        if not isinstance(group.name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"the name of a layer group is a text, got {group.name!r}")
        check_count("num_blocks", group.num_blocks)
        group.kind.check(group.name)
    names = [group.name for group in groups]
    if len(set(names)) != len(names):
        raise ConfigError(f"layer groups must have distinct names, got {names}")


def check_group(group: int, num_groups: int) -> None:
    """Raise `ConfigError` unless a layer group of this index exists."""
    if type(group) is not int or not 0 <= group < num_groups:
        raise ConfigError(f"layer group {group} does not exist; there are 0 to {num_groups - 1}")

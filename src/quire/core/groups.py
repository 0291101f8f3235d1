"""Layer groups: layers whose blocks are allocated, found and evicted together."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import SupportsIndex, TypeAlias

import msgspec

from quire.errors import ConfigError

MAX_COUNT = 2**31 - 1


class FullAttention(msgspec.Struct, frozen=True):
    """Every token attends to all before it: a hit needs every block of its length."""


class SlidingWindow(msgspec.Struct, frozen=True):
    """A token attends to the last `window` tokens, itself included, and to the first `sinks`.

    A hit of n tokens needs the blocks that cover [n - window, n) and [0, sinks). Under
    pressure, windows at every multiple of `interval` tokens (None: 4 * window) are kept
    longer than what lies between, so that a shorter prompt still finds one of them.
    """

    window: int
    sinks: int = 0
    interval: int | None = None


class ChunkedAttention(msgspec.Struct, frozen=True):
    """A token attends to its own chunk of `chunk` tokens alone, as in Llama 4.

    A hit of n tokens needs the blocks that cover [n // chunk * chunk, n): nothing at the
    border of a chunk.
    """

    chunk: int


class Recurrent(msgspec.Struct, frozen=True):
    """A state that is updated token by token: linear attention, Mamba, a convolution.

    A hit of n tokens needs a snapshot of the state after exactly n. A block of this group is
    one state; a sequence works on one of its own. Snapshots are kept at every multiple of
    `interval` tokens (None: no regular ones), at branch points, at the end of prompts, and
    wherever `CacheManager.checkpoint` is called.
    """

    interval: int | None = None


Kind: TypeAlias = FullAttention | SlidingWindow | ChunkedAttention | Recurrent


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
            msg = (
                "groups are LayerGroup objects of kind FullAttention, SlidingWindow, "
                f"ChunkedAttention or Recurrent, got {group!r}"
            )
            raise ConfigError(msg)
    names = [group.name for group in groups]
    for name in names:
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"the name of a layer group is a text, got {name!r}")
    if len(set(names)) != len(names):
        raise ConfigError(f"layer groups must have distinct names, got {names}")
    for group in groups:
        check_count("num_blocks", group.num_blocks)
        _check_kind(group)
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


def _check_kind(group: LayerGroup) -> None:
    kind = group.kind
    match kind:
        case SlidingWindow():
            _check_tokens(group, "window", kind.window)
            if type(kind.sinks) is not int or not 0 <= kind.sinks <= kind.window:
                msg = (
                    f"sinks of group {group.name!r} must be from 0 to its window of {kind.window} "
                    f"tokens, got {kind.sinks!r}"
                )
                raise ConfigError(msg)
        case ChunkedAttention():
            _check_tokens(group, "chunk", kind.chunk)
        case _:
            pass
    interval = getattr(kind, "interval", None)
    if interval is not None:
        _check_tokens(group, "interval", interval)


def _check_tokens(group: LayerGroup, name: str, value: object) -> None:
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        msg = f"{name} of group {group.name!r} must be an integer from 1 to {MAX_COUNT} tokens"
        raise ConfigError(f"{msg}, got {value!r}")


def as_int(name: str, value: object) -> int:
    """Return an integer of another type (NumPy's, say) as an int."""
    try:
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            return index(value)
    except TypeError:  # an array of several, say
        pass
    raise ConfigError(f"{name} must be an integer, got {value!r}")

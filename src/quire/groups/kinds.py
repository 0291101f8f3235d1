"""The kinds of layer groups that need little of a long prefix."""

from __future__ import annotations

from math import lcm
from typing import ClassVar

from quire.config import MAX_COUNT
from quire.core.groups import Kind
from quire.core.sparse import Site
from quire.errors import ConfigError
from quire.groups.states import SnapshotGroup
from quire.groups.windows import WindowKind

INTERVAL_WINDOWS = 4
"""Without an interval of its own, a window is kept at every multiple of so many windows."""

STATES_PER_SEQUENCE = 3
"""The state a sequence works on, and snapshots at the ends of its prompt and of its answer."""


class SlidingWindow(WindowKind, frozen=True):
    """A token attends to the last `window` tokens, itself included, and to the first `sinks`.

    A hit of n tokens needs the blocks that cover [n - window, n) and [0, sinks). Under
    pressure, windows at every multiple of `interval` tokens (None: 4 * window) are kept
    longer than what lies between, so that a shorter prompt still finds one of them.
    """

    window: int
    sinks: int = 0
    interval: int | None = None

    is_sliding: ClassVar[bool] = True

    @property
    def span(self) -> int:
        return self.window

    @property
    def head(self) -> int:
        return self.sinks

    @property
    def keep_every(self) -> int:
        return self.interval or INTERVAL_WINDOWS * self.window

    def first_block(self, num_tokens: int, block_size: int) -> int:
        before = num_tokens - self.window
        return before // block_size if before > 0 else 0

    def check(self, name: str) -> None:
        _check_tokens(name, "window", self.window)
        if type(self.sinks) is not int or not 0 <= self.sinks <= self.window:
            msg = f"sinks of group {name!r} must be from 0 to its window of {self.window} tokens"
            raise ConfigError(f"{msg}, got {self.sinks!r}")
        if self.interval is not None:
            _check_tokens(name, "interval", self.interval)


class ChunkedAttention(WindowKind, frozen=True):
    """A token attends to its own chunk of `chunk` tokens alone, as in Llama 4.

    A hit of n tokens needs the blocks that cover [n // chunk * chunk, n): nothing at the
    border of a chunk.
    """

    chunk: int

    @property
    def span(self) -> int:
        return self.chunk

    def first_block(self, num_tokens: int, block_size: int) -> int:
        return num_tokens // self.chunk * self.chunk // block_size

    def border(self, end: int, block_size: int) -> int:
        period = lcm(self.chunk, block_size) // block_size
        return end // period * period

    def check(self, name: str) -> None:
        _check_tokens(name, "chunk", self.chunk)


class Recurrent(Kind, frozen=True):
    """A state that is updated token by token: linear attention, Mamba, a convolution.

    A hit of n tokens needs a snapshot of the state after exactly n. A block of this group is
    one state; a sequence works on one of its own. Snapshots are kept at every multiple of
    `interval` tokens (None: no regular ones), at branch points, at the end of prompts, and
    wherever `checkpoint` is called.
    """

    interval: int | None = None

    def group(self, site: Site) -> SnapshotGroup:
        return SnapshotGroup(site, self.interval)

    def blocks_for(self, num_tokens: int, block_size: int) -> int:
        """Return the state that it works on, two snapshots, and one at each multiple of the interval."""
        del block_size
        return STATES_PER_SEQUENCE + (num_tokens // self.interval if self.interval else 0)

    def check(self, name: str) -> None:
        if self.interval is not None:
            _check_tokens(name, "interval", self.interval)


def _check_tokens(group: str, name: str, value: object) -> None:
    """Raise `ConfigError` unless a number of tokens in a group's kind is one."""
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        msg = f"{name} of group {group!r} must be an integer from 1 to {MAX_COUNT} tokens"
        raise ConfigError(f"{msg}, got {value!r}")

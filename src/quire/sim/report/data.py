"""The content of a report as plain values: nothing here knows how it looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np

from quire.sim.curves import Curves
from quire.sim.observers import SharedPrefix

Row: TypeAlias = Mapping[str, Any]
"""A row of a replay, see `ReplayResult.row`, with `share` and `optimum_token_hit`."""


class Focus(msgspec.Struct, frozen=True):
    """A closer look at one capacity, and there at one policy.

    `over_time`    token hit by policy, in stretches of time: (start_s, stop_s, 0 to 1 or None)
    `prefixes`     what was found most, by tokens; `hit_tokens` is all that was found
    `reuse_times`  uses by the time since the last one: bins that double, from below one second;
                   `new_blocks` counts first uses
    """

    capacity_blocks: int
    policy: str
    over_time: dict[str, list[tuple[float, float, float | None]]]
    prefixes: list[SharedPrefix]
    hit_tokens: int
    reuse_times: list[int]
    new_blocks: int


class Report(msgspec.Struct, frozen=True):
    """A report. `facts` are those of `quire replay --json`; commands compute figures again."""

    facts: dict[str, Any]
    rows: list[dict[str, Any]]
    curves: Curves
    focus: Focus
    command: str
    focus_command: str

    @property
    def policies(self) -> list[str]:
        """The policies of the rows, in the order of their first row."""
        return list(dict.fromkeys(row["policy"] for row in self.rows))

    @property
    def capacities(self) -> list[int]:
        """The capacities of the rows, rising."""
        return sorted({row["capacity_blocks"] for row in self.rows})

    @property
    def focus_rows(self) -> list[dict[str, Any]]:
        """The rows of the capacity that is looked at closer."""
        return [row for row in self.rows if row["capacity_blocks"] == self.focus.capacity_blocks]

    def reuse_distances(self) -> tuple[list[int], list[float]]:
        """Return capacities that double, and the share of all tokens that each is the first to find.

        The distance of a reuse is the number of different blocks used since, itself included:
        the smallest LRU cache that finds it.
        """
        lru = self.curves.lru
        doublings = max(int(lru.capacities[-1]) - 1, 1).bit_length()
        sizes = [1 << power for power in range(doublings + 1)]
        found = np.array([0.0, *(lru.at(size) for size in sizes)])
        return sizes, np.diff(found).tolist()


def focus_capacity(capacities: Sequence[int], num_unique: int) -> int:
    """Return the capacity that is nearest to a tenth of the different blocks."""
    return min(capacities, key=lambda blocks: abs(blocks - num_unique / 10))

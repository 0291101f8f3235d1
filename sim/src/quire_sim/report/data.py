"""The content of a report as plain values: nothing here knows how it looks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from quire_sim.curves import Curves
from quire_sim.optimum import BOUNDS
from quire_sim.replay import ReplayResult
from quire_sim.reuse import Reuses


class Report(msgspec.Struct, frozen=True):
    """A report. `facts` are those of `quire replay --json`; commands compute figures again.

    `rows`    see `ReplayResult.row`, with `share`, `optimum_token_hit`, `reachable_token_hit` and `gap_closed`
    `reuses`  what the curves are made of
    `closer`  of each policy at one capacity, measured by `HitsOverTime` and `SharedPrefixes`
    """

    facts: dict[str, Any]
    rows: list[dict[str, Any]]
    curves: Curves
    reuses: Reuses
    closer: list[ReplayResult]
    command: str
    focus_command: str

    @property
    def focus(self) -> ReplayResult:
        """The first policy that is looked at closer, a bound only where there is no other."""
        return next((each for each in self.closer if each.policy not in BOUNDS), self.closer[0])

    @property
    def policies(self) -> list[str]:
        """The policies of the rows, in the order of their first row."""
        return list(dict.fromkeys(row["policy"] for row in self.rows))

    @property
    def capacities(self) -> list[int]:
        """The capacities of the rows, rising."""
        return sorted({row["capacity_blocks"] for row in self.rows})

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

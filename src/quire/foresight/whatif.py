"""The hit-rate curve of the requests a manager has served, for every capacity."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import numpy as np

from quire.errors import ConfigError

Blocks: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
"""Capacities in blocks, float64 [points]; whole numbers are not needed between two corners."""

Ratios: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
"""Ratios between 0 and 1, float64 [points]."""


SHOWN_ERROR = 0.005
"""Distance from the measured hit rate from which a curve says so."""


ELSEWHERE = 0.0064
"""Additional error of the curve at other capacities than the present one."""


class WhatIf(msgspec.Struct, frozen=True, eq=False):
    """The share of prompt tokens that an LRU cache of any capacity would have found.

    Of the latest requests; see `curve.LiveCurve`.

    `capacity_blocks`   blocks of the smallest full-attention pool at present
    `capacities`        rising, from 0, float64 [points]
    `token_hit`         at each of them, float64 [points]; straight lines between
    `num_requests`      opened since the manager was made or the curve begun anew
    `noted_requests`    of these, the latest ones, which the curve is made of
    `measured`          the cache's own hit rate over all of these requests; None where it is not known
    `num_filling`       of the noted ones, those whose prompts took the whole pool: longer ones are refused, or were cut by
                        whoever asked, and what a larger pool would have found of them is not in the curve
    """

    capacity_blocks: int
    capacities: Blocks
    token_hit: Ratios
    num_requests: int
    noted_requests: int
    measured: float | None = None
    num_filling: int = 0

    @property
    def hit_rate(self) -> float:
        """The curve at the present capacity."""
        return self.at(self.capacity_blocks)

    @property
    def error(self) -> float | None:
        """Absolute difference of curve and measured hit rate at the present capacity.

        With policy LRU it is the error of the curve. With another policy the gain or loss of that policy adds to it.
        `error_at` gives the error at other capacities. None if nothing was measured.
        """
        return None if self.measured is None else abs(self.hit_rate - self.measured)

    def error_at(self, capacity_blocks: float) -> float | None:
        """Return how far the curve may be off at a capacity; None where that is not known.

        It is not known without `error`, and above the present capacity where prompts took the whole pool.
        """
        error = self.error
        if error is None or capacity_blocks == self.capacity_blocks:
            return error
        is_seen = capacity_blocks < self.capacity_blocks or not self.num_filling
        return error + ELSEWHERE if is_seen else None

    @property
    def ceiling(self) -> float:
        """The hit rate without a limit of memory."""
        return float(self.token_hit[-1])

    def at(self, capacity_blocks: float) -> float:
        """Return the share of prompt tokens that a cache of `capacity_blocks` blocks would have found.

        Raises `ConfigError` for a negative capacity.
        """
        if not capacity_blocks >= 0:
            raise ConfigError(f"a capacity is at least 0 blocks, got {capacity_blocks!r}")
        return float(np.interp(capacity_blocks, self.capacities, self.token_hit))

    def __str__(self) -> str:
        if not self.num_requests:
            return "no request yet, so nothing is known of other capacities"
        now, more, less = (self.at(self.capacity_blocks * by) for by in (1, 2, 0.5))
        change = f"would raise the hit rate from {100 * now:.0f} to {100 * more:.0f} %"
        if f"{now:.0%}" == f"{more:.0%}":
            change = f"would not raise the hit rate of {100 * now:.0f} %"
        doubt = ""
        if self.error is not None and self.error >= SHOWN_ERROR:
            doubt = f"; the cache itself found {100 * (self.measured or 0.0):.1f} %"
        if self.num_filling:
            doubt += f", {self.num_filling:,} of which took the whole pool: of longer ones more memory may find more"
        return (
            f"twice the memory {change}, half of it gives {100 * less:.0f} %; no capacity finds more "
            f"than {100 * self.ceiling:.0f} % (LRU, the latest {self.noted_requests:,} requests{doubt})"
        )

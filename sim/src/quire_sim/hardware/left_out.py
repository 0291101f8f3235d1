"""Errors of simulated times on recorded runs whose figures had no part in the constants: `left_out.json`.

Each run was left out once, the constants were fitted to the others, and the run was simulated with them
(`benchmarks/leave_one_out.py`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

FIGURES = ("ttft_mean", "ttft_p99", "tpot_mean", "makespan")


class LeftOutRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that was left out, and its errors: signed shares of the measured figures."""

    run: str
    device: str
    experts: bool
    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    makespan: float


class FigureErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The largest error of each figure over the runs left out that are most like a model on a device.

    `runs`   how many they are
    `basis`  what they are, and what no run was like
    """

    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    makespan: float
    runs: int
    basis: str

    @property
    def largest(self) -> float:
        """The error of the figure that is worst."""
        return max(getattr(self, name) for name in FIGURES)


def errors_like(device: str, *, experts: bool) -> FigureErrors:
    """Return the errors on runs of a device and kind of model, or of the kind, or of all."""
    runs = left_out_runs()
    kind = "models with routed experts" if experts else "dense models"
    same_kind = [run for run in runs if run.experts is experts]
    chosen = [run for run in same_kind if run.device == device]
    basis = f"{kind} on {device}"
    if not chosen:
        chosen, basis = same_kind or list(runs), f"{kind}, none of them on {device}"
        if not same_kind:
            basis = f"other kinds, none of {kind}"
    largest = {name: max(abs(getattr(run, name)) for run in chosen) for name in FIGURES}
    return FigureErrors(runs=len(chosen), basis=basis, **largest)


@cache
def left_out_runs() -> tuple[LeftOutRun, ...]:
    """Return the runs in the file."""
    path = Path(__file__).with_name("left_out.json")
    return msgspec.json.decode(path.read_bytes(), type=tuple[LeftOutRun, ...])

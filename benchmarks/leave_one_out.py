"""Errors of simulated times on recorded runs that were left out when the constants were fitted.

    python benchmarks/leave_one_out.py RUN...

`BEFORE` has constants as data sheets and measured layer kernels give them, before any run is seen. They are fitted to
all runs but one, with a penalty on leaving those values, and the run left out is predicted. The last line
is the fit on all runs. `quire_sim/hardware/left_out.json` has the result.
"""

from __future__ import annotations

import sys
from math import exp, log
from pathlib import Path

import msgspec

from quire_sim.hardware import collectives, engine_times
from quire_sim.serving.recorded import Figures, RecordedRun

BEFORE = {
    "MATRIX_SHARE": (engine_times, 0.75),
    "CACHE_SHARE": (engine_times, 0.85),
    "JOINT_SHARE": (engine_times, 1.5),
    "STEP_S": (engine_times, 0.2e-3),
    "HOST_SHARE": (collectives, 0.3),
    "HOST_HOP_S": (collectives, 10e-6),
}
PENALTY = 0.01
"""Squared error of a figure that a constant e times its value is worth."""


def main(paths: list[str]) -> None:
    runs = {Path(path).name: RecordedRun(path) for path in paths}
    for left_out in [*runs, None]:
        others = [run for name, run in runs.items() if name != left_out]
        fitted = fit(others)
        said = ", ".join(f"{name} {value:.3g}" for name, value in fitted.items())
        print(f"{left_out or 'all runs'}: {said}")
        for name, run in runs.items():
            if left_out in {None, name}:
                print(
                    f"    {name}: {msgspec.json.encode(errors(run, fitted)).decode()}", flush=True
                )


def fit(runs: list[RecordedRun]) -> dict[str, float]:
    """Return the constants at which the runs are met best, by steps along one constant at a time."""
    best = {name: value for name, (_, value) in BEFORE.items()}
    least, step = loss(runs, best), 0.1
    while step > 0.02:
        moved = False
        for name in BEFORE:
            for factor in (exp(step), exp(-step)):
                tried = best | {name: best[name] * factor}
                found = loss(runs, tried)
                if found < least:
                    best, least, moved = tried, found, True
        step = step if moved else step / 2
    return best


def loss(runs: list[RecordedRun], constants: dict[str, float]) -> float:
    """Return the squared errors of all figures, and the penalty."""
    squares = [
        log(1 + each) ** 2
        for run in runs
        for each in msgspec.structs.astuple(errors(run, constants))
    ]
    away = [log(constants[name] / value) ** 2 for name, (_, value) in BEFORE.items()]
    return sum(squares) + PENALTY * sum(away)


def errors(run: RecordedRun, constants: dict[str, float]) -> Figures:
    """Return the errors of a run with these constants."""
    for name, value in constants.items():
        setattr(BEFORE[name][0], name, value)
    return run.compare().errors


if __name__ == "__main__":
    main(sys.argv[1:])

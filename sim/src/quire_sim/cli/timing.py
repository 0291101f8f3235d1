"""Where the durations of a simulation come from: data sheets, a share of the peak, or measurements."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire_sim.hardware import ModelTimes


def timing_of(
    base: "ModelTimes", mfu: float | None = None, measured: str | None = None
) -> "ModelTimes":
    """Return the times of a model: `base`, or by `--mfu`, or by `--measured`. Raises `ConfigError`."""
    from quire_sim.hardware import Roofline, calibrate
    from quire_sim.hardware.calibration import parse_points
    from quire_sim.hardware.profiles import MeasuredTimes, read_calibration

    if mfu is not None and not 0 < mfu <= 1:
        raise ConfigError(f"--mfu {mfu:g} is no share of the peak; it is above 0, at most 1")
    if measured is None:
        if mfu is None:
            return base
        return Roofline(base.model, base.accelerator, base.num_gpus, mfu=mfu)
    if mfu is not None:
        raise ConfigError("--mfu and --measured both say how long steps take; leave one out")
    path = Path(measured).expanduser()
    if path.is_file():
        calibration = read_calibration(path)
        devices = base.model, base.accelerator, base.num_gpus
        return MeasuredTimes(*devices, calibration=calibration)
    if "=" not in measured:
        raise ConfigError(
            f"--measured {measured!r} is no file, and no steps like 512=40ms,4096=0.4s,1+2048=9ms; name "
            "a profile, or what quire calibrate made of one"
        )
    roofline = Roofline(base.model, base.accelerator, base.num_gpus)
    return calibrate(roofline, parse_points(measured))


def off_by(timing: "ModelTimes") -> dict[str, Any] | None:
    """Return the known errors by figure, on recorded runs left out; else that of a step, or None."""
    errors = timing.figure_errors()
    if errors is not None:
        return msgspec.to_builtins(errors)
    error = timing.known_error()
    return None if error is None else {"step": error}


def basis_of(errors: dict[str, Any] | None) -> str:
    """Return the runs or steps that errors were found on, for people."""
    if errors is None:
        return "the error is unknown"
    if "step" in errors:
        return f"a step is off by {within(errors['step'])}"
    runs = errors["runs"]
    return f"errors of {runs} recorded run{'s' * (runs > 1)} left out: {errors['basis']}"


def within(error: float | None) -> str:
    """Return an error for people."""
    return "unknown" if error is None else f"{error:.0%}"

"""Rates from measurements: the real throughput of a machine.

Each measured step gives one equation, and all are solved together, by least squares on relative
errors, with rates and costs that are not negative. A step of one new token (decode) is taken for
reading: seconds = bytes / rate + costs; all others for computing: seconds = FLOPs / rate + costs. Where
that explains the measurements worse than decode steps that compute as well, as on a slow CPU, the
latter holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from quire.errors import ConfigError
from quire_sim.hardware.fitting import SAME, Floats, least_squares
from quire_sim.hardware.roofline import Roofline
from quire_sim.hardware.tiers import parse_seconds

Point = tuple[int, int, float]
_POINT = re.compile(r"(?P<new>\d{1,12})(?:\+(?P<cached>\d{1,12}))?=(?P<time>\S+)")

_PRODUCTS, _PAIRS, _BYTES, _CACHED, _OVERHEAD = range(5)


def calibrate(roofline: Roofline, points: Iterable[Point]) -> Roofline:
    """Return a roofline with the rates and overhead that explain measured steps best.

    `points`: (new tokens, cached tokens, seconds), two or more prefills of different size.
    Fits the FLOPs rate and `overhead_s` by least squares on relative errors; from three
    prefills on a rate of attention, from points with cached tokens `cached_token_s`, and from
    steps of one new token (decode) at two or more contexts the bandwidth. Raises `ConfigError`.
    """
    measured = [_checked(point) for point in points]
    prefills = list(dict.fromkeys((new, cached) for new, cached, _ in measured if new > 1))
    decodes = list(dict.fromkeys(cached for new, cached, _ in measured if new == 1))
    if len(prefills) < 2:
        raise ConfigError(
            f"{len(prefills)} different prefills were measured; two or more (more than one new "
            "token, of different sizes) tell the rate from the overhead"
        )
    unknown = [_PRODUCTS, _OVERHEAD]
    if len(dict.fromkeys(cached for _, cached, _ in measured)) > 1:
        unknown.append(_CACHED)
    if len(prefills) > 2:
        unknown.append(_PAIRS)
    seconds = np.array([point[2] for point in measured])
    computing = _fit(_work(roofline, measured, _computes), seconds, unknown)
    rates, computed = computing[0], [point for point in measured if point[0] > 1]
    if len(decodes) > 1:
        reading = _fit(_work(roofline, measured, _reads), seconds, [*unknown, _BYTES])
        if reading[0][_BYTES] > 0 and reading[1] <= computing[1] + SAME:
            rates = reading[0]
        else:
            computed = measured
    if not rates[_PRODUCTS] > 0:
        raise ConfigError(
            "the measured seconds do not grow with the work, so there is no rate to find; measure "
            "larger prompts, or repeat the measurement on an idle machine"
        )
    peak = roofline.accelerator.peak_flops * roofline.num_gpus
    mfu = 1 / (float(rates[_PRODUCTS]) * peak)
    fitted = msgspec.structs.replace(
        roofline,
        mfu=mfu,
        attention_mfu=1 / (float(rates[_PAIRS]) * peak) if rates[_PAIRS] > 0 else mfu,
        overhead_s=float(rates[_OVERHEAD]),
        cached_token_s=float(rates[_CACHED]),
    )
    bandwidth = roofline.accelerator.bandwidth * roofline.num_gpus
    if rates[_BYTES] > 0:
        efficiency = 1 / (float(rates[_BYTES]) * bandwidth)
    else:
        # What was taken for computing was not waiting for memory, so that is at least this fast.
        efficiency = roofline.bandwidth_efficiency
        for new, cached, _ in computed:
            seconds_busy = fitted.compute_s([(new, cached)])
            efficiency = max(
                efficiency, roofline.step_bytes([(new, cached)]) / (bandwidth * seconds_busy)
            )
    fitted = msgspec.structs.replace(fitted, bandwidth_efficiency=efficiency)
    worst = max(abs(fitted.prefill_s(new, cached) / taken - 1) for new, cached, taken in measured)
    return msgspec.structs.replace(fitted, error=worst)


def parse_points(text: str) -> list[Point]:
    """Read measured steps: `512=40ms,4096=0.4s`, after cached tokens `1+2048=9ms`.

    Raises `ConfigError`.
    """
    points: list[Point] = []
    for each in text.split(","):
        match = _POINT.fullmatch(each.strip())
        if match is None:
            raise ConfigError(
                f"{each!r} is no measured step; write new=time or new+cached=time, for example "
                "512=40ms,4096=0.4s,1+2048=9ms"
            )
        cached = int(match["cached"] or 0)
        points.append((int(match["new"]), cached, parse_seconds(match["time"], text)))
    return points


def _checked(point: Point) -> Point:
    new, cached, seconds = point
    if new < 1 or cached < 0 or not 0 < seconds < float("inf"):
        raise ConfigError(
            f"a measured step is (new tokens, cached tokens, seconds), got {point}; at least one new "
            "token, none or more cached, and seconds above 0"
        )
    return point


def _computes(_new: int) -> bool:
    return True


def _reads(new: int) -> bool:
    """Whether a step computes; a decode step reads."""
    return new > 1


def _work(roofline: Roofline, points: Sequence[Point], computes: Callable[[int], bool]) -> Floats:
    """Return the work of each step, float [points, 5], less the time of its collectives."""
    rows = np.zeros((len(points), 5))
    for row, (new, cached, _) in zip(rows, points, strict=True):
        if computes(new):
            row[_PRODUCTS] = roofline.product_flops(new)
            row[_PAIRS] = roofline.attention_flops(new, cached)
        else:
            row[_BYTES] = roofline.step_bytes([(new, cached)])
        row[_CACHED] = cached
        row[_OVERHEAD] = 1.0
    left = [1.0 - roofline.collectives_s(new) / measured for new, _, measured in points]
    return rows / np.array(left)[:, None]


def _fit(rows: Floats, seconds: Floats, unknown: Sequence[int]) -> tuple[Floats, float]:
    """Return seconds per unit of work, and the squared error.

    Attention has a rate of its own where there are points to tell it, and it helps.
    """
    relative = rows / seconds[:, None]
    together = relative.copy()
    together[:, _PRODUCTS] += together[:, _PAIRS]
    ones = np.ones(len(seconds))
    best = least_squares(together, ones, [each for each in unknown if each != _PAIRS])
    if _PAIRS in unknown:
        apart = least_squares(relative, ones, unknown)
        if apart[0][_PAIRS] > 0 and apart[1] < best[1] - SAME:
            return apart
    return best

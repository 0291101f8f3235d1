"""Rates from measurements: what a machine really reaches.

A step is taken for computing (more than one new token) or for reading (one: a decode step), and
each gives one equation: seconds = work / rate + overhead. All are solved together, by least squares
on relative errors, with rates and overhead that are not negative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import ConfigError
from quire.sim.hardware.tiers import parse_seconds

if TYPE_CHECKING:
    from quire.sim.hardware.roofline import Roofline

Point = tuple[int, int, float]
Floats = NDArray[np.float64]

_POINT = re.compile(r"(?P<new>\d{1,12})(?:\+(?P<cached>\d{1,12}))?=(?P<time>\S+)")

_PRODUCTS, _PAIRS, _BYTES, _OVERHEAD = range(4)


def calibrate(roofline: Roofline, points: Iterable[Point]) -> Roofline:
    """Return `roofline` with the rates that fit; see `Roofline.calibrate`."""
    measured = [_checked(point) for point in points]
    prefills = list(dict.fromkeys((new, cached) for new, cached, _ in measured if new > 1))
    decodes = list(dict.fromkeys(cached for new, cached, _ in measured if new == 1))
    if len(prefills) < 2:
        raise ConfigError(
            f"{len(prefills)} different prefills were measured; two or more (more than one new "
            "token, of different sizes) tell the rate from the overhead"
        )
    used = [point for point in measured if point[0] > 1 or len(decodes) > 1]
    rows, seconds = _equations(roofline, used)
    unknown = [_PRODUCTS, _OVERHEAD, *([_BYTES] if len(decodes) > 1 else [])]
    together = rows.copy()
    together[:, _PRODUCTS] += together[:, _PAIRS]
    best = _solve(together, seconds, unknown)
    apart = best
    if len(prefills) > 2:
        apart = _solve(rows, seconds, [*unknown, _PAIRS])
    split = apart[_PRODUCTS] > 0 and apart[_PAIRS] > 0 and len(prefills) > 2
    found = apart if split else best
    if not found[_PRODUCTS] > 0:
        raise ConfigError(
            "the measured seconds do not grow with the work, so there is no rate to find; measure "
            "larger prompts, or repeat the measurement on an idle machine"
        )
    peak = roofline.accelerator.peak_flops * roofline.num_gpus
    mfu = 1 / (float(found[_PRODUCTS]) * peak)
    fitted = msgspec.structs.replace(
        roofline,
        mfu=mfu,
        attention_mfu=1 / (float(found[_PAIRS]) * peak) if split else mfu,
        overhead_s=float(found[_OVERHEAD]),
    )
    if found[_BYTES] > 0:
        rate = roofline.accelerator.bandwidth * roofline.num_gpus
        return msgspec.structs.replace(
            fitted, bandwidth_efficiency=1 / (float(found[_BYTES]) * rate)
        )
    return fitted


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


def _equations(roofline: Roofline, points: Sequence[Point]) -> tuple[Floats, Floats]:
    """Return one equation per point, each divided by its seconds.

    The work, float [points, 4], and what it adds up to: 1 less the share of collectives.
    """
    rows = np.zeros((len(points), 4))
    for row, (new, cached, _) in zip(rows, points, strict=True):
        row[_OVERHEAD] = 1.0
        if new > 1:
            row[_PRODUCTS] = roofline.product_flops(new)
            row[_PAIRS] = roofline.attention_flops(new, cached)
        else:
            row[_BYTES] = roofline.step_bytes([(new, cached)])
    measured = np.array([point[2] for point in points])
    collectives = np.array([roofline.collectives_s(point[0]) for point in points])
    return rows / measured[:, None], 1.0 - collectives / measured


def _solve(rows: Floats, seconds: Floats, unknown: Sequence[int]) -> Floats:
    """Return the coefficients, none below zero, with the least squared error.

    With at most four unknowns every choice of those above zero is tried.
    """
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    best, least = np.zeros(4), float(seconds @ seconds)
    for count in range(1, len(unknown) + 1):
        for chosen in combinations(unknown, count):
            part = rows[:, chosen] / scale[list(chosen)]
            solved = np.asarray(np.linalg.lstsq(part, seconds, rcond=None)[0], np.float64)
            error: Floats = part @ solved - seconds
            squared = float(error @ error)
            if float(solved.min()) >= 0 and squared < least * (1 - 1e-9):
                best, least = np.zeros(4), squared
                best[list(chosen)] = solved / scale[list(chosen)]
    return best

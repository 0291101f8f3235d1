"""Profiles: measured steps of an engine, and the model of their times that explains them best.

A profile is a file of JSON Lines, a step each: `{"chunks": [[new, before], ...], "contexts": [n, ...],
"seconds": s}`, parts of prompts after tokens that have K and V, and the tokens before each one that a
sequence decodes. vLLM's own log of its iterations (`--enable-logging-iteration-details`) is read too;
it says nothing of contexts, so their cost is in that of the tokens.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from quire.errors import ConfigError, TraceError
from quire_sim.hardware.fitting import Floats, least_squares
from quire_sim.hardware.roofline import (
    Chunk,
    Contexts,
    ModelTimes,
    Seconds,
    causal_pairs,
)
from quire_sim.trace.chunks import lines_of
from quire_sim.trace.schemas import decode_lines

FOLDS = 5
"""Parts of a profile, each left out once to find the error on steps that were not seen."""

MIN_STEPS = 20

FIRST_TOKENS = 128
"""Tokens of prompts in a step from which on one more costs the same."""

_LOGGED = re.compile(
    rb"(?P<chunks>\d+) context requests, (?P<new>\d+) context tokens, "
    rb"(?P<decodes>\d+) generation requests, \d+ generation tokens, "
    rb"iteration elapsed time: (?P<ms>[0-9.]+) ms(?! \(dummy\))"
)

Tokens: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 27)]


class MeasuredStep(msgspec.Struct, frozen=True, gc=False):
    """A step of an engine: its chunks and contexts, and its seconds."""

    chunks: list[tuple[Tokens, Tokens]]
    contexts: list[Tokens]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class StepCosts(msgspec.Struct, frozen=True):
    """Seconds per unit of each part of a step; a step takes their sum.

    `step_s`         of a step whatever is in it
    `chunk_s`, `token_s`, `pair_s`  of each part of a prompt, each token of it, and each pair of tokens
                     that its attention looks at
    `first_token_s`  more of each of the first 128 tokens of prompts: few rows make slow products
    `sequence_s`, `cached_token_s`  of each sequence that decodes, and each token before that one
    """

    step_s: float = 0.0
    chunk_s: float = 0.0
    token_s: float = 0.0
    pair_s: float = 0.0
    sequence_s: float = 0.0
    cached_token_s: float = 0.0
    first_token_s: float = 0.0


class Calibration(msgspec.Struct, frozen=True):
    """The costs that explain measured steps best, and how far off they are.

    `num_steps`  measured steps behind it
    `error`      mean error of a step that was left out when its costs were found, a share of it
    `sum_error`  the same of the sum of a fifth of all steps: what long times are off by
    """

    costs: StepCosts
    num_steps: int
    error: float
    sum_error: float


class MeasuredTimes(ModelTimes, frozen=True, kw_only=True):
    """Seconds of steps of an engine that was measured."""

    calibration: Calibration

    @property
    def basis(self) -> str:
        return f"costs found from {self.calibration.num_steps:,} measured steps"

    def known_error(self) -> float | None:
        return self.calibration.error

    def steps_s(self, chunks: Sequence[Chunk], contexts: Contexts, num_steps: int) -> Seconds:
        costs, num = self.calibration.costs, len(contexts)
        seen = int(contexts.sum()) + num * np.arange(num_steps)
        steady_s = float(np.dot(work_of(chunks, num, 0), msgspec.structs.astuple(costs)))
        return (steady_s + seen * costs.cached_token_s).astype(np.float64)


def work_of(chunks: Sequence[Chunk], num_decodes: int, seen: int) -> list[float]:
    """Return the parts of a step, in the order of `StepCosts`."""
    new = sum(tokens for tokens, _ in chunks)
    pairs = sum(causal_pairs(*chunk) for chunk in chunks)
    return [1.0, len(chunks), new, pairs, num_decodes, seen, min(new, FIRST_TOKENS)]


def read_calibration(path: str | Path) -> Calibration:
    """Return a calibration: one that was written, or that of the steps in a profile or a log.

    Raises `TraceError` for a file that has none, `ConfigError` for steps that tell too little.
    """
    path = Path(path).expanduser()
    lines = lines_of(path)
    if b'"costs"' not in next(lines, b""):
        return calibrate_steps(read_profile(path))
    (calibration,) = decode_lines(path, itertools.islice(lines_of(path), 1), Calibration)
    return calibration


def read_profile(path: str | Path) -> list[MeasuredStep]:
    """Return the measured steps in a profile, or in a log of vLLM. Raises `TraceError`."""
    path = Path(path).expanduser()
    lines = lines_of(path)
    first = next(lines, b"")
    if first.lstrip().startswith(b"{"):
        return list(decode_lines(path, lines_of(path), MeasuredStep))
    steps = list(_logged(path))
    if not steps:
        raise TraceError(
            f"{path} has no measured steps: a line of a profile is like "
            '{"chunks": [[512, 0]], "contexts": [900], "seconds": 0.04}, and vLLM logs its steps with '
            "--enable-logging-iteration-details"
        )
    return steps


def calibrate_steps(steps: Sequence[MeasuredStep]) -> Calibration:
    """Return the costs that explain measured steps best, with the error on steps left out.

    By least squares on errors relative to what is predicted, none of the costs below zero. Raises
    `ConfigError` for fewer than 20 steps, or steps that are all alike.
    """
    if len(steps) < MIN_STEPS:
        raise ConfigError(f"{len(steps)} measured steps are too few; it takes {MIN_STEPS} or more")
    rows = np.array(
        [work_of(each.chunks, len(each.contexts), sum(each.contexts)) for each in steps], float
    )
    seconds = np.array([each.seconds for each in steps])
    if len(np.unique(rows, axis=0)) < 2:
        raise ConfigError(
            "all measured steps have the same work, which tells no cost from another; measure "
            "prompts and batches of different sizes"
        )
    part = np.arange(len(steps)) * FOLDS // len(steps)
    left_out = np.empty(len(steps))
    for fold in range(FOLDS):
        inside = part == fold
        left_out[inside] = rows[inside] @ _fit(rows[~inside], seconds[~inside])
    sums = [
        abs(float(left_out[part == fold].sum() / seconds[part == fold].sum()) - 1)
        for fold in range(FOLDS)
    ]
    return Calibration(
        costs=StepCosts(*_fit(rows, seconds).tolist()),
        num_steps=len(steps),
        error=float(np.abs(left_out / seconds - 1).mean()),
        sum_error=float(np.mean(sums)),
    )


def _fit(rows: Floats, seconds: Floats) -> Floats:
    """Return costs; errors are relative to a first fit, since those to what was measured lean low."""
    unknown, scale = range(rows.shape[1]), seconds
    costs = np.zeros(rows.shape[1])
    for _ in range(4):
        turned, few = np.linalg.qr(rows / scale[:, None])
        costs, _ = least_squares(few, turned.T @ (seconds / scale), unknown)
        scale = np.maximum(rows @ costs, seconds.min())
    return costs


def _logged(path: Path) -> Iterator[MeasuredStep]:
    """Yield the steps in a log of vLLM; one whose prompts came in several parts has them even."""
    for line in lines_of(path):
        found = _LOGGED.search(line)
        if found is None:
            continue
        chunks, new, decodes = (int(found[name]) for name in ("chunks", "new", "decodes"))
        even = [new // chunks + (at < new % chunks) for at in range(chunks)] if chunks else []
        seconds = float(found["ms"]) / 1e3
        if seconds > 0 and chunks + decodes:
            yield MeasuredStep([(each, 0) for each in even], [0] * decodes, seconds)

"""The steps of quire's engine that computed a request, as its server tells them in `timings`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, cast

import msgspec

from quire_sim.logs.rows import EngineSteps
from quire_sim.logs.streams import events_of


class _Timings(msgspec.Struct):
    arrived_at: float
    queue_ms: float
    prompt_ms: float
    predicted_ms: float
    prompt_n: int
    prompt_steps: tuple[tuple[int, int], ...]
    last_step: int
    engine: str = ""


def steps_of(response: Any) -> EngineSteps | None:
    """Return the steps that an answer tells, whole or as a stream; None if it tells none, or none that can be."""
    for place in _places(response):
        if isinstance(place, dict) and "prompt_steps" in (fields := cast("dict[str, Any]", place)):
            try:
                return _steps(msgspec.convert(fields, _Timings))
            except (msgspec.ValidationError, ValueError):
                return None
    return None


def _places(response: Any) -> Iterator[Any]:
    """Yield what may be the `timings` of an answer."""
    if isinstance(response, dict):
        yield cast("dict[str, Any]", response).get("timings")
    elif isinstance(response, str) and '"prompt_steps"' in response:
        for event in events_of(response):
            yield event.get("timings")
            if isinstance(inner := event.get("response"), dict):
                yield cast("dict[str, Any]", inner).get("timings")


def _steps(told: _Timings) -> EngineSteps:
    """Return timings as steps. Raises `ValueError` where they cannot be."""
    numbers = [number for number, _ in told.prompt_steps] + [told.last_step]
    computed = accumulate(tokens for _, tokens in told.prompt_steps)
    is_rising = all(a < b for a, b in pairwise(numbers[:-1])) and numbers[-2:] == sorted(numbers[-2:])
    if not told.prompt_steps or not is_rising or min(tokens for _, tokens in told.prompt_steps) < 1:
        raise ValueError(f"steps {numbers} are not in order")
    first = next((n for n, done in zip(numbers, computed, strict=False) if done >= told.prompt_n), numbers[-2])
    return EngineSteps(
        told.engine,
        told.arrived_at,
        told.queue_ms * 1e-3,
        (told.queue_ms + told.prompt_ms + told.predicted_ms) * 1e-3,
        told.prompt_steps,
        first,
        told.last_step,
    )

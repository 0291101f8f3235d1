"""The steps of quire's engine that computed a request, as its server tells them in `timings`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any, TypeAlias, cast

import msgspec
from msgspec import Meta

from quire_sim.logs.rows import EngineSteps
from quire_sim.logs.streams import events_of

MOST_TOKENS = 1 << 16
"""Tokens of an answer, and steps of a prompt, at most: more are not believed."""

_Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 53)]
_Ms: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]


class _StepTimings(msgspec.Struct):
    arrived_at: Annotated[float, Meta(ge=0, le=1e11)]
    arrived_step: _Count
    queue_ms: _Ms
    prompt_ms: _Ms
    predicted_ms: _Ms
    predicted_n: Annotated[int, Meta(ge=0, le=MOST_TOKENS)]
    prompt_steps: Annotated[
        tuple[tuple[_Count, _Count, _Count], ...], Meta(min_length=1, max_length=MOST_TOKENS)
    ]
    last_step: _Count
    engine: str = ""


def steps_of(response: Any) -> EngineSteps | None:
    """Return the steps that an answer tells, whole or as a stream; None for none, or ones that cannot be."""
    for place in _places(response):
        if isinstance(place, dict) and "prompt_steps" in (fields := cast("dict[str, Any]", place)):
            try:
                return _steps(msgspec.convert(fields, _StepTimings))
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


def _steps(told: _StepTimings) -> EngineSteps:
    """Return timings as steps. Raises `ValueError` where they cannot be."""
    numbers = [number for number, _, _ in told.prompt_steps]
    is_rising = all(a < b for a, b in pairwise([told.arrived_step, *numbers]))
    has_token = any(not left for _, _, left in told.prompt_steps)
    if not is_rising or told.last_step < numbers[-1] or not has_token:
        raise ValueError(f"steps {numbers} to {told.last_step} are not in order")
    return EngineSteps(
        told.engine,
        told.arrived_at,
        told.arrived_step,
        told.queue_ms * 1e-3,
        (told.queue_ms + told.prompt_ms + told.predicted_ms) * 1e-3,
        told.prompt_steps,
        told.last_step,
        told.predicted_n,
    )

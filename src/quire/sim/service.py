"""Durations of requests in flight: computing the prompt, then generating."""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from quire.errors import ConfigError
from quire.sim.hardware import Roofline
from quire.sim.trace.rows import TraceRequest

PREFILL_RATE = 10_000.0
"""Prompt tokens per second that are assumed: about an 8 B model on one large GPU, shared."""

DECODE_RATE = 50.0
"""Output tokens per second of one request that are assumed: what a busy server gives a user."""


class Service(Protocol):
    """Says how long a request computes and generates. Pickled on its way to another process."""

    def times(self, request: TraceRequest, cached_tokens: int) -> tuple[float, float]:
        """Return the seconds until the prompt is computed, and those from there to the end."""
        ...


class Rates(msgspec.Struct, frozen=True):
    """Fixed rates in tokens per second, whatever else is running. Raises `ConfigError`."""

    prefill: float = PREFILL_RATE
    decode: float = DECODE_RATE

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            rate = getattr(self, name)
            if not (rate > 0 and math.isfinite(rate)):
                raise ConfigError(f"the {name} rate is {rate}; it is above 0 tokens per second")

    def times(self, request: TraceRequest, cached_tokens: int) -> tuple[float, float]:
        computed = request.prompt_tokens - cached_tokens
        return computed / self.prefill, request.output_tokens / self.decode


class OnRoofline(msgspec.Struct, frozen=True):
    """The times of a model and an accelerator for a request that runs alone."""

    roofline: Roofline

    def times(self, request: TraceRequest, cached_tokens: int) -> tuple[float, float]:
        line, prompt = self.roofline, request.prompt_tokens
        cached = min(cached_tokens, prompt - 1)
        middle = prompt + request.output_tokens // 2
        decode = request.output_tokens * line.decode_s([middle])
        return line.prefill_s(prompt - cached, cached), decode


class AsRecorded(msgspec.Struct, frozen=True):
    """The durations of the trace, shared out as another service would; its own where none is."""

    otherwise: Service

    def times(self, request: TraceRequest, cached_tokens: int) -> tuple[float, float]:
        prefill, decode = self.otherwise.times(request, cached_tokens)
        duration, total = request.duration_s, prefill + decode
        if duration is None:
            return prefill, decode
        share = prefill / total if total else 1.0
        return duration * share, duration * (1 - share)

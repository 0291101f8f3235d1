"""Savings by hits: the prefill that need not be computed, in FLOPs and seconds."""

from __future__ import annotations

from typing import Any

from quire.sim.hardware import Roofline
from quire.sim.trace.rows import TraceRequest


class Savings:
    """Adds up what the found tokens of each request would have cost, each computed alone.

    `prefill_flops`, `prefill_s`              without a cache
    `saved_prefill_flops`, `saved_prefill_s`  of these, what is not computed thanks to hits

    The last token of a prompt is always computed, as an engine must.
    """

    def __init__(self, roofline: Roofline) -> None:
        self._roofline = roofline
        self._flops = self._saved_flops = 0.0
        self._s = self._saved_s = 0.0

    def __call__(self, request: TraceRequest, hit_tokens: int) -> None:
        flops, seconds = self._cost(request.prompt_tokens, 0)
        self._flops += flops
        self._s += seconds
        cached = min(hit_tokens, request.prompt_tokens - 1)
        if cached > 0:
            rest_flops, rest_s = self._cost(request.prompt_tokens - cached, cached)
            self._saved_flops += flops - rest_flops
            self._saved_s += seconds - rest_s

    def found(self) -> dict[str, Any]:
        return {
            "prefill_flops": self._flops,
            "saved_prefill_flops": self._saved_flops,
            "prefill_s": self._s,
            "saved_prefill_s": self._saved_s,
        }

    def _cost(self, new_tokens: int, cached_tokens: int) -> tuple[float, float]:
        line = self._roofline
        flops = line.product_flops(new_tokens) + line.attention_flops(new_tokens, cached_tokens)
        return flops, line.prefill_s(new_tokens, cached_tokens)

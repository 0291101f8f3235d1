"""Rates of requests that begin alike."""

from __future__ import annotations

from collections import deque

from quire_sim.logs import LoggedRequest

BEGIN = 1024
"""Characters of a prompt by which providers route it, about: 256 tokens."""

MINUTE_S = 60.0

MOST_KNOWN = 1 << 16
"""Beginnings whose requests are counted; beyond it all are forgotten."""


class RequestRates:
    """Requests a minute of each beginning. `busiest` is the most that one has had; 0 without times."""

    def __init__(self) -> None:
        self.busiest = 0
        self._sent: dict[int, deque[float]] = {}

    def add(self, request: LoggedRequest) -> None:
        """Count a request."""
        if request.time_s is None:
            return
        begin = ""
        for section in request.sections:
            begin += f"{section.role}\0{section.text[:BEGIN]}"
            if len(begin) >= BEGIN:
                break
        if len(self._sent) > MOST_KNOWN:
            self._sent.clear()
        sent = self._sent.setdefault(hash((request.model, begin[:BEGIN])), deque())
        while sent and sent[0] <= request.time_s - MINUTE_S:
            sent.popleft()
        sent.append(request.time_s)
        self.busiest = max(self.busiest, len(sent))

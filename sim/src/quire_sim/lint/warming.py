"""A mend of requests that are sent together: one goes first, the others once its answer begins."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

import msgspec

from quire_sim.logs import LoggedRequest

PIECE = 512
"""Characters by which prompts are compared."""

WINDOW = 1024
"""Requests among which lines of a log may be out of order of their times."""

MOST_KNOWN = 1 << 20
"""Beginnings of prompts that are known; beyond them those that are computed are forgotten."""


def warm_first(requests: Iterable[LoggedRequest]) -> Iterator[tuple[LoggedRequest, float]]:
    """Yield requests in the order in which they were sent, each with the seconds that it waits.

    A request waits if a longer beginning of its prompt is being computed for another one than any that is computed. It
    is sent when the first token of that one's answer leaves; where that is no stream, or a log tells no first token, at
    its end. Requests without a time or a duration are sent as they were.
    """
    ready_s: dict[int, float] = {}
    for request in _in_order(requests):
        is_streamed = request.body.get("stream") and request.answer and request.first_s is not None
        takes_s = request.first_s if is_streamed else request.duration_s
        if request.time_s is None or takes_s is None:
            yield request, 0.0
            continue
        keys, now = _beginnings(request), request.time_s
        while True:
            leader = next((key for key in reversed(keys) if key in ready_s), None)
            if leader is None or ready_s[leader] <= now:
                break
            now = ready_s[leader]
        if len(ready_s) > MOST_KNOWN:
            ready_s = {key: at for key, at in ready_s.items() if at > request.time_s}
        for key in keys:
            ready_s.setdefault(key, now + takes_s)
        wait_s = now - request.time_s
        yield msgspec.structs.replace(request, time_s=now) if wait_s else request, wait_s


def _beginnings(request: LoggedRequest) -> list[int]:
    """Return the digests of a prompt's beginnings, the shortest first."""
    key = hash((request.replica, request.tenant, request.model, request.salt))
    found: list[int] = []
    for section in request.sections:
        key = hash((key, section.role, section.kind, section.media))
        for at in range(0, max(len(section.text), 1), PIECE):
            key = hash((key, section.text[at : at + PIECE]))
            found.append(key)
    return found


def _in_order(requests: Iterable[LoggedRequest]) -> Iterator[LoggedRequest]:
    waiting: list[tuple[float, int, LoggedRequest]] = []
    for number, request in enumerate(requests):
        if request.time_s is None:
            yield request
            continue
        heapq.heappush(waiting, (request.time_s, number, request))
        if len(waiting) > WINDOW:
            yield heapq.heappop(waiting)[2]
    while waiting:
        yield heapq.heappop(waiting)[2]

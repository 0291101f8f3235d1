"""Workloads: made-up traffic as a trace, the same for the same seed."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

import msgspec
from numpy.random import Generator

from quire.config import check_count
from quire.errors import ConfigError
from quire_sim.distributions import check_positive, draw_gap, generator
from quire_sim.trace.rows import Findings, ReportingTrace, TraceRequest
from quire_sim.trace.schemas import MAX_BLOCK_SIZE, MAX_TOKENS
from quire_sim.workload.prompts import Library
from quire_sim.workload.settings import (
    BLOCK_SIZE,
    KINDS,
    REQUESTS_PER_S,
    SessionTurn,
    Texts,
    TrafficKind,
)


class Traffic(msgspec.Struct, frozen=True):
    """One kind of traffic, and its share of the requests beside those of other parts."""

    kind: TrafficKind
    share: float = 1.0


class Workload(ReportingTrace):
    """Made-up requests as a trace; every iteration makes the same ones anew.

        trace = Workload({"chat": Traffic(Chat(turns=8.0))}, num_requests=10_000, seed=1)

    parts         kinds of traffic by name; each draws from a generator of its own
    num_requests  it ends after so many; sessions that have not ended by then are cut off
    requests_per_s  expected rate, from shares and requests per session. No session runs at
                  time 0, so the rate builds up over the length of a session

    Memory grows with the shared texts and the sessions that run. Raises `ConfigError`.
    """

    def __init__(
        self,
        parts: Mapping[str, Traffic],
        num_requests: int,
        seed: int = 0,
        *,
        requests_per_s: float = REQUESTS_PER_S,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        check_count("num_requests", num_requests)
        check_positive("requests_per_s", requests_per_s)
        if check_count("block_size", block_size) > MAX_BLOCK_SIZE:
            raise ConfigError(f"block_size is at most {MAX_BLOCK_SIZE:,}, got {block_size}")
        if not parts:
            kinds = ", ".join(KINDS)
            raise ConfigError(f"a workload has at least one part, of {kinds}")
        for name, part in parts.items():
            check_positive(f"the share of {name}", part.share)
        generator(seed)
        super().__init__(f"{' + '.join(parts)}, seed {seed}", "made-up", block_size)
        self.parts = dict(parts)
        self.num_requests = num_requests
        self.seed = seed
        self.requests_per_s = requests_per_s

    def read(self, report: Findings) -> Iterator[TraceRequest]:
        library = Library(self.block_size)
        for time_s, session, turn in self._turns(library):
            report.rows += 1
            yield TraceRequest(
                report.rows,
                time_s,
                turn.text.end,
                turn.output_tokens,
                library.runs(turn.text),
                session,
            )
            if report.rows == self.num_requests:
                return

    def _turns(self, library: Library) -> Iterator[tuple[float, str, SessionTurn]]:
        """Yield the turns of all sessions in order of time, for ever."""
        total = sum(part.share for part in self.parts.values())
        streams: list[Iterator[tuple[float, str, SessionTurn]]] = []
        for place, (name, part) in enumerate(self.parts.items()):
            per_s = self.requests_per_s * part.share / total / part.kind.requests_per_session
            starts, drawn = (generator(self.seed, place, stream) for stream in (0, 1))
            streams.append(_flow(part.kind, Texts(name, library, drawn), per_s, starts))
        return heapq.merge(*streams, key=lambda turn: turn[0])


def _flow(
    kind: TrafficKind, texts: Texts, per_s: float, starts: Generator
) -> Iterator[tuple[float, str, SessionTurn]]:
    """Yield time, session and turn of one part, in order of time, for ever."""
    waiting: list[tuple[float, int, SessionTurn]] = []
    begin, number = 0.0, 0
    while True:
        begin = round(begin + draw_gap(starts, per_s), 6)
        while waiting and waiting[0][0] <= begin:
            time_s, session, turn = heapq.heappop(waiting)
            yield time_s, f"{texts.name}-{session}", turn
        number += 1
        time_s = begin
        for turn in kind.session(texts):
            if turn.text.end > MAX_TOKENS:
                break
            time_s = round(time_s + turn.after_s, 6)
            heapq.heappush(waiting, (time_s, number, turn))

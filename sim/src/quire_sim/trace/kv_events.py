"""Logs of KV events as traces: requests made of the blocks that engines say they stored.

A log has no requests, only blocks that became findable. What is made of it:

- A request is a run of blocks that were stored, and the chain of blocks before it. The chain is
  followed through the parents that the events name, so it holds the blocks that were found.
- An engine stores a long prompt in chunks and an answer block by block. What continues a run
  where it ended, on the same rank, within `SAME_REQUEST_S` of its last part, belongs to the same
  request: parts of several blocks, before any single one, to its prompt, single blocks to its
  answer. Everything else begins a new request. Parts in one batch are one part.
- Lengths are in whole blocks: the last, partial one of a prompt or an answer is never stored.
- A request that stored nothing new, since all of its blocks were found, is not in the log. So
  the requests are those that missed something, and the hits that they had are those that the
  parents imply: ceilings and hit ratios of the trace are below the engine's own.
- A parent that was never seen (the log began late, or lost something) stands for all before
  it: a chain of unknown length counts as one block.
- Blocks that were stored again after their removal are the same blocks; removals are not needed.
- Only the first medium and the first layer group of the log make requests: what is stored
  elsewhere are copies. Ranks go together, as if one cache served them all.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quire.errors import TraceError
from quire_sim.trace.formats import check_block_size
from quire_sim.trace.kv_batches import Batch, BlockHash, Stored, read_batches
from quire_sim.trace.numbering import Numbering
from quire_sim.trace.rows import Findings, ReportingTrace, Runs, TraceRequest

SAME_REQUEST_S = 5.0
"""What continues a run so much later, in seconds, is another request: slower than a block of an
answer is made, and faster than most people reply."""

ROOT = -1

MADE_OF_BLOCKS = (
    "requests are made of blocks that were stored: lengths are whole blocks, and a request that "
    "found all of its blocks is not seen"
)


class EventTrace(ReportingTrace):
    """The trace in a log of KV events; memory grows with its different blocks."""

    def __init__(self, path: Path, first: Stored) -> None:
        super().__init__(str(path), "kv-events", first.block_size)
        self._path = path
        self._first = first

    def read(self, report: Findings) -> Iterator[TraceRequest]:
        return _LogPass(self._path, self._first, report).requests()


def open_events(path: Path, block_size: int | None = None) -> EventTrace:
    """Return the trace in a log of KV events, its block size that of the first blocks stored.

    Raises `TraceError` for a log in which nothing was stored, `ConfigError` for a block size that
    is not the log's.
    """
    first = next((stored for batch in read_batches(path) for stored in batch.stored), None)
    if first is None:
        raise TraceError(f"{path} is a log of events in which no block is stored")
    check_block_size(path, first.block_size, block_size)
    return EventTrace(path, first)


class _StoredRun(msgspec.Struct, eq=False):
    """A request in the making: the nodes where its prompt and its answer end, at last."""

    batch: int
    rank: int
    time_s: float
    last_s: float
    prompt_end: int
    end: int
    session: str | None
    answer_blocks: int = 0


class _Chains:
    """Every block seen, as a node with the node before it; memory of all of them."""

    def __init__(self, numbering: Numbering) -> None:
        self.nodes: dict[BlockHash, int] = {}
        self._before = array("i")
        self._start = array("i")  # the first node of the run of nodes that ends here
        self._numbering = numbering

    def add(self, name: BlockHash, before: int) -> bool:
        """Add a block behind another if it is new; return whether it follows that one."""
        node = self.nodes.get(name)
        if node is not None:
            return self._before[node] == before
        node = self.nodes[name] = len(self._before)
        joined = before != ROOT and before == node - 1
        self._before.append(before)
        self._start.append(self._start[before] if joined else node)
        return True

    def ids(self, end: int) -> Runs:
        """Return the ids of the chain that ends at a node, int32 [num_runs, 2]."""
        parts: list[tuple[int, int]] = []
        while end != ROOT:
            start = self._start[end]
            parts.append((start, end + 1 - start))
            end = self._before[start]
        return self._numbering.renumber(reversed(parts))


class _LogPass:
    """One pass over a log."""

    def __init__(self, path: Path, first: Stored, report: Findings) -> None:
        self._path = path
        self._first = first
        self._report = report
        self._chains = _Chains(Numbering(str(path)))
        self._runs: deque[_StoredRun] = deque()  # in order of arrival, until they have ended
        self._open: dict[tuple[int, int], _StoredRun] = {}  # by rank and the node where they end
        self._ranks: dict[int, None] = {}
        self._now = 0.0
        self._begin: float | None = None
        self._elsewhere = self._orphans = self._moved = self._late = self._unknown = 0

    def requests(self) -> Iterator[TraceRequest]:
        report = self._report
        for batch in read_batches(self._path):
            report.rows += 1
            self._advance(batch)
            for stored in batch.stored:
                self._store(batch, stored)
            self._unknown += batch.unknown
            while self._runs and self._runs[0].last_s + SAME_REQUEST_S < self._now:
                yield self._ended()
        while self._runs:
            yield self._ended()
        report.notes += self._notes()

    def _advance(self, batch: Batch) -> None:
        if self._begin is None:
            self._begin = batch.time_s
        time_s = batch.time_s - self._begin
        self._late += time_s < self._now
        self._now = max(self._now, time_s)
        self._ranks[batch.rank or 0] = None
        if batch.clears:
            for rank, node in [key for key in self._open if key[0] == (batch.rank or 0)]:
                self._open.pop((rank, node)).last_s = -math.inf

    def _store(self, batch: Batch, stored: Stored) -> None:
        first, chains = self._first, self._chains
        if (stored.medium, stored.group) != (first.medium, first.group):
            self._elsewhere += 1
            return
        if stored.block_size != first.block_size:
            raise TraceError(
                f"{self._path}, batch {batch.number:,}: blocks of {stored.block_size} tokens after "
                f"blocks of {first.block_size}; split the log by model"
            )
        before = ROOT
        if stored.parent is not None:
            if stored.parent not in chains.nodes:
                self._orphans += 1
                chains.add(stored.parent, ROOT)
            before = chains.nodes[stored.parent]
        rank, session = batch.rank or 0, stored.session
        key = rank, before
        for name in stored.hashes:
            self._moved += not chains.add(name, before)
            before = chains.nodes[name]
        run = self._open.pop(key, None)
        if run is None or not self._continues(run, len(stored.hashes)):
            run = _StoredRun(
                batch.number,
                rank,
                self._now,
                0.0,
                before,
                before,
                None if session is None else str(session),
            )
            self._runs.append(run)
        elif len(stored.hashes) == 1:
            run.answer_blocks += 1
        else:
            run.prompt_end = before
        run.last_s, run.end = self._now, before
        self._open[rank, before] = run

    def _continues(self, run: _StoredRun, num_blocks: int) -> bool:
        soon = self._now - run.last_s <= SAME_REQUEST_S
        return soon and (num_blocks == 1 or not run.answer_blocks)

    def _ended(self) -> TraceRequest:
        run = self._runs.popleft()
        if self._open.get((run.rank, run.end)) is run:
            del self._open[run.rank, run.end]
        runs = self._chains.ids(run.prompt_end)
        size = self._first.block_size
        return TraceRequest(
            run.batch,
            run.time_s,
            int(runs[:, 1].sum()) * size,
            run.answer_blocks * size,
            runs,
            run.session,
        )

    def _notes(self) -> list[str]:
        first = self._first
        num_ranks = len(self._ranks)
        of_first = f"media than {first.medium}, or of other layer groups than {first.group}"
        counts = {
            "ranks go together, as if they had one cache": num_ranks if num_ranks > 1 else 0,
            f"stores on other {of_first}, are copies and left out": self._elsewhere,
            "blocks that were never stored have others behind them: each stands for all before it": (
                self._orphans
            ),
            "times a block followed another than at first: it is taken as first": self._moved,
            "batches came late, and count as of the one before": self._late,
            "events of an unknown kind are left out": self._unknown,
        }
        return [MADE_OF_BLOCKS, *(f"{count:,} {said}" for said, count in counts.items() if count)]

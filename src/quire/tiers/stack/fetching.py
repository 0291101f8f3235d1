"""Fetches, chunks and tickets: reads that requests share, each until its own deadline.

    Fetch    keys that one request wants, and the buffers for them
    Chunk    keys that one call reads from one tier, into the buffers of the request that came first
    Ticket   a fetch's claim on some keys of a chunk, with a deadline

A request that wants a key that is being read takes a ticket on that chunk and gets a copy. A ticket that is
given up is out: what the chunk brings later is not for it, and a buffer that may still be written is
replaced in the request's list by another one.

    WAITING ── its lane's turn ──▶ READING ── copies for joined tickets ──▶ DONE
       └─ nobody wants it any more ─▶ DONE, without a call
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from quire.tiers.base import Keys, Outcome
from quire.tiers.stack.lanes import Deadline
from quire.tiers.stack.level import Level, Shared


class ChunkState(Enum):
    """The progress of a chunk."""

    WAITING = auto()
    READING = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """A claim of `fetch` on keys of a chunk: its `indices`, which are `places` in the chunk."""

    fetch: Fetch
    chunk: Chunk
    indices: list[int]
    places: Sequence[int]
    deadline: Deadline
    is_copying: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the chunk reads into this fetch's buffers; else they get copies."""
        return self.fetch is self.chunk.owner


class Chunk:
    """Keys that one call reads from one tier, into the buffers that its owner had for them."""

    __slots__ = ("allowed_s", "buffers", "deadline", "keys", "level", "owner", "state", "tickets")

    def __init__(self, owner: Fetch, level: Level, indices: list[int], deadline: Deadline) -> None:
        self.owner = owner
        self.level = level
        self.keys = [owner.keys[index] for index in indices]
        self.buffers = [owner.buffers[index] for index in indices]
        self.deadline = deadline
        self.state = ChunkState.WAITING
        self.allowed_s = 0.0
        self.tickets: list[Ticket] = []


@dataclass(slots=True)
class Span:
    """The bytes and time of one fetch at one tier, for the gate's estimate."""

    began_s: float
    num_bytes: int = 0
    open_tickets: int = 0


class Fetch:
    """Keys that one request wants. `pending` counts those that may still come.

    `outcomes`  `TIMEOUT` until a key came, or no tier is left that could have it
    `is_patient`  nobody waits for it, so each tier has all the time that there is
    """

    def __init__(
        self,
        shared: Shared,
        keys: Keys,
        buffers: list[memoryview],
        deadline: Deadline,
        *,
        is_patient: bool = False,
    ) -> None:
        self.is_patient = is_patient
        self.keys = keys
        self.buffers = buffers
        self.deadline = deadline
        self.outcomes = [Outcome.TIMEOUT] * len(keys)
        self.causes: dict[int, Outcome] = {}
        self.pending = len(keys)
        self.tickets: list[Ticket] = []
        self.spans: dict[int, Span] = {}
        self.signal = shared.lanes.signal()
        self.is_over = False

    def settle(self, index: int, outcome: Outcome) -> None:
        """Keep a hit, or the first cause that is more than absence. The lock is held."""
        if outcome is Outcome.HIT:
            self.outcomes[index] = outcome
            self.pending -= 1
        elif outcome is not Outcome.ABSENT:
            self.causes.setdefault(index, outcome)

    def miss(self, indices: Sequence[int]) -> None:
        """No tier is left for these keys. The lock is held."""
        for index in indices:
            self.outcomes[index] = self.causes.get(index, Outcome.ABSENT)
        self.pending -= len(indices)

"""Fetches, batches and tickets: reads that requests share, each until its own deadline.

    Fetch    keys that one request wants
    ReadBatch    keys that one call reads from one tier, into buffers of its own
    Ticket   a fetch's claim on some keys of a batch, with a deadline

A request that wants a key that is being read takes a ticket on that batch. When the batch is read, who asked first
gets its buffers, and the others copies. A ticket that is given up is out: what the batch brings later is not for it.

    WAITING ── its lane's turn ──▶ READING ── buffers go to those who still wait ──▶ DONE
       └─ nobody wants it any more ─▶ DONE, without a call
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import Enum, auto

from quire.errors import ConfigError
from quire.tiers.base import Keys, Outcome, check_keys
from quire.tiers.format import HEADER_BYTES, MAX_RECORD_BYTES
from quire.tiers.stack.lanes import Deadline
from quire.tiers.stack.member import Shared, StackMember


class BatchState(Enum):
    """The progress of a batch."""

    WAITING = auto()
    READING = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Ticket:
    """A claim of `fetch` on keys of a batch: its `indices`, which are `places` in the batch.

    `idle_s`  for so long nothing at all may come of its fetch
    """

    fetch: Fetch
    batch: ReadBatch
    indices: Sequence[int]
    places: Sequence[int]
    deadline: Deadline
    idle_s: float

    @property
    def left_s(self) -> float:
        """Seconds until it is to be given up: by its deadline, or since nothing at all comes of its fetch."""
        return min(self.deadline.left_s, max(0.0, self.idle_s - self.fetch.idle_s))

    @property
    def is_first(self) -> bool:
        """Whether the batch is read for it; others joined."""
        return self.fetch is self.batch.owner

    @property
    def sizes(self) -> list[int]:
        """Bytes of its records."""
        return [self.fetch.sizes[index] for index in self.indices]


class ReadBatch:
    """A read batch: keys that one call reads from one tier, for its owner and later joiners.

    Keys in `gone` were deleted meanwhile.
    """

    __slots__ = (
        "allowed_s",
        "deadline",
        "gone",
        "keys",
        "level",
        "owner",
        "sizes",
        "state",
        "tickets",
    )

    def __init__(
        self, owner: Fetch, level: StackMember, indices: Sequence[int], deadline: Deadline
    ) -> None:
        self.owner = owner
        self.level = level
        self.keys = [owner.keys[index] for index in indices]
        self.sizes = [owner.sizes[index] for index in indices]
        self.deadline = deadline
        self.state = BatchState.WAITING
        self.allowed_s = 0.0
        self.gone: AbstractSet[bytes] = frozenset()
        self.tickets: list[Ticket] = []

    def came(self) -> None:
        """Note that something has come of it, for all who wait."""
        for ticket in tuple(self.tickets):
            ticket.fetch.note()


@dataclass(slots=True)
class Span:
    """The bytes and time of one fetch at one tier, for the gate's estimate."""

    began_s: float
    num_bytes: int = 0
    open_tickets: int = 0


class Fetch:
    """Keys that one request wants. `pending` counts those that may still come.

    `outcomes`, `buffers`  `TIMEOUT` and None until a key came, or no tier is left that could have it
    `most_idle_s`  for so long nothing may come
    `is_patient`   nobody waits for it, so each tier has all the time that there is
    """

    def __init__(
        self,
        shared: Shared,
        keys: Keys,
        sizes: Sequence[int],
        deadline: Deadline,
        most_idle_s: float = math.inf,
        *,
        is_patient: bool = False,
    ) -> None:
        self.is_patient = is_patient
        self.most_idle_s = most_idle_s
        self._lanes = shared.lanes
        self._came_s = shared.lanes.now()
        self.keys = keys
        self.sizes = sizes
        self.buffers: list[memoryview | None] = [None] * len(keys)
        self.deadline = deadline
        self.outcomes = [Outcome.TIMEOUT] * len(keys)
        self.causes: dict[int, Outcome] = {}
        self.pending = len(keys)
        self.tickets: list[Ticket] = []
        self.spans: dict[int, Span] = {}
        self.signal = shared.lanes.signal()
        self.is_over = False

    @property
    def idle_s(self) -> float:
        """Seconds since something came last."""
        return self._lanes.now() - self._came_s

    def note(self) -> None:
        """Something has come."""
        self._came_s = self._lanes.now()

    def settle(self, index: int, outcome: Outcome, buffer: memoryview | None = None) -> None:
        """Keep a hit and its buffer, or the first cause that is more than absence. The lock is held."""
        if outcome is Outcome.HIT:
            self.outcomes[index], self.buffers[index] = outcome, buffer
            self.pending -= 1
        elif outcome is not Outcome.ABSENT:
            self.causes.setdefault(index, outcome)

    def miss(self, indices: Sequence[int]) -> None:
        """No tier is left for these keys. The lock is held."""
        for index in indices:
            self.outcomes[index] = self.causes.get(index, Outcome.ABSENT)
        self.pending -= len(indices)


def check_sizes(keys: Keys, sizes: Sequence[int]) -> None:
    """Raise `ConfigError` unless there is a size for each key that a record can have."""
    check_keys(keys)
    if len(sizes) != len(keys):
        raise ConfigError(f"{len(keys)} keys and {len(sizes)} sizes; give one for each")
    for size in sizes:
        if not HEADER_BYTES <= size <= MAX_RECORD_BYTES:
            raise ConfigError(
                f"a record has {HEADER_BYTES} to {MAX_RECORD_BYTES} bytes, got {size}"
            )

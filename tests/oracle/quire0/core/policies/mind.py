"""What the policy `learned` knows: its model, who was evicted, and how it stands beside LRU."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire0.core.policies.base import Entry
from quire0.core.policies.lru_shadow import LruShadow
from quire0.core.policies.reentry import Record, Reentry

MAX_GHOSTS = 1000
"""So many requests are known again after their last blocks were evicted."""

TRIAL = 16
"""Of so many answers one is kept on equal terms, to see whether answers are come back to."""

HALF_LIFE = 4096
"""Requests after which the comparison with LRU has forgotten half."""

TRUST = 128
"""So many requests are compared before the comparison decides anything."""

LOSS = 0.005
"""A loss against LRU of this share of the blocks asked for makes the policy LRU, until half
of it is won back."""


class Trail(msgspec.Struct, eq=False):
    """What is known of a request while it runs.

    `path`  whose the found blocks were: (record, blocks), deepest first
    `rest`  the leaf that the record before has below the branching point
    """

    record: Record
    found: int
    previous: Record | None
    fan_out: int
    rest: Entry | None = None
    path: list[tuple[Record, int]] = []
    continues: bool = False


class Mind:
    """What the policy objects of one manager share: the model, the ghosts, the shadow of LRU.

    `doubts` are called with a class when records in it have changed
    """

    def __init__(self) -> None:
        self.doubts: list[Callable[[int], None]] = []
        self.model = Reentry()
        self.shadow = LruShadow()
        self.ghosts: dict[int, Record] = {}
        self._evicted: dict[Record, None] = {}  # in order of their first eviction
        self.now = 0.0
        self.trail: Trail | None = None
        self.num_requests = 0
        self.answers = [0.0, 0.0]
        self.gain = 0.0
        self.asked = 0.0
        self.is_lru = False

    @property
    def trims(self) -> bool:
        """Whether what follows prompts has not been worth keeping."""
        matched, seen = self.answers
        return seen >= TRUST / TRIAL and matched < seen / 4

    def judge(self, found: int, lru_found: int, asked: int) -> None:
        """Compare a request's blocks with those that LRU would have found."""
        keep = 1 - 0.7 / HALF_LIFE
        self.gain = self.gain * keep + found - lru_found
        self.asked = self.asked * keep + asked
        if self.is_lru:
            self.is_lru = self.gain < -LOSS / 2 * self.asked
        elif self.num_requests > TRUST:
            self.is_lru = self.gain < -LOSS * self.asked

    def remember(self, name: int, record: Record) -> None:
        """The part of a record from the block of this name on is evicted."""
        self._forget_name(record)
        if name in self.ghosts:
            self._forget_name(self.ghosts[name])
        record.ghost = name
        self.ghosts[name] = record
        self._evicted[record] = None
        if len(self._evicted) > MAX_GHOSTS:
            oldest = next(iter(self._evicted))
            del self._evicted[oldest]
            self._forget_name(oldest)
            self.model.forget(oldest, self.now)
            self.doubt(oldest.kind)

    def doubt(self, kind: int) -> None:
        """Records of this class may have a rank or a queue other than before."""
        for doubt in self.doubts:
            doubt(kind)

    def recall(self, name: int) -> Record | None:
        """Return the record that had the block of this name, and forget the name."""
        record = self.ghosts.get(name)
        if record is not None:
            self._forget_name(record)
        return record

    def _forget_name(self, record: Record) -> None:
        if record.ghost is not None:
            del self.ghosts[record.ghost]
            record.ghost = None

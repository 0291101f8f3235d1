"""What the policy `learned` knows: its model, who was evicted, and how it stands beside LRU."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.core.policies.base import Entry
from quire.core.policies.lru_shadow import LruShadow
from quire.core.policies.reentry import Record, Reentry

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


class Walk(msgspec.Struct, eq=False):
    """A running request, as far as it is known.

    `found`      blocks of its prompt that were cached
    `reached`    `found`, and the evicted blocks after them whose record is remembered
    `fan_out`    entries that continue what was found
    `path`       the records that those blocks belonged to: (record, blocks), deepest first
    `rest`       the leaf that the record before has below the branching point
    `continues`  whether it goes on from where another request ended
    """

    record: Record
    found: int
    reached: int = 0
    fan_out: int = 0
    rest: Entry | None = None
    path: list[tuple[Record, int]] = []
    continues: bool = False


class Mind:
    """What the policy objects of one manager share: the model, the ghosts, the shadow of LRU.

    `ghosts`  records of which something was evicted, by number, in the order of their first eviction
    `doubts`     are called with a class when records in it have changed
    `exposures`  are called with an entry whose record has changed
    """

    def __init__(self) -> None:
        self.doubts: list[Callable[[int], None]] = []
        self.exposures: list[Callable[[Entry], None]] = []
        self.model = Reentry()
        self.shadow = LruShadow()
        self.ghosts: dict[int, Record] = {}
        self.now = 0.0
        self.walk: Walk | None = None
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

    def remember(self, record: Record) -> None:
        """The last blocks of a record are evicted."""
        self.ghosts.setdefault(record.number, record)
        if len(self.ghosts) > MAX_GHOSTS:
            oldest = self.ghosts.pop(next(iter(self.ghosts)))
            self.model.forget(oldest, self.now)
            self.doubt(oldest.kind)

    def doubt(self, kind: int) -> None:
        """Records of this class may have a rank or a queue other than before."""
        for doubt in self.doubts:
            doubt(kind)

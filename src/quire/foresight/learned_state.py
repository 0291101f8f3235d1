"""The state of the policy `learned`: its model, evicted records, and its score against LRU."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from quire.core.node import Node
from quire.foresight.forecasts import Forecasts
from quire.foresight.lru_shadow import LruShadow
from quire.foresight.reentry import NUM_CLASSES, UNMET, Record, Reentry

MAX_GHOSTS = 1000
"""So many requests are known again after their last blocks were evicted."""

TRIAL = 16
"""Of so many answers one is kept on equal terms, to see whether answers are come back to."""

TRUST = 128
"""So many requests are compared before the comparison decides anything."""

APPRENTICE = 512
"""The policy is LRU for so many requests and until so many blocks were evicted as the cache has, and learns, unless
callers speak of times."""

LOSS = 0.0003
"""A loss against LRU of this share of all blocks ever asked for, and of what is left of the stake, makes the policy LRU, until
it is half of what may be lost by then."""

STAKE, LEAST_PROMPTS, MOST_PROMPTS = 0.08, 4, 24
"""Leaving LRU loses at first, as the latest blocks come back soonest. This share of the cache may be lost, within bounds in
prompts of mean length."""

PAYS_WITHIN = 8
"""Evicted blocks, in cache sizes, over which the stake shrinks to nothing: by then it has paid or it does not."""


class Walk(msgspec.Struct, gc=False, eq=False):
    """The path that a request found, deepest node first, and then the request, while it runs.

    `path`       the records that its blocks belonged to, a ghost first: (record, blocks)
    `previous`   of these, the one at the deepest node, if it had one
    `above`      the node that is touched next if the path goes on
    `found`      blocks of its prompt that were cached
    `reached`    `found`, and the evicted blocks after them whose record is remembered
    `fan_out`    nodes that continue what was found
    `continues`  whether it goes on from where another request ended
    `prompt`, `output`, `block_size`  in tokens; no output: what it has computed beyond its prompt
    """

    record: Record
    path: list[tuple[Record, int]] = []
    previous: Record | None = None
    above: Node | None = None
    found: int = 0
    reached: int = 0
    fan_out: int = 0
    continues: bool = False
    prompt: int = 0
    output: int = 0
    block_size: int = 1


class LearnedState:
    """The state that the policy objects of one manager share: model, ghosts, shadow of LRU.

    `model`      time until a request is continued; `shared` the same for the runs that requests share
    `walk`       the path that was touched last
    `ghosts`     records with evicted blocks, by number, in the order of their first eviction
    `answers`    of the continued requests: how many were continued beyond the prompt, and all
    `doubts`     are called with a record before and after its class changes
    `exposures`  are called with a node whose record has changed
    `gain`       blocks found minus those that LRU would have found; `asked` is the sum of requested ones
    `evicted`    blocks that made room
    `is_lru`     whether the order is that of LRU: as long as it is an apprentice, and where that would have found more
    """

    def __init__(self, apprentice: int = APPRENTICE) -> None:
        self._apprentice = apprentice
        self.doubts: list[Callable[[Record], None]] = []
        self.exposures: list[Callable[[Node], None]] = []
        self.model = Reentry()
        self.shared = Reentry(NUM_CLASSES, mixed=0.0)
        self.shadow = LruShadow()
        self.forecasts = Forecasts(self._unmet)
        self.ghosts: dict[int, Record] = {}
        self.now = 0.0
        self.walk = Walk(Record())
        self.num_requests = 0
        self.answers = [0.0, 0.0]
        self.gain = self.asked = self.evicted = self._left_lru = 0
        self.is_lru = apprentice > 0

    @property
    def trims(self) -> bool:
        """Whether blocks behind prompts have not been worth keeping."""
        matched, seen = self.answers
        return seen >= TRUST / TRIAL and matched < seen / 4

    def touched(self, node: Node) -> None:
        """Note a node that a request found: the path goes on upwards, or another one begins."""
        walk, owner = self.walk, node.note
        if node is not walk.above:
            walk = self.walk = Walk(Record(time=self.now), previous=owner)
        walk.above = node.parent
        if owner is not None:
            walk.path.append((owner, node.num_blocks))
        node.note = walk.record

    def judge(self, found: int, lru_found: int, asked: int, capacity: int) -> None:
        """Compare a request's hit with LRU's in a cache of `capacity` blocks."""
        self.gain += found - lru_found
        self.asked += asked
        if self.gain >= 0 and not self.is_lru:
            return
        prompt = self.asked / max(self.num_requests, 1)
        stake = min(max(STAKE * capacity, LEAST_PROMPTS * prompt), MOST_PROMPTS * prompt)
        left = 1 - (self.evicted - self._left_lru) / (PAYS_WITHIN * capacity)
        allowed = LOSS * self.asked + stake * max(left, 0)
        if self.is_lru:
            served = self.num_requests >= self._apprentice and self.evicted >= capacity
            if not (served or self.forecasts.spoken):
                self._left_lru = self.evicted
            else:
                self.is_lru = self.gain < -allowed / 2
        elif self.num_requests > TRUST:
            self.is_lru = self.gain < -allowed

    def learn_of_answer(self, previous: Record, found: int) -> None:
        """Learn from a request that continues one with an answer; `found` of its blocks were hits."""
        if previous.trimmed:
            return
        self.answers[0] += found > previous.prompt
        self.answers[1] += 1
        if self.answers[1] > TRUST:
            self.answers = [each / 2 for each in self.answers]

    def remember(self, record: Record) -> None:
        """Remember a record whose last blocks are evicted, for the first time."""
        self.ghosts[record.number] = record
        if len(self.ghosts) > MAX_GHOSTS:
            oldest = self.ghosts.pop(next(iter(self.ghosts)))
            self.model.forget(oldest, self.now)
            self.doubt(oldest)

    def doubt(self, record: Record) -> None:
        """Tell the listeners that the rank or queue of this record's blocks may change."""
        for doubt in self.doubts:
            doubt(record)

    def _unmet(self, record: Record) -> None:
        """Note that a record had no return in the time that its caller said."""
        self.doubt(record)
        self.model.learn(record, UNMET)
        self.doubt(record)

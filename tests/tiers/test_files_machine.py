"""Any sequence of calls on two tiers that share a directory, beside a dict, with what others do to it between them."""

import shutil
import tempfile
import time
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from upheavals import UPHEAVALS

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, record_of
from quire.tiers.files import Files
from turns import lived

HIT, ABSENT, CORRUPT, FOREIGN = Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT, Outcome.FOREIGN
STORED, PRESENT, FULL = Outcome.STORED, Outcome.PRESENT, Outcome.FULL
PAYLOADS = (100, 1000, 9000)
CAPACITY = 40_000

keys = st.lists(st.integers(0, 15).map(name_of), min_size=1, max_size=5, unique=True)
tiers = st.integers(0, 1)


class FilesMachine(RuleBasedStateMachine):
    """`held`: what each key may hold, payload size and generation; with upheavals it may be gone, never another.

    Every put that fits is stored, whatever was done to the directory.
    """

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="quire-files-"))
        self.path = self.root / "kv"
        self.held = {}
        self.sure = {}
        self.generation = 0
        self.skews = [0.0, 0.0]
        self.tiers = []

    @initialize(capacity=st.sampled_from([None, CAPACITY]))
    def begin(self, capacity):
        self.capacity = capacity
        self.tiers = [self.open(0), self.open(1)]

    def open(self, at):
        return Files(self.path, self.capacity, clock=lambda: time.time() + self.skews[at])

    @rule(at=tiers, some=keys, size=st.sampled_from(PAYLOADS))
    def put(self, at, some, size):
        self.generation += 1
        records = [record_of(key, size, self.generation) for key in some]
        outcomes = self.tiers[at].put(some, records, timeout_s=60)
        for key, outcome in zip(some, outcomes, strict=True):
            assert outcome in (STORED, PRESENT, FULL), self.tiers[at].last_failure
            assert outcome is not FULL or (self.capacity and len(some) * (size + 400) > CAPACITY)
            if outcome is STORED:
                self.held[key] = self.sure[key] = (size, self.generation)
                if self.capacity is not None:
                    self.sure = {}  # anything may have made room

    @rule(at=tiers, some=keys)
    def get(self, at, some):
        expected = [record_of(key, *self.held.get(key, (1000, 0))) for key in some]
        buffers = buffers_like(expected)
        outcomes = self.tiers[at].get(some, buffers, 60)
        for key, outcome, buffer, record in zip(some, outcomes, buffers, expected, strict=True):
            assert outcome in (HIT, ABSENT, CORRUPT, FOREIGN), self.tiers[at].last_failure
            assert outcome is not HIT or buffer == record
            assert outcome is HIT or key not in self.sure
            if outcome is CORRUPT:
                self.held.pop(key, None)

    @rule(at=tiers, some=keys)
    def delete(self, at, some):
        self.tiers[at].delete(some)
        for key in some:
            self.held.pop(key, None)
            self.sure.pop(key, None)

    @rule(at=tiers, some=keys)
    def touch(self, at, some):
        self.tiers[at].touch(some)

    @rule(at=tiers)
    def reopen(self, at):
        self.tiers[at].close()
        self.tiers[at] = self.open(at)

    @rule(at=tiers, skew=st.sampled_from([0.0, -3600.0, 3600.0, -1e9]))
    def jump(self, at, skew):
        self.skews[at] = skew

    @rule(upheaval=st.sampled_from(UPHEAVALS))
    def upheave(self, upheaval):
        if self.path.exists():
            upheaval(self.path)
        self.sure = {}

    @rule()
    def look(self):
        if self.path.exists():
            assert {entry.key for entry in self.tiers[0].scan()} >= set(self.sure)

    def teardown(self):
        for tier in self.tiers:
            tier.close()
        shutil.rmtree(self.root)


TestFilesMachine, TestFilesMachineLong = lived(FilesMachine, 12, 200, stateful_step_count=30)

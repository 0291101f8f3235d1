"""Any sequence of calls on a disk tier, beside a dict, with restarts and kills between them."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from upheavals import UPHEAVALS

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, record_of
from quire.tiers.disk import Disk
from quire.tiers.format import record_bytes
from turns import lived

STORED, PRESENT = Outcome.STORED, Outcome.PRESENT
PAYLOADS = (100, 1000, 9000, 70_000)
CAPACITY = 240_000

keys = st.lists(st.integers(0, 15).map(name_of), min_size=1, max_size=5, unique=True)


class DiskMachine(RuleBasedStateMachine):
    """`held`: the payload size and generation of each key that is there; evictions are told.

    Whatever was put is there until it is deleted or told to make room: over restarts, and where
    the directory is copied as a killed process would leave it.
    """

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="quire-disk-"))
        self.path = self.root / "0"
        self.held = {}
        self.generation = 0
        self.is_damaged = False
        self.disk = None

    @initialize(direct=st.sampled_from([None, False]))
    def begin(self, direct):
        self.direct = direct
        self.open()

    def open(self):
        self.disk = Disk(
            self.path,
            CAPACITY,
            direct=self.direct,
            ahead=20_000,
        )
        self.disk.evicting = self.evicted
        assert self.disk.recovered.is_clean or self.is_damaged
        if self.is_damaged:
            left = {entry.key for entry in self.disk.scan()}
            self.held = {key: state for key, state in self.held.items() if key in left}

    def evicted(self, gone, records):
        for key, record in zip(gone, records, strict=True):
            assert record == record_of(key, *self.held.pop(key))

    @rule(some=keys, data=st.data())
    def put(self, some, data):
        self.generation += 1
        sizes = [data.draw(st.sampled_from(PAYLOADS)) for _ in some]
        records = [
            record_of(key, size, self.generation) for key, size in zip(some, sizes, strict=True)
        ]
        outcomes = self.disk.put(some, records, timeout_s=60)
        for key, size, outcome in zip(some, sizes, outcomes, strict=True):
            if outcome is Outcome.STORED:
                self.held[key] = (size, self.generation)
            else:
                assert outcome in (Outcome.PRESENT, Outcome.FULL)
                if key in self.held and record_bytes(size) != record_bytes(self.held[key][0]):
                    assert outcome is Outcome.FULL, "a record of another size makes room"
                    del self.held[key]

    @rule(some=keys)
    def get(self, some):
        expected = [record_of(key, *self.held.get(key, (1000, 0))) for key in some]
        buffers = buffers_like(expected)
        for key, outcome, buffer, record in zip(
            some, self.disk.get(some, buffers, 60), buffers, expected, strict=True
        ):
            assert outcome is (Outcome.HIT if key in self.held else Outcome.ABSENT)
            assert outcome is Outcome.ABSENT or buffer == record

    @rule(some=keys)
    def delete(self, some):
        self.disk.delete(some)
        for key in some:
            self.held.pop(key, None)

    @rule(some=keys)
    def touch(self, some):
        self.disk.touch(some)

    @rule()
    def settle(self):
        assert self.disk.settle(60)

    @rule()
    def restart(self):
        self.disk.close()
        self.open()

    @rule()
    def kill(self):
        assert self.disk.settle(60)
        if not self.path.exists():  # others removed it, and nothing was stored since
            return
        again = self.root / str(int(self.path.name) + 1)
        shutil.copytree(self.path, again)
        self.disk.close()
        shutil.rmtree(self.path)
        self.path = again
        self.open()

    @rule(upheaval=st.sampled_from(UPHEAVALS), some=keys)
    def upheave(self, upheaval, some):
        """Others change the directory: what was there may be gone, and what is put from then on is there."""
        if not self.path.exists():
            return
        upheaval(self.path)
        self.is_damaged = True
        self.disk.evicting = None
        self.generation += 1
        for size in PAYLOADS:  # of each slab it is seen
            records = [record_of(key, size, self.generation) for key in some]
            outcomes = self.disk.put(some, records, 60)
            assert set(outcomes) <= {STORED, PRESENT, Outcome.FULL}, self.disk.last_failure
            for key, outcome in zip(some, outcomes, strict=True):
                if outcome is STORED:
                    self.held[key] = (size, self.generation)
        self.forget_lost()
        self.disk.evicting = self.evicted

    def forget_lost(self):
        """Read all that may be there: what is found is right."""
        for key, state in list(self.held.items()):
            record = record_of(key, *state)
            (buffer,) = buffers_like([record])
            (outcome,) = self.disk.get([key], [buffer], 60)
            assert outcome in (Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT, Outcome.FOREIGN)
            assert outcome is not Outcome.HIT or buffer == record
            if outcome is not Outcome.HIT:
                del self.held[key]

    @rule()
    def look(self):
        if self.is_damaged:
            return
        with Disk(self.path, read_only=True) as reader:
            assert {entry.key for entry in reader.scan()} == set(self.held)

    @invariant()
    def agrees(self):
        if self.disk is None:
            return
        self.disk.check()
        sizes = {key: record_bytes(size) for key, (size, _) in self.held.items()}
        assert {entry.key: entry.num_bytes for entry in self.disk.scan()} == sizes
        stats = self.disk.stats()
        assert (stats.num_records, stats.num_bytes) == (len(sizes), sum(sizes.values()))

    def teardown(self):
        if self.disk is not None:
            self.disk.close()
        shutil.rmtree(self.root)


TestDiskMachine, TestDiskMachineLong = lived(DiskMachine, 15, 300, stateful_step_count=30)

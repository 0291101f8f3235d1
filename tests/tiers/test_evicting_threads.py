"""Threads that share a tier which makes room by itself: what one of them alone puts and deletes is what it finds."""

import threading
import time
from collections import Counter

import numpy as np
import pytest

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import names_of, record_of
from quire.tiers.contract.threads import run_in_threads, switching_often
from quire.tiers.disk import Disk
from quire.tiers.format import new_buffer, record_bytes
from quire.tiers.host import Host

HIT, ABSENT, FOREIGN = Outcome.HIT, Outcome.ABSENT, Outcome.FOREIGN
STORED, PRESENT, FULL = Outcome.STORED, Outcome.PRESENT, Outcome.FULL
PAYLOADS = (100, 1000, 5000)
RECORDS = {
    (key, payload): record_of(key, payload) for key in names_of(range(40)) for payload in PAYLOADS
}
CAPACITY = 50_000
STEPS = 60


@pytest.fixture(autouse=True)
def by_short_turns():
    with switching_often():
        yield


class KeyOwner:
    """Uses keys that nobody else changes, and compares what it finds with what it did."""

    def __init__(self, tier, told, seed, first):
        self.tier, self.told = tier, told
        self.rng = np.random.default_rng([seed, first])
        self.keys = names_of(range(first, first + 20))
        self.held = {}
        """By key: the payload of its record, and how often it had been told that it goes when it was put."""

    def work(self):
        for _ in range(STEPS):
            some = [
                self.keys[int(at)]
                for at in self.rng.choice(20, self.rng.integers(1, 6), replace=False)
            ]
            action = self.rng.choice(["put", "put", "put", "delete", "get", "touch", "lease"])
            getattr(self, action)(some)
            self.get(some)

    def put(self, keys):
        payloads = {key: int(self.rng.choice(PAYLOADS)) for key in keys}
        before = {key: self.told[key] for key in keys}
        outcomes = self.tier.put(list(payloads), [RECORDS[each] for each in payloads.items()], 60)
        for (key, payload), outcome in zip(payloads.items(), outcomes, strict=True):
            had = self.held.pop(key, None)
            if outcome is PRESENT:
                assert had is not None
                assert had[0] == payload
                self.held[key] = had
            elif outcome is STORED:
                self.held[key] = payload, before[key]
            else:  # what it had of another size may have gone, and may have stayed
                assert outcome is FULL
                self.tier.delete([key])

    def delete(self, keys):
        self.tier.delete(keys, 60)
        for key in keys:
            self.held.pop(key, None)

    def get(self, keys):
        asked = [int(self.rng.choice(PAYLOADS)) for _ in keys]
        for key, payload in zip(keys, asked, strict=True):
            buffer = new_buffer(record_bytes(payload))
            (outcome,) = self.tier.get([key], [buffer], 60)
            had, told = self.held.get(key, (None, 0))
            if had is None:
                assert outcome is ABSENT
            elif outcome is ABSENT:
                wait_until(lambda key=key, told=told: self.told[key] > told)
                del self.held[key]
            else:
                assert outcome is (HIT if payload == had else FOREIGN)
                assert outcome is FOREIGN or buffer == RECORDS[key, payload]

    def touch(self, keys):
        self.tier.touch(keys)

    def lease(self, keys):
        self.tier.lease(keys, 0.0005)


def wait_until(holds):
    give_up = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < give_up, "a record is gone that nobody was told of"
        time.sleep(0.0001)


def use_beside(tier, is_over):
    """Read, use and list what others own, and look at all that is counted."""
    keys = names_of(range(40))
    rng = np.random.default_rng(0)
    while not is_over.is_set():
        some = [keys[int(at)] for at in rng.choice(40, 5, replace=False)]
        payload = int(rng.choice(PAYLOADS))
        buffers = [new_buffer(record_bytes(payload)) for _ in some]
        for key, outcome, buffer in zip(some, tier.get(some, buffers, 60), buffers, strict=True):
            assert outcome in (HIT, ABSENT, FOREIGN)
            assert outcome is not HIT or buffer == RECORDS[key, payload]
        tier.touch(some)
        tier.lease(some, 0.0005)
        tier.check()
        list(tier.scan())
        stats = tier.stats()
        assert stats.num_bytes <= stats.capacity_bytes
        if isinstance(tier, Disk) and rng.random() < 0.1:
            tier.flush()
            tier._records.write_all()


def run(tier, seed):
    told, telling = Counter(), threading.Lock()

    def evicting(keys, records):
        for key, record in zip(keys, records, strict=True):
            assert any(record == RECORDS[key, payload] for payload in PAYLOADS)
        with telling:
            told.update(keys)

    tier.evicting = evicting
    is_over = threading.Event()
    owners = [KeyOwner(tier, told, seed, first) for first in (0, 20)]

    def own(owner):
        try:
            owner.work()
        finally:
            owner.is_done = True
            if all(getattr(each, "is_done", False) for each in owners):
                is_over.set()

    run_in_threads(
        *(lambda owner=owner: own(owner) for owner in owners), lambda: use_beside(tier, is_over)
    )
    tier.check()
    listed = list(tier.scan())
    stats = tier.stats()
    assert stats.num_records == len(listed)
    assert stats.num_bytes == sum(each.num_bytes for each in listed)
    for owner in owners:
        owner.get(owner.keys)
    assert {each.key for each in listed} == {key for owner in owners for key in owner.held}


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(2))
def test_threads_that_evict_from_a_disk_leave_it_consistent(tmp_path, seed):
    with Disk(tmp_path, CAPACITY, ahead=20_000) as disk:
        run(disk, seed)
        assert disk.settle(10)
        for slab in disk._records.slabs.values():
            assert (slab.pins, slab.leaving, slab.moved) == ({}, set(), {})
            assert not slab.index.num_reserved
    with Disk(tmp_path, CAPACITY) as disk:
        assert disk.recovered.is_clean
        disk.check()


@pytest.mark.parametrize("seed", range(2))
def test_threads_that_evict_from_host_memory_leave_it_consistent(seed):
    with Host(CAPACITY) as host:
        run(host, seed)
        for shelf in host._arena.shelves.values():
            assert not shelf.index.num_reserved
        assert (host._calls, dict(host._filling)) == ([], {})


@pytest.mark.parametrize("kind", [Host, Disk])
def test_a_victim_is_reported_before_its_deletion_returns(tmp_path, kind):
    keys = names_of(range(40))
    order = []

    def evicting(gone, _records):
        tier.evicting = lambda *_: None
        deleting = threading.Thread(target=delete, args=(gone,))
        deleting.start()
        deleting.join(0.1)
        order.append("told")
        threads.append(deleting)

    def delete(gone):
        tier.delete(gone, 10)
        order.append("deleted")

    threads = []
    with kind(CAPACITY) if kind is Host else kind(tmp_path, CAPACITY, ahead=1) as tier:
        tier.evicting = evicting
        for key in keys:
            tier.put([key], [RECORDS[key, 5000]], 60)
        threads[0].join(10)
        assert order == ["told", "deleted"]
        tier.check()

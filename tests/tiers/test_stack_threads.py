"""Threads that share a stack of real tiers: what one of them alone stores and deletes is what it loads."""

import random
import threading
import time

import pytest
from dict_tier import DictTier
from processes import wait_until

from quire.tiers import Disk, Host, StackSettings, TierStack
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import names_of, record_of
from quire.tiers.contract.threads import run_in_threads, switching_often

KEYS = names_of(range(60))
RECORDS = {key: record_of(key) for key in KEYS}
SIZE = len(RECORDS[KEYS[0]])
STEPS = 40


@pytest.fixture(autouse=True)
def by_short_turns():
    with switching_often():
        yield


def load(stack, keys):
    """Return which keys were hits, after a check that these are right."""
    outcomes, buffers = stack.load(keys, [SIZE] * len(keys))
    for key, outcome, buffer in zip(keys, outcomes, buffers, strict=True):
        assert outcome in (Outcome.HIT, Outcome.ABSENT)
        assert buffer == (RECORDS[key] if outcome is Outcome.HIT else None)
    stack.give_back(buffers)
    return {key for key, outcome in zip(keys, outcomes, strict=True) if outcome is Outcome.HIT}


class StackClient:
    """Uses keys that nobody else stores or deletes."""

    def __init__(self, stack, seed, first):
        self.stack = stack
        self.rng = random.Random(f"{seed} {first}")
        self.keys = KEYS[first : first + 30]
        self.held = set()
        self.prefetches = []

    def work(self):
        for _ in range(STEPS):
            some = self.rng.sample(self.keys, self.rng.randint(1, 6))
            getattr(self, self.rng.choice(["store", "store", "delete", "prefetch"]))(some)
            # What waits for the disk may be in no tier for a moment, but what was deleted is in none.
            assert load(self.stack, some) <= self.held

    def store(self, keys):
        records = self.stack.records([SIZE] * len(keys))
        for record, key in zip(records, keys, strict=True):
            record[:] = RECORDS[key]
        outcomes = self.stack.store(keys, records)
        assert set(outcomes) <= {Outcome.STORED, Outcome.PRESENT}
        self.held.update(keys)

    def delete(self, keys):
        self.stack.delete(keys)
        self.held.difference_update(keys)
        assert self.stack.find(keys, contiguous=False) == [-1] * len(keys)

    def prefetch(self, keys):
        self.prefetches.append(self.stack.prefetch(keys, [SIZE] * len(keys)))
        if self.rng.random() < 0.5:
            self.prefetches[-1].cancel()


@pytest.mark.cases(1)
@pytest.mark.parametrize("seed", range(2))
def test_threads_over_a_small_host_and_a_disk_read_right_bytes(tmp_path, seed):
    host, disk = Host(12 * SIZE), Disk(tmp_path, "1MiB")
    settings = StackSettings(
        gate=False, load_timeout_s=20, lookup_timeout_s=20, batch_bytes=3 * SIZE
    )
    with TierStack([host, disk], settings) as stack:
        owners = [StackClient(stack, seed, first) for first in (0, 30)]
        working = [threading.Thread(target=lambda: None)]

        def use_beside():
            rng = random.Random(seed)
            while any(thread.is_alive() for thread in working):
                some = rng.sample(KEYS, 8)
                load(stack, some)
                stack.count_use(some)
                stack.stats()
                stack.check()

        def work():
            working[:] = [threading.current_thread()]
            run_in_threads(*(owner.work for owner in owners))

        run_in_threads(work, use_beside)
        assert stack.drain(20)
        for owner in owners:
            assert load(stack, sorted(owner.held)) == owner.held
        stack.check()
        for prefetch in (each for owner in owners for each in owner.prefetches):
            prefetch.cancel()
        wait_until(lambda: not stack._shared.deletions._rises, "what is read is read")
        wait_until(lambda: not sum(map(len, stack._reader._flights)), "what is read is delivered")
        assert not any(shelf.index.num_reserved for shelf in host._arena.shelves.values())
        assert not any(slab.pins or slab.leaving for slab in disk._records.slabs.values())


def test_two_threads_that_close_a_stack_both_return_when_it_is_closed():
    class Slow(DictTier):
        is_shut = False

        def close(self):
            if not self.is_closed:  # the second call finds it closed already, as a disk's does
                self.is_closed = True
                time.sleep(0.1)
                self.is_shut = True

    def close():
        stack.close()
        assert tier.is_shut

    tier, both = Slow(), threading.Barrier(2)
    stack = TierStack([tier])
    stack.drain = lambda _: both.wait(10) is not None
    run_in_threads(close, close)

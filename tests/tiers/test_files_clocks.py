"""Clocks of machines that share a directory: none of them decides what others can store."""

import itertools
import os
import random
import tempfile
import time
from unittest.mock import patch

import pytest
from hypothesis import example
from hypothesis import strategies as st

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import name_of, names_of, record_of, records_of
from quire.tiers.files import Files
from quire.tiers.files.clock import STEP_NS, SharedClock
from quire.tiers.files.room import file_of
from quire.tiers.format import record_bytes
from turns import drawn

STORED, HOUR = Outcome.STORED, 3600.0
SIZE = record_bytes(1000)
PLACES = 40

skews = st.sampled_from([-1e9, -HOUR, -1.0, -0.004, 0.0, 0.004, 1.0, HOUR, 1e8])


class SkewedProcess:
    """A process whose clock is wrong, and wrong by something else after it has begun anew."""

    def __init__(self, path, skew, *, is_told):
        self.path = path
        self.told = is_told
        self.begin(skew)

    def begin(self, skew):
        with self.speaking():
            self.tier = Files(self.path, PLACES * SIZE, clock=lambda: time.time() + skew)

    def put(self, keys):
        with self.speaking():
            return self.tier.put(keys, records_of(keys), timeout_s=30)

    def speaking(self):
        """Enter to write to a file system that takes the writer's word for the time, unless it tells its own."""
        return patch.object(SharedClock, "set", SharedClock.set if self.told else lambda *_: None)


@pytest.mark.ci
@drawn(
    2,
    60,
    machines=st.lists(skews, min_size=2, max_size=4),
    is_told=st.booleans(),
    jumps=st.lists(st.tuples(st.integers(0, 3), skews), max_size=6),
    seed=st.integers(0, 9),
)
@example(machines=[HOUR, 0.0], is_told=False, jumps=[], seed=0)
@example(machines=[0.0, -1e9], is_told=False, jumps=[(0, -1e9)], seed=0)
def test_every_machine_can_store_within_the_capacity_whatever_its_clock_says(
    machines, is_told, jumps, seed
):
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as path:
        made = [SkewedProcess(path, skew, is_told=is_told) for skew in machines]
        numbers = iter(range(10_000))
        for at, skew in [*jumps, *((number, None) for number in range(len(made) * 2))]:
            machine = made[at % len(made)]
            if skew is not None:
                machine.tier.close()
                machine.begin(skew)
            for _ in range(12):
                prompt = names_of([next(numbers) for _ in range(chance.randint(1, 5))])
                assert machine.put(prompt) == [STORED] * len(prompt)
                assert machine.tier.contains(prompt) == [True] * len(prompt)
            assert machine.tier._room._sweeper.settle(30)  # it would delete what the next one puts
        held = sum(entry.num_bytes for entry in made[0].tier.scan())
        each_other = PLACES * SIZE // 10 + 5 * SIZE
        assert held <= PLACES * SIZE + (len(made) - 1) * each_other
        for machine in made:
            machine.tier.close()


def test_files_from_the_future_and_from_1970_make_room_for_all_puts(tmp_path):
    old = names_of(range(PLACES))
    with Files(tmp_path, PLACES * SIZE) as tier:
        tier.put(old, records_of(old))
    for number, key in enumerate(old):
        stamp = time.time() + HOUR if number % 2 else 0.0
        os.utime(file_of(str(tmp_path), key), (stamp, stamp))
    with Files(tmp_path, PLACES * SIZE) as tier:
        keys = names_of(range(1000, 1200))
        for key in keys:
            assert tier.put([key], [record_of(key)], timeout_s=30) == [STORED]
        assert tier.contains(old) == [False] * PLACES
        assert tier.contains(keys[-PLACES // 2 :]) == [True] * (PLACES // 2)


def test_a_record_from_the_future_is_recent_once_it_is_used(tmp_path):
    old = names_of(range(10))
    with Files(tmp_path, PLACES * SIZE) as tier, Files(tmp_path, PLACES * SIZE) as other:
        tier.put(old, records_of(old))
        for key in old:
            os.utime(file_of(str(tmp_path), key), (time.time() + HOUR,) * 2)
        for number in range(60):
            key = name_of(1000 + number)
            assert tier.put([key], [record_of(key)], timeout_s=30) == [STORED]
            other.touch(old)
        assert tier.contains(old) == [True] * 10


@pytest.mark.cases(2)
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("skew", [-HOUR, 0.004, HOUR])
def test_the_head_of_a_prompt_outlives_its_tail_beside_a_machine_with_another_clock(
    tmp_path, skew, is_told
):
    prompt = names_of(range(20))
    wrong = SkewedProcess(tmp_path, skew, is_told=is_told)
    assert wrong.put(prompt[:10]) == [STORED] * 10
    assert wrong.put(prompt) == [Outcome.PRESENT] * 10 + [STORED] * 10
    right = SkewedProcess(tmp_path, 0.0, is_told=is_told)
    for number in range(60):
        assert right.put([name_of(1000 + number)]) == [STORED]
        there = right.tier.contains(prompt)
        assert there == sorted(there, reverse=True)
    assert not all(there)
    for each in (wrong, right):
        each.tier.close()


@pytest.mark.parametrize("skew", [-HOUR, HOUR])
def test_records_of_a_machine_with_another_clock_go_in_the_order_of_their_use(tmp_path, skew):
    wrong, right = (SkewedProcess(tmp_path, each, is_told=True) for each in (skew, 0.0))
    prompts = [names_of(range(at, at + 10)) for at in (0, 100, 200)]
    for machine, prompt in zip((right, wrong, right), prompts, strict=True):
        assert machine.put(prompt) == [STORED] * 10
        time.sleep(0.02)  # within two ticks, two machines have no order
    listed = [entry.key for entry in right.tier.scan()]  # those used last first
    assert listed == [key for prompt in reversed(prompts) for key in prompt]
    for each in (wrong, right):
        each.tier.close()


@pytest.mark.parametrize("behind_ns", [0, 4_000_000])
def test_stamps_grow_though_the_file_system_goes_in_ticks(behind_ns):
    clock = SharedClock(time.time)
    newest = [0]
    for behind in (0, behind_ns, 0, behind_ns):
        clock.set(time.time_ns() - behind)
        assert clock.now_ns() >= newest[-1], "an own stamp is from the future"
        newest.append(clock.stamps(3))
    assert all(one + 3 * STEP_NS < other for one, other in itertools.pairwise(newest))


def test_a_file_system_that_goes_back_leaves_stamps_as_they_are():
    clock = SharedClock(lambda: 100.0)
    before = clock.stamps(3)
    clock.set(int(40e9))
    assert before + 3 * STEP_NS < clock.stamps(3) < int(101e9)
    assert clock.now_ns() >= before
    clock.set(int(200e9))
    assert clock.now_ns() >= int(200e9)

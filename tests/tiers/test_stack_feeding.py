"""Jobs of a stack's feeding: their start, order, and waiters. In virtual time."""

import threading
from itertools import pairwise

import pytest
from stack_help import KEYS, RECORDS, SIZE, Stacked, store, wanted

from quire.tiers import Host, StackSettings, TierStack
from quire.tiers.stack.background_writer import (
    FIRST_S,
    LOOK_S,
    MOST_S,
    PATIENCE_S,
    REST_S,
    SETTLED_S,
)

MUCH = 1000
"""Bytes that may wait."""

SHARE = StackSettings().busy_share

SOON = {
    "find": lambda stack: stack.find(KEYS[:1]),
    "stats": lambda stack: stack.stats(),
    "delete": lambda stack: stack.delete(KEYS[:1]),
    "drain": lambda stack: stack.drain(5.0),
}


class Fed:
    """Work that notes when it ran, and takes so long."""

    def __init__(self, stacked, stack):
        self.stacked, self.stack = stacked, stack
        self.took_s = 0.0
        self.ran = []

    def feed(self, *numbers, num_bytes=100):
        def work():
            self.ran.append((numbers, round(self.stacked.lanes.time_s, 6)))
            self.stacked.lanes.sleep(self.took_s)
            store(self.stack, numbers)

        return self.stack.feeding.begin([KEYS[i] for i in numbers], work, num_bytes)

    @property
    def order(self):
        return [numbers for numbers, _ in self.ran]


def fed_in(scenario, budget_s=FIRST_S, **settings):
    stacked = Stacked("host", "disk", **settings)

    def with_budget(stack, host, disk):
        stack.feeding.adjust_budget(budget_s - FIRST_S)
        return scenario(Fed(stacked, stack), stack, stacked.lanes)

    return stacked.run(with_budget)


def test_within_the_budget_it_begins_at_once_the_oldest_first():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.004
        for number in range(5):
            fed.feed(number)
        lanes.sleep(6 * fed.took_s)
        assert fed.ran == [((number,), round(0.004 * number, 6)) for number in range(5)]
        assert wanted(stack, KEYS[:6]) == [False] * 5 + [True]

    fed_in(scenario)


def test_a_spent_budget_grows_by_a_small_share_of_the_time():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.004
        for number in range(5):
            fed.feed(number)
        lanes.sleep(5 * fed.took_s / SHARE)
        begun = [when for _, when in fed.ran]
        assert fed.order == [(0,), (1,), (2,), (3,), (4,)]
        for earlier, later in pairwise(begun):
            assert later - earlier == pytest.approx(fed.took_s / SHARE, rel=0.1)

    fed_in(scenario, budget_s=0.0001)


def test_feeding_spends_no_more_than_hits_saved():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.1
        for number in range(8):
            fed.feed(number, num_bytes=MUCH)
        lanes.sleep(1.0)
        assert len(fed.ran) == 1
        stack.feeding.adjust_budget(0.25)
        lanes.sleep(1.0)
        assert len(fed.ran) == 3
        assert not stack.feeding.has_room(MUCH)

    fed_in(scenario, budget_s=0.0001)


def test_the_budget_is_bounded():
    def scenario(fed, stack, lanes):
        stack.feeding.adjust_budget(10 * MOST_S)
        stack.feeding.adjust_budget(-MOST_S)
        fed.took_s = 0.01
        for number in range(3):
            fed.feed(number, num_bytes=MUCH)
        lanes.sleep(0.9)
        assert fed.order == [(0,)]
        assert not stack.feeding.has_room(MUCH)

    fed_in(scenario)


def test_beyond_the_budget_there_is_no_room_for_more_than_may_wait():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.01
        asked, found = 0, 0
        for number in range(400):
            asked += 1
            if stack.feeding.has_room(MUCH):
                fed.feed(number % 32, num_bytes=MUCH // 4)
                found += 1
            lanes.sleep(0.1)
        assert fed.took_s * len(fed.ran) <= 40 * SHARE + 2 * fed.took_s
        assert stack.stats().passed_over == asked - found > asked // 2
        assert f"{asked - found} times a prompt was not handed down" in str(stack)

    fed_in(scenario, budget_s=0.0001)


def test_within_the_budget_there_is_room_however_much_waits():
    def scenario(fed, stack, lanes):
        for number in range(8):
            assert stack.feeding.has_room(MUCH)
            fed.feed(number, num_bytes=MUCH)

    fed_in(scenario)


def test_finish_drops_a_job_without_waiting_if_the_budget_is_spent():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.01
        first, second, third = (fed.feed(number) for number in range(3))
        lanes.sleep(2 * fed.took_s)
        assert fed.order == [(0,)]
        for each in (first, second):
            begun_s = lanes.now()
            stack.feeding.finish(each)
            assert each.is_over
            assert lanes.now() == begun_s
        assert stack.find(KEYS[1:2]) == [-1]
        stack.feeding.adjust_budget(1.0)
        stack.feeding.finish(third)
        assert fed.order == [(0,), (2,)]
        assert stack.stats().passed_over == 1

    fed_in(scenario, budget_s=0.0001)


def test_finish_runs_a_job_on_the_budget():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.5
        for number in range(20):
            stack.feeding.finish(fed.feed(number))
        assert len(fed.ran) == 3
        assert stack.stats().passed_over == 17

    fed_in(scenario, budget_s=1.01)


def test_a_busy_share_of_one_drops_no_job():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.2
        for number in range(20):
            assert stack.feeding.has_room(MUCH)
            last = fed.feed(number, num_bytes=MUCH)
            lanes.sleep(0.05)
        stack.feeding.finish(last)
        assert (19,) in fed.order
        assert stack.drain(10.0)
        assert len(fed.ran) == 20

    fed_in(scenario, budget_s=-10.0, busy_share=1.0)


def test_while_the_engine_rests_all_is_done_and_costs_no_budget():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.5
        stack.feeding.engine_computes()
        for number in range(8):
            fed.feed(number)
        lanes.sleep(1.0)
        assert len(fed.ran) == 1
        stack.feeding.engine_rests()
        lanes.sleep(SETTLED_S + 8 * fed.took_s)
        assert len(fed.ran) == 8
        # The first one alone was paid for, and rests do not count: after so long computing the budget is made good.
        stack.feeding.engine_computes()
        lanes.sleep(0.9 * (fed.took_s / SHARE - 1.5))
        assert not stack.feeding.has_room(0)
        lanes.sleep(0.2 * fed.took_s / SHARE)
        assert stack.feeding.has_room(0)

    fed_in(scenario)


def test_a_pause_between_two_requests_is_no_rest():
    def scenario(fed, stack, lanes):
        stack.feeding.engine_computes()
        assert stack.feeding.has_room(MUCH)
        fed.feed(0)
        for _ in range(20):
            stack.feeding.engine_rests()
            lanes.sleep(0.9 * SETTLED_S)
            stack.feeding.engine_computes()
            lanes.sleep(0.1)
        assert fed.ran == []
        stack.feeding.engine_rests()
        lanes.sleep(1.1 * SETTLED_S)
        assert fed.order == [(0,)]

    fed_in(scenario)


def test_jobs_wait_while_the_engine_computes_but_not_for_ever():
    def scenario(fed, stack, lanes):
        stack.feeding.engine_computes()
        stack.feeding.adjust_budget(1.0)
        assert stack.feeding.has_room(MUCH)
        fed.feed(0)
        lanes.sleep(1.0)
        assert fed.ran == []
        stack.feeding.engine_rests()
        lanes.sleep(0.1)
        assert fed.order == [(0,)]
        stack.feeding.engine_computes()
        fed.feed(1)
        lanes.sleep(REST_S - 0.1)
        assert len(fed.ran) == 1
        lanes.sleep(0.2)
        assert fed.order == [(0,), (1,)]

    fed_in(scenario)


def test_a_queue_half_full_is_fed_while_the_engine_computes():
    def scenario(fed, stack, lanes):
        stack.feeding.engine_computes()
        stack.feeding.adjust_budget(1.0)
        assert stack.feeding.has_room(MUCH)
        for number in range(4):
            fed.feed(number, num_bytes=MUCH // 8 + 1)
            lanes.sleep(0.1)
            assert bool(fed.ran) == (number == 3)

    fed_in(scenario)


def test_beside_an_engine_that_says_when_it_computes_nothing_is_done_in_advance():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.01
        stack.feeding.engine_rests()
        lanes.sleep(1000.0)
        stack.feeding.engine_computes()
        for number in range(32):
            fed.feed(number)
        lanes.sleep(3.5 * fed.took_s / SHARE)
        assert len(fed.ran) == 4

    fed_in(scenario)


@pytest.mark.parametrize("asking", SOON.values(), ids=SOON)
def test_a_job_that_is_waited_for_begins_at_once_and_costs_no_budget(asking):
    def scenario(fed, stack, lanes):
        fed.took_s = 0.02
        fed.feed(0)
        fed.feed(1)
        budget_s = stack.feeding._budget_s
        asking(stack)
        assert fed.ran[0] == ((0,), 0.0)
        assert stack.feeding._budget_s >= budget_s

    fed_in(scenario, budget_s=-10.0)


def test_a_job_that_is_waited_for_passes_earlier_jobs():
    def scenario(fed, stack, lanes):
        fed.took_s = 0.002
        for number in range(5):
            fed.feed(number)
        assert stack.find(KEYS[3:4]) == [0]
        assert fed.order == [(3,)]
        assert fed.feed(5).wait(1.0)
        assert fed.order == [(3,), (5,)]

    fed_in(scenario, budget_s=-10.0)


def test_a_lookup_of_other_keys_waits_for_no_job():
    def scenario(fed, stack, lanes):
        fed.feed(0)
        assert stack.find(KEYS[5:6]) == [-1]
        assert fed.ran == []

    fed_in(scenario, budget_s=-10.0)


def test_the_keys_of_a_job_are_known_until_it_is_stored():
    def scenario(fed, stack, lanes):
        fed.feed(0, 1)
        assert stack.feeding.has(KEYS[:3]).tolist() == [True, True, False]
        assert stack.drain(5.0)
        assert not stack.feeding.has(KEYS[:3]).any()
        assert wanted(stack, KEYS[:3]) == [False, False, True]

    fed_in(scenario)


@pytest.mark.parametrize("asking", [SOON["drain"], SOON["stats"], lambda _: None])
def test_feeding_is_not_faster_than_the_slowest_tier_writes(asking):
    def scenario(fed, stack, lanes):
        disk = stack.tiers[1]
        disk.put_s = 0.05
        for number in range(20):
            fed.feed(number)
        asking(stack)
        lanes.sleep(20 * (disk.put_s + LOOK_S) + 1.0)
        assert sorted(disk.records) == sorted(KEYS[:20])
        assert stack.stats().tiers[1].dropped == 0
        assert fed.order == [(number,) for number in range(20)]

    fed_in(scenario, queue_bytes=4 * SIZE)


def test_a_tier_that_hangs_does_not_keep_the_others_from_being_fed():
    def scenario(fed, stack, lanes):
        host, disk = stack.tiers
        disk.put_s = 1000.0
        for number in range(10):
            fed.feed(number)
        lanes.sleep(PATIENCE_S + 1.0)
        assert sorted(host.records) == sorted(KEYS[:10])

    fed_in(scenario, queue_bytes=4 * SIZE)


def test_an_error_in_a_job_reaches_its_waiter_and_the_next_job_runs():
    def scenario(fed, stack, lanes):
        broken = stack.feeding.begin(KEYS[:1], lambda: 1 / 0, 100)
        fed.feed(1)
        assert broken.wait(1.0)
        assert isinstance(broken.error, ZeroDivisionError)
        assert stack.drain(5.0)
        assert fed.order == [(1,)]

    fed_in(scenario)


def test_a_job_given_to_a_closed_stack_is_over_at_once():
    def scenario(fed, stack, lanes):
        before = fed.feed(0)
        stack.close()
        assert before.is_over
        assert fed.order == [(0,)]
        for _ in range(2):
            assert stack.feeding.begin(KEYS[:1], lambda: None, 100).wait(1.0)

    fed_in(scenario)


def test_work_that_is_just_being_taken_up_is_waited_for():
    """A lookup between the two steps of taking up a job, without the lock, must still find it."""

    class Waiting(dict):
        def __delitem__(self, job):
            super().__delitem__(job)
            asking.start()
            asking.join(0.1)

    def ask():
        stack.feeding.wait(10.0, KEYS[:1])
        found.extend(host.contains(KEYS[:1]))

    found = []
    asking = threading.Thread(target=ask)
    host = Host("1MiB")
    with TierStack([host], StackSettings(busy_share=1)) as stack:
        stack.feeding._waiting = Waiting()
        stack.feeding.begin(KEYS[:1], lambda: stack.store(KEYS[:1], RECORDS[:1]), SIZE)
        stack.drain(10)
        asking.join(10)
    assert found == [True]

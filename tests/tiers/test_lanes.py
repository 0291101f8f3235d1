"""Lanes, deadlines, and the virtual time that tests run them in."""

import threading
import time
from functools import partial

import pytest
from simulated_lanes import SimulatedLanes

from quire.errors import InvariantError
from quire.tiers.stack.lanes import Deadline, Lanes, TierLane


def job(work, drop=lambda: None):
    return work, drop


@pytest.fixture
def lanes():
    return SimulatedLanes(1)


def a_lane(lanes, num_threads=1):
    return TierLane(lanes, "test", num_threads)


def test_jobs_of_one_owner_run_in_order(lanes):
    done = []

    def main():
        lane = a_lane(lanes)
        for number in range(20):
            lane.submit("me", *job(lambda number=number: done.append(number)))
        lanes.sleep(1)

    lanes.run(main)
    assert done == list(range(20))


def test_an_owner_with_many_jobs_does_not_hold_up_one_with_one(lanes):
    done = []

    def one(name):
        lanes.sleep(1.0)
        done.append((name, lanes.time_s))

    def main():
        lane = a_lane(lanes)
        for _ in range(100):
            lane.submit("many", *job(lambda: one("many")))
        lanes.sleep(0.5)
        lane.submit("few", *job(lambda: one("few")))
        lanes.sleep(5)

    lanes.run(main)
    assert ("few", 2.0) in done or ("few", 3.0) in done


def test_a_job_that_hangs_occupies_one_thread(lanes):
    done = []

    def main():
        lane = a_lane(lanes, num_threads=2)
        lane.submit("hung", *job(lambda: lanes.sleep(1e9)))
        for number in range(10):
            lane.submit("me", *job(lambda number=number: done.append(number)))
        lanes.sleep(1)
        assert len(lane._alive) == 2

    lanes.run(main)
    assert done == list(range(10))


def test_a_closed_lane_drops_what_waits_and_what_comes(lanes):
    done, dropped, closed = [], [], []

    def main():
        lane = a_lane(lanes)
        lane.submit("me", *job(lambda: lanes.sleep(5)))
        lanes.sleep(1)
        for number in range(3):
            lane.submit("me", *job(lambda: done.append(1), lambda n=number: dropped.append(n)))
        lane.close()
        lane.close()
        lane.submit("me", *job(lambda: done.append(1), lambda: dropped.append("late")))
        assert not lane.ended.wait(0)
        lane.ended.wait()
        closed.append(lanes.time_s)

    lanes.run(main)
    assert (done, dropped, closed) == ([], [0, 1, 2, "late"], [5.0])


def test_threads_begin_with_the_first_jobs_and_end_with_the_lane():
    before = threading.active_count()
    lane = TierLane(Lanes(), "test", 3)
    assert threading.active_count() == before
    done = threading.Semaphore(0)
    for _ in range(50):
        lane.submit("me", *job(done.release))
    for _ in range(50):
        assert done.acquire(timeout=10)
    assert threading.active_count() <= before + 3
    lane.close()
    assert lane.ended.wait(10)
    while threading.active_count() > before:
        time.sleep(0.001)


class NoThreads(Lanes):
    """A system that has no thread left after so many."""

    def __init__(self, num_left):
        self.num_left = num_left

    def spawn(self, name, work):
        if not self.num_left:
            raise RuntimeError("can't start new thread")
        self.num_left -= 1
        super().spawn(name, work)


def test_jobs_of_a_lane_without_threads_are_dropped():
    lanes, dropped = NoThreads(0), []
    lane = TierLane(lanes, "test", 3)
    for number in range(3):
        lane.submit(
            "me", *job(lambda: pytest.fail("nobody runs it"), partial(dropped.append, number))
        )
    assert (dropped, len(lane._alive)) == ([0, 1, 2], 0)
    lanes.num_left, done = 1, threading.Event()
    lane.submit("me", *job(done.set))
    assert done.wait(10), "once there are threads again, it goes on"
    lane.close()
    assert lane.ended.wait(10)


def test_the_threads_of_a_lane_do_all_jobs_where_no_more_can_be_started():
    lane, go_on, done = TierLane(NoThreads(1), "test", 3), threading.Event(), threading.Semaphore(0)
    lane.submit("me", *job(go_on.wait))
    for _ in range(5):
        lane.submit("me", *job(done.release, lambda: pytest.fail("it is not dropped")))
    go_on.set()
    for _ in range(5):
        assert done.acquire(timeout=10)
    lane.close()
    assert lane.ended.wait(10)


def test_a_deadline_passes(lanes):
    def main():
        deadline = Deadline(lanes, 1.0)
        lanes.sleep(0.25)
        assert deadline.left_s == pytest.approx(0.75)
        lanes.sleep(0.75)
        assert deadline.passed

    lanes.run(main)


def test_virtual_time_stands_still_while_anybody_can_go_on(lanes):
    def main():
        lanes.sleep(1e6)
        for _ in range(100):
            lanes.pause()
        return lanes.time_s

    assert lanes.run(main) == 1e6


def test_a_deadlock_is_found(lanes):
    with pytest.raises(InvariantError, match="deadlock"):
        lanes.run(lambda: lanes.signal().wait())


def test_an_error_in_a_simulated_thread_ends_the_simulation(lanes):
    def main():
        lanes.spawn("bad", lambda: 1 // 0)
        lanes.sleep(1e9)

    with pytest.raises(ZeroDivisionError):
        lanes.run(main)


def test_threads_that_still_wait_at_the_end_are_ended():
    before = threading.active_count()
    lanes = SimulatedLanes(3)

    def main():
        for _ in range(5):
            lanes.spawn("waits", lambda: lanes.signal().wait())
        lanes.sleep(1)

    lanes.run(main)
    assert threading.active_count() == before

"""Order of admission, preemption, and the bound on overtaking."""

import pytest
from scheduling_help import PretendLoop

from quire import ops
from quire.errors import DeadlinePassed, OutOfBlocks, QueueTimeout
from quire.scheduling import Limits


def test_higher_priorities_are_admitted_first_and_equal_ones_in_order_of_arrival():
    loop = PretendLoop(limits=Limits(1, 20))
    low, first, high, second = (loop.add([n], 1, priority=p) for n, p in enumerate((-1, 0, 1, 0)))
    loop.run()
    assert loop.finished == [high, first, second, low]


def test_the_last_of_the_lowest_priority_is_preempted_and_comes_back_before_those_behind():
    loop = PretendLoop(num_blocks=10, limits=Limits(3, 40))
    low = loop.add([1] * 9, 16, priority=-1)
    high = [loop.add([n] * 9, 16) for n in (2, 3)]
    loop.step()
    behind = loop.add([4] * 25, 1, priority=-1)
    loop.run()
    assert low.num_preempted > 0
    assert high[0].num_preempted == 0
    assert loop.finished == [*high, low, behind]
    assert 0 < low.patience <= loop.scheduler.limits.max_passed - len(high)
    loop.check_empty()


def test_a_job_is_passed_no_more_often_than_the_limit_by_higher_priorities():
    loop = PretendLoop(limits=Limits(1, 20, max_passed=5))
    low = loop.add([1, 2], 1, priority=-1)
    high = []
    while low.state != "finished":
        high += [loop.add([3, len(high) % 50], 1) for _ in range(2)]
        loop.step()
    assert len([job for job in high if job.state == "finished"]) == 5
    assert low.patience == 0


def test_a_large_job_is_passed_no_more_often_than_the_limit_by_small_ones_that_hit():
    loop = PretendLoop(num_blocks=20, limits=Limits(8, 60, max_passed=6))
    small = [loop.add([1, 2, 3, 4, 5], 7) for _ in range(6)]
    loop.step()
    loop.step()
    large = loop.add(list(range(50)), 20)
    for _ in range(200):
        small.append(loop.add([1, 2, 3, 4, 5], 7))
        loop.step()
        if large.state == "finished":
            break
    assert large.state == "finished"
    assert 0 <= large.patience < 6


def test_a_job_whose_deadline_passed_is_given_up_wherever_it_is():
    loop = PretendLoop(limits=Limits(2, 6))
    decoding = loop.add([1], 30, deadline=3.0)
    prefilling = loop.add(range(30), 30, deadline=4.0)
    waiting = loop.add([2], 1, deadline=5.0, priority=-1)
    loop.step(now=1.0)
    assert [job.state for job in (decoding, prefilling, waiting)] == ["running"] * 2 + ["waiting"]
    assert loop.step(now=3.0).jobs[0] is prefilling
    other = loop.add([3], 2, deadline=100.0, priority=-1)
    assert loop.step(now=5.0).jobs == [other]
    assert [job for job, _ in loop.scheduler.given_up] == [decoding, waiting, prefilling]
    assert all(isinstance(error, DeadlinePassed) for _, error in loop.scheduler.given_up)
    loop.step(now=6.0)
    loop.check_empty()


def test_a_job_that_has_not_begun_when_its_wait_is_over_is_given_up_and_no_other():
    loop = PretendLoop(limits=Limits(1, 6))
    first = loop.add([1], 5, start_by=2.0)
    patient, late = loop.add([2], 1), loop.add([3], 1, start_by=3.0)
    loop.step(now=1.0)
    loop.step(now=2.0)  # the first one runs: its wait is over, and it is not given up
    assert (first.state, late.state) == ("running", "waiting")
    loop.step(now=3.0)
    ((job, error),) = loop.scheduler.given_up
    assert job is late
    assert isinstance(error, QueueTimeout)
    assert (first.state, patient.state) == ("running", "waiting")
    loop.scheduler.given_up.clear()
    while len(loop.scheduler):
        loop.step(now=4.0)
    assert not loop.scheduler.given_up
    loop.check_empty()


def test_a_preempted_job_has_begun_and_waits_as_long_as_it_takes():
    loop = PretendLoop(num_blocks=12, limits=Limits(4, 64))
    jobs = [loop.add([at] * 9, 16, start_by=1.0) for at in range(3)]
    loop.step(now=0.0)
    while len(loop.scheduler):
        loop.step(now=5.0)
    assert sum(job.num_preempted for job in jobs)
    assert not loop.scheduler.given_up
    loop.check_empty()


def test_twins_of_a_job_that_has_begun_wait_as_long_as_it_takes():
    loop = PretendLoop(limits=Limits(2, 40))
    job = loop.add([1, 2], 3, num_twins=3, start_by=1.0)
    loop.step(now=0.0)
    twins = job.twins or [*loop.scheduler.queues.waiting]
    while len(loop.scheduler):
        loop.step(now=5.0)
    assert twins
    assert not loop.scheduler.given_up
    loop.check_empty()


@pytest.mark.parametrize("num_pinned", [16, 32])
def test_a_job_that_finds_no_room_while_nothing_else_runs_is_given_up(num_pinned):
    loop = PretendLoop(num_blocks=8, limits=Limits(2, 40))
    loop.add(range(32), 1)
    loop.run()
    pin = ops.pin(loop.manager, range(num_pinned))
    job = loop.add([7] * 17, 1)
    while len(loop.scheduler):
        loop.step()
    assert [each for each, _ in loop.scheduler.given_up] == [job]
    assert isinstance(loop.scheduler.given_up[0][1], OutOfBlocks)
    pin.close()
    loop.check_empty()


def test_blocks_for_the_rest_of_a_half_computed_prompt_are_promised_to_it():
    loop = PretendLoop(num_blocks=20, limits=Limits(4, 40, max_prefill_tokens=4))
    first = loop.add([7] * 40, 1)
    loop.step()
    second = loop.add([8] * 40, 1)
    loop.step()
    assert (first.num_computed, second.state) == (8, "waiting")
    loop.run()
    assert first.num_preempted == second.num_preempted == 0


def test_prompts_without_room_are_preempted_from_the_last_to_the_first():
    loop = PretendLoop(num_blocks=20, limits=Limits(4, 40, max_prefill_tokens=4))
    last, first = loop.add([7] * 36, 1), loop.add([8] * 24, 1)
    loop.step()
    loop.step()
    outside = loop.manager.open([9] * 64)
    loop.manager.reserve(outside, 64)
    assert loop.step().jobs == [first]
    assert (last.state, last.num_preempted) == ("waiting", 1)
    loop.manager.close(outside)
    loop.run()
    loop.check_empty()


def test_waiting_jobs_are_looked_at_again_when_somebody_else_frees_blocks():
    loop = PretendLoop(num_blocks=12, limits=Limits(4, 60))
    loop.add(range(20), 1)
    loop.run()
    pin = ops.pin(loop.manager, range(20))
    runs = loop.add([5], 12)
    loop.step()
    waits = loop.add([7] * 21, 1)
    loop.step()
    loop.step()
    assert (runs.state, waits.state) == ("running", "waiting")
    pin.close()
    loop.step()
    assert waits.state == "finished"

"""Nobody waits for ever, nor behind those who should wait for them, in virtual time."""

import numpy as np
import pytest
from scheduling_clock import Clockwork


def test_blocks_that_are_filled_in_part_count_where_lower_jobs_yield():
    clock = Clockwork(16, 100, 8, block=16)
    low = [clock.ask("a", 2, 14, priority=-1) for _ in range(7)]
    clock.step()
    assert clock.wait_for(clock.ask("a", 40, priority=5)) == 1
    assert sum(job.num_yielded for job in low) == 3


def test_blocks_that_are_promised_to_a_prompt_count_where_it_yields():
    clock = Clockwork(16, 100, 200, block=16)
    clock.scheduler.prompt_tokens = 4
    clock.ask("b", 3000, priority=-1)
    clock.steps(2)
    high = clock.ask("a", 1000, priority=5)
    clock.step()
    assert high.state == "running"


def test_the_job_that_computes_the_prefix_of_a_higher_one_is_served_as_that_one():
    clock = Clockwork(8, 40, 1000)
    clock.ask("a", 200, priority=-5, salt=-1)
    clock.step()
    high = clock.ask("a", 201, priority=5, salt=-1)
    for _ in range(20):
        clock.ask("b", 40)
        clock.step()
    assert clock.latencies[high] <= 6


def test_an_urgent_job_takes_a_place_for_those_that_it_holds_up():
    clock = Clockwork(1, 40, 1000)
    clock.ask("b", 4, 3000)
    clock.step()
    clock.ask("a", 4, priority=-5)
    for _ in range(18):
        assert clock.wait_for(clock.ask("a", 4, 130, priority=5)) <= 132
        clock.steps(70)


def test_a_prompt_that_has_begun_is_overtaken_as_seldom_as_one_that_waits():
    clock = Clockwork(8, 40, 1000)
    low = clock.ask("a", 200, priority=-5)
    clock.step()
    for _ in range(40):
        clock.ask("a", 40)
        clock.step()
    assert clock.latencies[low] <= 16 + 200 // 40


@pytest.mark.parametrize("is_overdue", [False, True])
def test_a_tenant_that_waited_long_keeps_none_of_higher_priority_waiting(is_overdue):
    clock = Clockwork(8, 400, 2000)
    for _ in range(2):
        clock.ask("z", 2000, 1000)
    clock.steps(11)
    if is_overdue:
        clock.ask("x", 6000, priority=-5)
    for _ in range(17):
        clock.ask("y", 4, priority=5)
        clock.step()
    assert clock.wait_for(clock.ask("y", 4400, priority=5)) == 12


def test_a_request_larger_than_the_share_of_its_tenant_is_served_at_last():
    clock = Clockwork(16, 400, 60)
    clock.ask("b", 20, 20)
    large = clock.ask("a", 200, 2)
    for _ in range(1500):
        while sum(job.state == "waiting" for job in clock.jobs if job.tenant == "b") < 2:
            clock.ask("b", 20, 20)
        clock.step()
        if large in clock.latencies:
            return
    raise AssertionError(f"{large!r} after {len(clock.latencies)} later ones")


@pytest.mark.parametrize("num_tenants", [4, 12, 60])
def test_a_small_request_passes_those_of_any_number_of_tenants_that_find_no_room(num_tenants):
    clock = Clockwork(64, 400, 600)
    clock.ask("running", 1590, 800)
    clock.steps(6)
    for number in range(num_tenants):
        clock.ask(f"large {number}", 1700, 50)
    clock.steps(2)
    assert clock.wait_for(clock.ask("small", 8, 2)) <= 3


@pytest.mark.parametrize("before", [1, 11])
def test_tenants_that_come_and_go_leave_one_that_stays_its_part(before):
    clock = Clockwork(128, 512, 40_000)
    staying = clock.ask("a", 6000)
    clock.steps(before)
    had = staying.num_computed
    clock.scheduler.prompt_tokens = 32
    for _ in range(200):
        while len(clock.scheduler) < 65:
            clock.ask(f"new {clock.number}", 40)
        clock.step()
    assert staying.num_computed - had >= 200 * 32 // 65 - 2


def test_drafts_take_what_prompts_leave():
    clock = Clockwork(4, 8, 1000)
    for _ in range(3):
        clock.ask("b", 2, 400)
    clock.step()
    prompt = clock.ask("a", 20)
    for _ in range(8):
        for job in clock.scheduler.queues.decoding:
            job.drafts = np.full(5, 9, np.int32)
        clock.step()
    assert clock.latencies[prompt] <= 5


def test_a_preempted_job_takes_a_place_back_from_a_tenant_with_two_more():
    clock = Clockwork(2, 60, 1000)
    first = clock.ask("a", 4, 60)
    clock.ask("b", 4, 1000)
    clock.step()
    clock.ask("b", 4, 1000)
    clock.steps(5)
    clock.ask("a", 4, priority=5)
    assert clock.wait_for(first) <= 64


@pytest.mark.parametrize("most", [None, 64])
def test_a_long_prompt_that_cannot_use_its_half_is_owed_no_more(most):
    clock = Clockwork(8, 512, 10_000, max_prefill_tokens=most)
    clock.ask("a", 20_000)
    clock.steps(30)
    clock.scheduler.prompt_tokens = 16
    assert clock.wait_for(clock.ask("a", 8)) <= 2


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_short_prompt_and_a_long_one_share_steps_of_any_few_tokens(tokens):
    clock = Clockwork(8, 40, 1000)
    clock.ask("a", 1000)
    clock.scheduler.prompt_tokens = tokens
    clock.steps(20)
    assert clock.wait_for(clock.ask("a", 20)) <= 2 * 20 // tokens + 5

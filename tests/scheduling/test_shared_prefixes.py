"""Prompts that share what is not computed yet: one job computes it, the others wait for that."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scheduling_help import VOCAB, PretendLoop, states_of

from quire import Scope
from quire.scheduling import Limits

PREFIX = list(range(24))


def test_the_first_job_computes_a_shared_prefix_and_the_others_wait_for_it():
    loop = PretendLoop(limits=Limits(8, 100))
    jobs = [loop.add([*PREFIX, 30 + i, 40 + i], 2) for i in range(4)]
    loop.step()
    assert [job.state for job in jobs] == ["running", "waiting", "waiting", "waiting"]
    loop.step()
    assert [job.num_found for job in jobs] == [0, 24, 24, 24]
    loop.run()
    loop.check_empty()


def test_jobs_that_share_nothing_pass_those_that_wait():
    loop = PretendLoop(limits=Limits(8, 100))
    jobs = [loop.add(prompt, 2) for prompt in ([*PREFIX, 30], [*PREFIX, 31], [45, 46, 47])]
    loop.step()
    assert [job.state for job in jobs] == ["running", "waiting", "running"]


def test_a_job_waits_only_until_its_shared_part_is_computed():
    loop = PretendLoop(limits=Limits(4, 20, max_prefill_tokens=10))
    long = loop.add([*PREFIX, *range(30, 50)], 2)
    loop.scheduler.plan()
    short = loop.add([*PREFIX[:8], 49, 48], 2)
    loop.step()
    assert long.num_computed >= 8
    assert short.state == "waiting"
    loop.step()
    assert short.state == "running"
    assert short.num_found == 8
    assert long.num_left > 0
    loop.run()
    loop.check_empty()


def test_another_job_computes_the_prefix_when_the_first_is_aborted():
    loop = PretendLoop(limits=Limits(4, 10))
    first, second, third = (loop.add([*PREFIX, 30 + i], 2) for i in range(3))
    loop.step()
    loop.scheduler.finish(first)
    loop.step()
    assert second.state == "running"
    assert third.state == "waiting"
    loop.run()
    assert third.num_found == 24
    loop.check_empty()


def test_scopes_do_not_wait_for_each_other():
    loop = PretendLoop(limits=Limits(4, 100))
    jobs = [loop.add([*PREFIX, 30], 2, scope=Scope(salt=salt)) for salt in "12"]
    loop.step()
    assert [job.state for job in jobs] == ["running", "running"]
    assert [job.num_found for job in jobs] == [0, 0]


def test_nobody_waits_for_what_is_not_stored():
    loop = PretendLoop(limits=Limits(4, 100))
    jobs = [loop.add([*PREFIX, 30 + i], 2, terms={"store_until": 0}) for i in range(2)]
    loop.step()
    assert [job.state for job in jobs] == ["running", "running"]


@pytest.mark.ci
@settings(max_examples=40, deadline=None)
@example([(0, 3, []), (0, 3, [0]), (0, 3, [0])], 1, 3, None, [0] * 10)
@given(
    prompts=st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 30), st.lists(st.integers(0, VOCAB - 1), max_size=9)
        ),
        min_size=1,
        max_size=10,
    ),
    budget=st.integers(1, 60),
    max_running=st.integers(1, 8),
    chunk=st.sampled_from([None, 1, 5]),
    arrivals=st.lists(st.integers(0, 3), min_size=10, max_size=10),
)
def test_no_block_of_a_prompt_is_computed_twice_while_all_fits(
    prompts, budget, max_running, chunk, arrivals
):
    families = [np.random.default_rng(i).integers(0, VOCAB, 30).tolist() for i in range(3)]
    loop = PretendLoop(num_blocks=400, limits=Limits(max_running, max_running + budget, chunk))
    wholes, lasts = set(), set()
    for (family, shared, own), steps in zip(prompts, arrivals, strict=False):
        prompt = [*families[family][:shared], *own, 1]
        loop.add(prompt, 1)
        states = states_of(prompt)
        wholes.update(states[3::4])
        lasts.add(states[-1])  # whatever is cached, the last token is computed
        for _ in range(steps):
            loop.step()
    loop.run()
    assert {loop.model.computed[state] for state in wholes - lasts} <= {1}

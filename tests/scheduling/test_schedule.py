"""Behaviours of a schedule, one for each test."""

from random import Random

import pytest
from scheduling_help import PretendLoop

from quire.scheduling import Limits


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", range(20))
def test_every_job_gets_the_tokens_of_plain_generation_and_nothing_stays_held(seed):
    random = Random(seed)
    limits = Limits(random.choice([2, 4, 8]), random.choice([10, 32]))
    loop = PretendLoop(num_blocks=random.choice([12, 20, 64]), limits=limits)
    base = [random.randrange(50) for _ in range(20)]
    for _ in range(20):
        own = [random.randrange(50) for _ in range(random.randrange(1, 10))]
        loop.add(base[: random.randrange(1, 20)] + own, random.randrange(1, 9))
    loop.run()
    loop.check_empty()
    assert len(loop.finished) == 20
    assert not loop.scheduler.given_up


def test_a_prompt_is_computed_in_parts_beside_jobs_that_decode():
    loop = PretendLoop(limits=Limits(4, 10))
    first = loop.add(range(8), 20)
    loop.step()
    second = loop.add(range(100, 130), 1)
    loop.step()
    assert loop.steps[-1].jobs == [first, second]
    assert loop.steps[-1].lengths.tolist() == [1, 9]
    loop.run()
    loop.check_empty()


def test_a_preempted_job_goes_on_where_it_was():
    loop = PretendLoop(num_blocks=12, limits=Limits(4, 32))
    jobs = [loop.add([k] * 9, 16) for k in range(4)]
    loop.run()
    assert sum(job.num_preempted for job in jobs) > 0
    assert jobs[0].num_preempted == 0
    loop.check_empty()

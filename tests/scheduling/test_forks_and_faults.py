"""Forks, hooks, drafts, and calls that are refused."""

import numpy as np
import pytest
from scheduling_help import PretendLoop, sample

from quire.errors import ConfigError, CopyError, OutOfBlocks, SequenceError, TokensError
from quire.scheduling import Job, Limits


def test_twins_share_a_prompt_that_was_computed_once():
    loop = PretendLoop(limits=Limits(4, 40))
    job = loop.add(range(18), 6, num_twins=2)
    twins = job.twins
    step = loop.step()
    assert step.jobs == [job]
    assert step.sampled == [job, *twins]
    assert [each.state for each in (job, *twins)] == ["running"] * 3
    loop.run()
    assert [each.tokens for each in twins] == [job.tokens] * 2
    assert all(count == 1 for state, count in [*loop.model.computed.items()][:18])
    loop.check_empty()


def test_each_twin_goes_on_from_a_first_token_of_its_own():
    loop = PretendLoop(limits=Limits(4, 40))
    job = loop.add(range(18), 6, num_twins=2)
    other = loop.add([40, 41], 2, priority=-1)
    twins = job.twins
    step = loop.scheduler.plan()
    assert step.samples.tolist() == [0, 0, 0, 1]
    assert step.logit_rows[step.spread].tolist() == [17, 17, 17, 19]
    loop.model.forward(step)
    loop.scheduler.complete(step, np.array([1, 2, 3, 4], np.int32))
    loop.check()
    assert [each.tokens[-1] for each in (job, *twins, other)] == [1, 2, 3, 4]
    assert [each.num_computed for each in twins] == [18, 18]


def test_twins_without_a_slot_wait_and_find_the_prompt():
    loop = PretendLoop(limits=Limits(2, 40))
    twins = loop.add(range(18), 3, num_twins=3).twins
    loop.step()
    assert [twin.state for twin in twins] == ["running", "waiting", "waiting"]
    loop.run()
    assert len(loop.finished) == 4
    assert twins[-1].num_found == 18
    loop.check_empty()


def test_a_twin_starts_with_no_overtaking_counted():
    loop = PretendLoop(limits=Limits(1, 40, max_passed=1))
    job = loop.add([1], 3, num_twins=1, priority=-1)
    (twin,) = job.twins
    loop.add([2], 1)
    loop.step()
    loop.step()
    assert (job.patience, twin.patience) == (0, 1)


def test_twins_end_with_a_job_that_ends_before_its_prompt_is_computed():
    loop = PretendLoop(limits=Limits(2, 10))
    job = loop.add(range(18), 3, num_twins=2)
    loop.step()
    twins = job.twins
    loop.scheduler.finish(job)
    loop.check_empty()
    assert [twin.state for twin in twins] == ["new", "new"]


def test_tiers_are_asked_before_a_prompt_is_looked_up_and_before_blocks_are_given_back():
    seen = []

    def keep(job):
        seen.append(("keep", job, job.seq.state, job.num_computed))

    loop = PretendLoop(
        num_blocks=8,
        limits=Limits(2, 40),
        bring_up=lambda job: seen.append(("bring up", job, job.seq and job.seq.state, 0)),
        keep=keep,
    )
    first, second = loop.add(range(9), 12), loop.add([7] * 9, 12)
    loop.run()
    assert second.num_preempted == 1
    assert [entry for entry in seen if entry[1] is first] == [
        ("bring up", first, None, 0),
        ("keep", first, "open", 20),
    ]
    kept = [entry[::2] for entry in seen if entry[1] is second]
    assert kept == [
        ("bring up", None),
        ("keep", "open"),
        ("bring up", "suspended"),
        ("keep", "open"),
    ]


def test_drafts_go_no_further_than_the_jobs_last_token_and_the_steps_budget():
    loop = PretendLoop(limits=Limits(1, 6))
    job = loop.add([1, 2, 3], 12)
    loop.step()
    job.drafts = np.full(20, 51, np.int32)
    step = loop.step()
    assert step.lengths.tolist() == [6]
    assert job.drafts is None
    while job.num_generated < 10:
        loop.step()
    job.drafts = np.full(20, 51, np.int32)
    assert loop.step().lengths.tolist() == [2]
    assert job.num_generated == 11
    loop.run()
    loop.check_empty()


def test_a_step_that_repeats_is_the_one_before_a_token_further():
    loop = PretendLoop(limits=Limits(4, 40))
    for n in range(3):
        loop.add([n] * 5, 9)
    steps = [loop.step() for _ in range(5)]
    assert [step.repeats for step in steps] == [False, False, True, True, True]
    assert steps[3].starts.tolist() == [7, 7, 7]
    late = loop.add([9], 8)
    assert [loop.step().repeats for _ in range(3)] == [False, False, True]
    loop.scheduler.finish(late)
    assert not loop.step().repeats


def refused(loop, error, match, call, *args):
    """Check that a call raises and leaves the schedule as it was."""
    before = repr(
        [
            loop.scheduler.queues.waiting,
            loop.scheduler.queues.prefilling,
            loop.scheduler.queues.decoding,
        ]
    )
    with pytest.raises(error, match=match):
        call(*args)
    loop.check()
    places = [
        loop.scheduler.queues.waiting,
        loop.scheduler.queues.prefilling,
        loop.scheduler.queues.decoding,
    ]
    assert repr(places) == before


def test_results_that_cannot_follow_a_step_are_refused():
    loop = PretendLoop(limits=Limits(4, 40))
    job = loop.add([1, 2, 3], 12)
    loop.step()
    job.drafts = np.array([51, 51], np.int32)
    step = loop.scheduler.plan()
    complete = loop.scheduler.complete
    for bad in ([], None, 5, np.array(3, np.int32), (token for token in (1,))):
        refused(loop, TokensError, "samples 1 jobs", complete, step, bad)
    refused(loop, TokensError, "accepted", complete, step, [np.array([50, 50], np.int32)])
    refused(loop, TokensError, "accepted", complete, step, [np.array([51, 51, 1, 1], np.int32)])
    refused(loop, TokensError, "accepted", complete, step, [np.empty(0, np.int32)])
    refused(loop, TokensError, "out of range", complete, step, [np.array([-1], np.int32)])
    complete(step, sample(step, loop.model.forward(step)))
    refused(loop, SequenceError, "completed before", complete, step, [np.array([1], np.int32)])
    step = loop.scheduler.plan()
    refused(loop, TokensError, "negative", complete, step, np.array([-1], np.int32))
    for bad in (None, 5, np.array(3, np.int32), [], np.array([1, 2], np.int32)):
        refused(loop, TokensError, "samples 1 jobs", complete, step, bad)
    for bad in ([None], [[1]], np.array([[1]], np.int32), np.array([1.0])):
        refused(loop, TokensError, "token ids", complete, step, bad)
    complete(step, sample(step, loop.model.forward(step)))


def test_a_step_is_not_completed_before_its_copies_are_taken():
    loop = PretendLoop(limits=Limits(4, 40))
    loop.add(range(12), 1)
    loop.run()
    loop.add([*range(10), 40], 1)
    step = loop.scheduler.plan()
    refused(loop, CopyError, "take_copies", loop.scheduler.complete, step, np.array([1], np.int32))
    loop.scheduler.complete(step, sample(step, loop.model.forward(step)))


def test_a_scheduler_refuses_known_jobs_twice_and_unknown_ones():
    loop, other = PretendLoop(), PretendLoop()
    job = loop.add([1, 2, 3], 2)
    refused(loop, SequenceError, "added before", loop.scheduler.add, job)
    fresh = Job([1, 2, 3], 2)
    for twin, words in (job, "added before"), (Job([1, 2, 4], 2), "another prompt"):
        fresh.twins = [twin]
        refused(loop, SequenceError, words, loop.scheduler.add, fresh)
    refused(other, SequenceError, "none of the jobs", other.scheduler.finish, job)
    loop.step()
    refused(other, SequenceError, "none of the jobs", other.scheduler.finish, job)
    loop.run()
    refused(loop, SequenceError, "none of the jobs", loop.scheduler.finish, job)


def test_a_job_that_no_empty_pool_could_hold_is_refused_and_one_that_just_fits_is_not():
    loop = PretendLoop(num_blocks=8)
    loop.add(range(17), 16)
    with pytest.raises(OutOfBlocks, match="lower max_tokens"):
        loop.add(range(17), 17)
    assert len(loop.scheduler) == 1
    loop.run()
    loop.check_empty()


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ([], {}, TokensError),
        ([-1], {}, TokensError),
        ([1], {"max_tokens": 0}, ConfigError),
        ([1], {"priority": 0.5}, ConfigError),
        ([1], {"deadline": float("nan")}, ConfigError),
    ],
)
def test_jobs_that_cannot_be_are_refused(prompt, options, error):
    with pytest.raises(error):
        Job(prompt, **{"max_tokens": 1, **options})


def test_terms_that_cannot_be_are_refused_when_a_job_is_added():
    loop = PretendLoop()
    with pytest.raises(ConfigError, match="store_until"):
        loop.add([1], 1, terms={"store_until": -1})
    assert not len(loop.scheduler)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_running": 0},
        {"max_running": 64, "max_step_tokens": 64},
        {"max_prefill_tokens": 0},
        {"watermark": 1.0},
        {"max_passed": 0},
    ],
)
def test_limits_that_cannot_be_are_refused(settings):
    with pytest.raises(ConfigError):
        Limits(**settings)

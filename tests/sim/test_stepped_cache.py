"""quire's cache by told steps: it counts what the engine counts, with several requests in flight."""

from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stepped_help import SIZE, Run, small_model

from quire import ops
from quire.core.tokens import INT32
from quire_sim.caches import CacheOptions, CachePrompt, cache_of, hits
from quire_sim.caches.stepping import SteppedCache
from quire_sim.logs import EngineSteps


@pytest.fixture(scope="module")
def model():
    return small_model()


def found(log, num_blocks):
    """Return the hits of a log by its rows."""
    cache = cache_of("quire", CacheOptions(capacity_tokens=num_blocks * SIZE))
    return {each.row: each.hit_tokens for each in hits(cache, log)}


DRAWN = [
    {"seed": seed, "num_blocks": blocks, "most_answer": most, "tenants": tenants, "prefill": prefill}
    for seed, (blocks, most, tenants, prefill) in enumerate([
        (24, 1, 1, None), (28, 60, 1, None), (24, 60, 3, None), (40, 24, 1, 32), (28, 60, 1, 32), (32, 60, 3, 32),
    ])
]  # fmt: skip


@pytest.mark.parametrize("drawn", DRAWN, ids=str)
def test_every_hit_is_the_engines_with_four_in_flight(model, drawn):
    run = Run(model, **drawn)
    assert found(run.log, drawn["num_blocks"]) == run.told


def test_runs_above_preempt_and_evict(model):
    run = Run(model, **DRAWN[1])
    assert run.preemptions > 0
    assert found(run.log, 4096) != run.told


def test_guessed_tokens_leave_nearly_every_hit_equal(model):
    run = Run(model, 3, num_blocks=28, most_answer=8, speculation=3)
    got = found(run.log, 28)
    assert sum(got[row] == told for row, told in run.told.items()) >= 0.95 * len(run.told)


def test_lines_by_the_end_of_the_answer_and_shuffled_ones_are_put_in_order(model):
    run = Run(model, 7, num_blocks=28, most_answer=60)
    by_end = sorted(run.log, key=lambda each: each.time_s + each.duration_s)
    assert found(by_end, 28) == run.told
    assert found(Random(1).sample(run.log, len(run.log)), 28) == run.told


def test_another_engine_begins_with_an_empty_cache(model):
    first, second = (Run(model, seed, num_blocks=28, num_requests=30) for seed in (1, 2))
    behind = first._now + 5
    later = [
        msgspec.structs.replace(
            each, row=each.row + 100, time_s=each.time_s + behind, steps=msgspec.structs.replace(each.steps, engine="b")
        )
        for each in second.log
    ]  # fmt: skip
    told = first.told | {row + 100: hit for row, hit in second.told.items()}
    assert found([*first.log, *later], 28) == told


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_requests_without_steps_have_hits_among_those_with_steps(model, share):
    run, random = Run(model, 5, num_blocks=40), Random(3)
    log = [
        msgspec.structs.replace(each, steps=None) if random.random() < share else each
        for each in run.log
    ]
    got = found(log, 40)
    assert got.keys() == run.told.keys()
    equal = sum(got[row] == told for row, told in run.told.items())
    assert equal >= 0.6 * len(run.told)


def test_a_log_without_steps_is_what_times_alone_tell(model):
    log = [msgspec.structs.replace(each, steps=None) for each in Run(model, 5, num_blocks=40).log]
    assert len(found(log, 40)) == len(log)


STEPS = st.integers(0, 60) | st.sampled_from([10**6, 1 << 53])


@st.composite
def contradictory(draw):
    """Return a request whose steps may be any that `steps_of` lets through."""
    numbers = sorted(draw(st.sets(STEPS.filter(bool), min_size=1, max_size=4)))
    arrived = draw(st.integers(0, numbers[0] - 1))
    tokens = st.integers(0, 80) | st.just(1 << 53)
    prompts = [(number, draw(tokens), draw(st.integers(0, 3))) for number in numbers]
    prompts[draw(st.integers(0, len(prompts) - 1))] = (draw(st.sampled_from(numbers)), 3, 0)
    prompts = tuple({number: (number, *rest) for number, *rest in sorted(prompts)}.values())
    if all(left for *_, left in prompts):
        prompts = (*prompts[:-1], (*prompts[-1][:2], 0))
    last = max(draw(STEPS), prompts[-1][0])
    seconds = st.sampled_from([0.0, 0.1, 3.0, 1e6])
    steps = EngineSteps(draw(st.sampled_from("ab")), draw(seconds), min(arrived, prompts[0][0] - 1), draw(seconds),
                        draw(seconds), prompts, last, draw(st.integers(0, 90) | st.just(5000)))  # fmt: skip
    start, length = draw(st.integers(0, 30)), draw(st.integers(1, 100))
    return CachePrompt(
        0, np.arange(start, start + length, dtype=INT32), np.arange(draw(st.integers(0, 40)), dtype=INT32),
        time_s=draw(st.floats(0, 5)), duration_s=draw(st.none() | seconds), tenant=draw(st.sampled_from(["", "x", "y"])),
        model=draw(st.sampled_from(["", "m"])), steps=draw(st.just(steps) | st.none()),
    )  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(contradictory(), min_size=1, max_size=12), st.sampled_from([8, 12, 40, None]))
def test_contradictory_steps_end_and_give_each_request_one_hit(asked, num_blocks):
    asked = [msgspec.structs.replace(each, row=row) for row, each in enumerate(asked)]
    cache = SteppedCache(num_blocks, SIZE)
    got = sorted(each.row for each in hits(cache, asked))
    assert got == [*range(len(asked))]
    ops.check(cache.manager)
    assert not cache.manager.sequences

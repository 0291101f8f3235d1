"""Metrics of requests tell the steps of the engine that computed them."""

import pytest
from loop_help import tiny_model

from quire.engines.loop import Engine, SamplingParams


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def told(engine, *asked, later=()):
    """Return the metrics of requests `(prompt, most)` by place; `later` come behind the first step."""
    metrics, waiting = {}, [*enumerate(later, len(asked))]
    for place, (prompt, most) in enumerate(asked):
        engine.add_request(
            prompt, SamplingParams(max_tokens=most, temperature=0), request_id=str(place)
        )
    while engine.has_unfinished() or waiting:
        for output in engine.step():
            if output.finished:
                metrics[int(output.request_id)] = output.metrics
        for place, (prompt, most) in waiting:
            engine.add_request(
                prompt, SamplingParams(max_tokens=most, temperature=0), request_id=str(place)
            )
        waiting = []
    return [metrics[place] for place in sorted(metrics)]


def test_a_prompt_tells_its_steps_and_the_step_of_the_last_token(model):
    engine = Engine(model, num_blocks=50, block_size=4)
    first, second = told(engine, (range(10, 30), 4), later=[(range(40, 50), 2)])
    assert (first.arrival_step, first.prompt_steps, first.last_step) == (0, [(1, 20, 0)], 4)
    assert (second.arrival_step, second.prompt_steps, second.last_step) == (1, [(2, 10, 0)], 3)


def test_parts_of_a_prompt_tell_what_was_left_behind_them(model):
    engine = Engine(model, num_blocks=50, block_size=4, max_prefill_tokens=8)
    (metrics,) = told(engine, (range(10, 30), 1))
    assert metrics.prompt_steps == [(1, 8, 12), (2, 8, 4), (3, 4, 0)]
    assert metrics.last_step == 3


def test_a_found_prefix_is_no_part_of_a_step(model):
    engine = Engine(model, num_blocks=50, block_size=4)
    told(engine, (range(10, 30), 1))
    (metrics,) = told(engine, ([*range(10, 26), 3, 3, 3], 1))
    assert metrics.prompt_steps == [(2, 3, 0)]


def test_a_preempted_request_tells_the_steps_of_its_second_start(model):
    engine = Engine(model, num_blocks=8, block_size=4)
    metrics = told(engine, ([1, 2, 3, 4, 5, 6, 7], 20), ([9, 8, 7, 6, 5, 4, 3], 20))
    assert sum(each.num_preemptions for each in metrics) > 0
    for each in metrics:
        assert [left for *_, left in each.prompt_steps].count(0) == 1 + each.num_preemptions
        steps = [step for step, *_ in each.prompt_steps]
        assert steps == sorted({*steps})
        assert each.last_step >= steps[-1]


def test_a_step_that_fails_is_not_counted(model, monkeypatch):
    engine = Engine(model, num_blocks=50, block_size=4)
    calls = iter([True, False])

    def fail():
        if next(calls, False):
            raise RuntimeError("once")

    engine.when_computing(fail)
    failed, then = told(engine, (range(10, 30), 2), later=[(range(40, 50), 2)])
    assert failed.last_step == 0
    assert then.prompt_steps == [(1, 10, 0)]

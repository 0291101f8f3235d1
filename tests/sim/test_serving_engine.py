"""A replica's model of a real engine's schedule: planned steps, clocks that begin with a step, hits."""

import numpy as np
import pytest
from serving_help import BLOCK, LinearTiming, limits, random_requests, request, run

from quire import ops
from quire.errors import ConfigError
from quire_sim.serving import Cluster

AHEAD = limits(plans_ahead=1)
TIMING = LinearTiming()
both = pytest.mark.parametrize("plans_ahead", [0, 1])


def decode_s(*contexts):
    return TIMING.step_s([], np.array(contexts, np.int64))


def test_an_engine_takes_a_request_over_at_the_end_of_the_step_under_way():
    for scheduler in ("first-come", "quire"):
        _, served = run([request(1, 0.0, 100, 50), request(2, 0.001, 100, 5)], scheduler=scheduler)
        assert served[0].queued_s == served[0].arrived_s == 0.0
        assert served[1].arrived_s == 0.001
        assert served[1].queued_s == served[0].first_token_s


def test_an_idle_engine_takes_a_request_over_at_once():
    _, served = run([request(1, 0.0, 100, 5), request(2, 9.0, 100, 5)], limits=AHEAD)
    assert served[1].queued_s == 9.0
    assert served[1].ttft_s == pytest.approx(TIMING.prefill_s(100, 0))


def test_a_step_planned_ahead_leaves_out_requests_that_arrived_meanwhile():
    asks = [request(1, 0.0, 100, 50), request(2, 0.001, 100, 5)]
    first_s = TIMING.prefill_s(100, 0)
    _, served = run(asks, limits=AHEAD)
    begun_s = first_s + decode_s(100)
    assert served[1].admitted_s == pytest.approx(begun_s)
    own_s = TIMING.step_s([(100, 0)], np.array([101]))
    assert served[1].first_token_s == pytest.approx(begun_s + own_s)
    _, at_once = run(asks)
    assert at_once[1].admitted_s == first_s


@pytest.mark.parametrize("others", [(), (request(3, 0.0, 2 * BLOCK, 200),)])
def test_a_step_planned_ahead_lacks_the_blocks_of_requests_that_end_before_it(others):
    asks = [*others, request(1, 0.0, 30 * BLOCK, 10), request(2, 1e-4, 30 * BLOCK, 2)]
    later_s = {}
    for plans_ahead in (0, 1):
        _, served = run(asks, limits=limits(50, plans_ahead=plans_ahead))
        later_s[plans_ahead] = served[-1].admitted_s - served[-2].finished_s
    assert later_s[0] == 0.0
    # where nobody else runs, no step lies between the end and the plan that sees it
    assert (later_s[1] > 0.0) is bool(others)


def test_the_place_of_an_ended_request_is_taken_one_step_later():
    asks = [request(1, 0.0, 32, 10), request(2, 0.0, 32, 40), request(3, 1e-4, 32, 2)]
    _, served = run(asks, limits=limits(max_sequences=2, plans_ahead=1))
    first, _, third = served
    assert third.admitted_s > first.finished_s
    _, served = run(asks, limits=limits(max_sequences=2))
    assert served[2].admitted_s == served[0].finished_s


@pytest.mark.cases(2)
@both
@pytest.mark.parametrize("num_blocks", [60, 1000])
@pytest.mark.parametrize("seed", [3, 5, 8])
def test_every_request_finishes_once_and_nothing_is_held(
    monkeypatch, num_blocks, seed, plans_ahead
):
    kept = []
    make = Cluster.replicas
    monkeypatch.setattr(Cluster, "replicas", lambda self: kept.extend(make(self)) or kept)
    requests = random_requests(seed, 150)
    result, served = run(requests, limits=limits(num_blocks, plans_ahead=plans_ahead))
    assert [each.number for each in served] == list(range(150))
    assert result.output_tokens == sum(each.output_tokens for each in requests)
    for each in served:
        assert each.arrived_s <= each.queued_s <= each.admitted_s < each.first_token_s
    for replica in kept:
        ops.check(replica.manager)
        assert replica.manager.num_active == 0
        assert not replica.manager.sequences


@both
def test_a_preempted_request_finds_what_is_left_of_its_own_answer(plans_ahead):
    """Two grow until one has to make way; the other ends soon, and hardly a block was taken from it."""
    asks = [request(1, 0.0, 10 * BLOCK, 12 * BLOCK), request(2, 0.0, 10 * BLOCK, 14 * BLOCK)]
    _, served = run(asks, limits=limits(42, plans_ahead=plans_ahead))
    preempted = next(each for each in served if each.preemptions)
    lost = preempted.recomputed_tokens
    assert preempted.number == 1
    assert preempted.preemptions == 1
    assert 0 < lost < 4 * BLOCK  # of more than 20 blocks that it had


def test_answers_of_two_requests_with_the_same_prompt_are_not_each_others():
    asks = [request(row, 0.0, 10 * BLOCK, 14 * BLOCK, range(10)) for row in (1, 2, 3)]
    result, served = run(asks, limits=limits(40))
    assert result.preemptions > 0
    assert all(each.cached_tokens < 10 * BLOCK for each in served)
    assert result.computed_tokens >= 3 * 10 * BLOCK - sum(each.cached_tokens for each in served)


def test_steps_are_planned_at_most_one_ahead():
    with pytest.raises(ConfigError, match="plans_ahead=2"):
        limits(plans_ahead=2)

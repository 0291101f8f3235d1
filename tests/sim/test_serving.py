"""Conservation laws of every simulation of serving."""

import json
import math
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from serving_help import BLOCK, LinearTiming, limits, random_requests, request, run

import quire_sim.serving.firstcome as first_come
from quire import ops
from quire.errors import ConfigError, OutOfBlocks
from quire.routing import PrefixAware, router_named
from quire_sim.hardware import MemoryTier, Roofline, accelerator_named, model_named
from quire_sim.serving import (
    ClosedLoop,
    Cluster,
    Load,
    PoissonArrivals,
    TraceArrivals,
    simulate,
)
from turns import by_turns

ROOFLINE = Roofline(model_named("llama-3.1-8b"), accelerator_named("h100"))
HOST = (MemoryTier("host", 1 << 20, 1e9, 1e-5),)
TIGHT = 60  # blocks: three or four requests at a time

both_schedulers = pytest.mark.parametrize("scheduler", ["first-come", "quire"])


@both_schedulers
def test_a_lone_request_takes_the_rooflines_time_to_the_first_token(scheduler):
    for tokens in (1, 100, 1000, 8192):
        result, _ = run(
            [request(1, prompt=tokens, output=1)],
            timing=ROOFLINE,
            limits=limits(max_step_tokens=8192),
            scheduler=scheduler,
        )
        assert result.ttft_s.mean == ROOFLINE.ttft_s(tokens)


@both_schedulers
def test_the_second_ask_takes_exactly_the_rooflines_time_with_its_prefix_cached(scheduler):
    asks = [request(1, 0.0, 1000, 1, range(62)), request(2, 9.0, 1600, 1, range(100))]
    _, served = run(asks, timing=ROOFLINE, limits=limits(max_step_tokens=8192), scheduler=scheduler)
    assert served[1].cached_tokens == 62 * BLOCK
    expected_s = ROOFLINE.ttft_s(1600 - 62 * BLOCK, 62 * BLOCK)
    assert served[1].first_token_s == 9.0 + expected_s


def test_a_partial_block_with_an_id_is_found_with_the_tokens_it_has():
    asks = [request(1, 0.0, 100, 5, range(7)), request(2, 9.0, 100, 5, range(7))]
    _, served = run(asks)
    assert [each.cached_tokens for each in served] == [0, 99]  # the last one is always computed


@both_schedulers
def test_a_long_prompt_is_computed_in_chunks(scheduler):
    result, served = run([request(1, prompt=600, output=1)], scheduler=scheduler)
    timing = LinearTiming()
    steps = [timing.prefill_s(256, 0), timing.prefill_s(256, 256), timing.prefill_s(88, 512)]
    assert result.num_steps == 3
    assert served[0].ttft_s == pytest.approx(sum(steps), rel=1e-12)


@both_schedulers
def test_each_output_token_after_the_first_is_one_decode_step(scheduler):
    result, served = run([request(1, prompt=100, output=5)], scheduler=scheduler)
    timing = LinearTiming()
    decode_s = sum(timing.decode_run_s(np.array([100]), 4))
    assert result.num_steps == 5
    assert served[0].finished_s - served[0].first_token_s == pytest.approx(decode_s, rel=1e-12)
    assert served[0].tpot_s == pytest.approx(decode_s / 4, rel=1e-12)


@both_schedulers
def test_a_request_without_output_is_finished_with_its_prompt(scheduler):
    _, served = run([request(1, prompt=100, output=0)], scheduler=scheduler)
    assert served[0].finished_s == served[0].first_token_s == LinearTiming().prefill_s(100, 0)


@both_schedulers
def test_no_requests_give_an_empty_result(scheduler):
    result, served = run([], scheduler=scheduler)
    assert served == []
    assert (result.num_requests, result.makespan_s, result.requests_per_s) == (0, 0.0, 0.0)
    assert result.ttft_s is None
    assert result.overloaded is None
    json.dumps(msgspec.to_builtins(result), allow_nan=False)


@pytest.mark.cases(2)
@both_schedulers
@pytest.mark.parametrize("tiers", [(), HOST])
@pytest.mark.parametrize(
    ("router", "num_blocks"), by_turns(["round-robin", "least-loaded", "prefix"], [TIGHT, 1000])
)
def test_every_request_finishes_once_and_its_tokens_add_up(num_blocks, tiers, router, scheduler):
    requests = random_requests(3, 150)
    result, served = run(
        requests,
        limits=limits(num_blocks),
        router=router_named(router),
        num_replicas=2,
        tiers=tiers,
        block_bytes=1000,
        scheduler=scheduler,
    )
    assert [each.number for each in served] == list(range(150))
    assert result.output_tokens == sum(each.output_tokens for each in requests)
    assert result.prompt_tokens == sum(each.prompt_tokens for each in requests)
    for each, asked in zip(served, requests, strict=True):
        assert each.row == asked.row
        assert asked.time_s == each.arrived_s <= each.admitted_s
        assert each.admitted_s < each.first_token_s <= each.finished_s
        found = each.cached_tokens + each.fetched_tokens
        if not each.preemptions:
            assert found + each.computed_tokens == each.prompt_tokens
            assert each.recomputed_tokens == 0
    assert sum(result.requests_by_replica) == 150
    assert all(0 < share <= 1 for share in result.utilisation)
    assert (result.preemptions > 0) == (num_blocks == TIGHT)


@both_schedulers
def test_tokens_lost_to_a_preemption_are_computed_again(scheduler):
    requests = [request(row, prompt=160, output=200) for row in range(1, 9)]
    result, served = run(requests, limits=limits(TIGHT), scheduler=scheduler)
    assert result.preemptions > 0
    assert result.recomputed_tokens > 0
    for each in served:
        if each.preemptions:
            extra = each.computed_tokens - each.prompt_tokens - each.recomputed_tokens
            # the token that decoding would have computed next is computed with the others
            assert 0 <= extra <= each.preemptions


@both_schedulers
def test_the_newest_request_is_preempted(scheduler):
    requests = [request(row, 1e-4 * row, prompt=160, output=200) for row in range(1, 9)]
    _, served = run(requests, limits=limits(TIGHT), scheduler=scheduler)
    assert served[0].preemptions == 0
    assert max(served, key=lambda each: each.preemptions).number > 0


@both_schedulers
def test_the_managers_hold_nothing_once_all_is_served(monkeypatch, scheduler):
    kept = []
    make = Cluster.replicas
    monkeypatch.setattr(Cluster, "replicas", lambda self: kept.extend(make(self)) or kept)
    run(
        random_requests(5, 80),
        limits=limits(TIGHT),
        tiers=HOST,
        block_bytes=5000,
        scheduler=scheduler,
    )
    for replica in kept:
        ops.check(replica.manager)
        assert replica.manager.num_active == 0
        assert not replica.manager.sequences
        device = {
            token
            for node in replica.manager.kernel.tree.nodes()
            for token in _ids(node)[:: replica.manager.block_size]
        }
        below = set().union(*replica.tiers._stores)
        assert device
        assert below
        assert not device & below  # a block is in one place


@pytest.mark.ci
@pytest.mark.parametrize("plans_ahead", [0, 1])
def test_many_decode_steps_at_once_are_the_same_as_one_by_one(monkeypatch, plans_ahead):
    requests = random_requests(7, 200, span_s=2.0)

    def outcome(max_run, tiers, router):
        monkeypatch.setattr(first_come, "MAX_RUN", max_run)
        result, served = run(
            requests,
            limits=limits(TIGHT, plans_ahead=plans_ahead),
            num_replicas=2,
            tiers=tiers,
            block_bytes=1000,
            router=router_named(router),
        )
        return msgspec.to_builtins(result), served

    for tiers, router in (((), "least-loaded"), (HOST, "prefix")):
        assert outcome(1, tiers, router) == outcome(1024, tiers, router)


@pytest.mark.ci
def test_both_schedulers_agree_if_no_request_waits():
    def outcome(scheduler, tiers):
        requests = random_requests(3, 150, span_s=3.0)
        result, served = run(
            requests, num_replicas=2, tiers=tiers, block_bytes=1000, scheduler=scheduler
        )
        return msgspec.to_builtins(result), served

    for tiers in ((), HOST):
        assert outcome("first-come", tiers) == outcome("quire", tiers)


def test_the_engines_scheduler_computes_a_prefix_once_that_comes_twice_at_once():
    asks = [request(row, prompt=120, ids=range(7)) for row in (1, 2)]
    computed = {}
    for scheduler in ("first-come", "quire"):
        _, served = run(asks, scheduler=scheduler)
        computed[scheduler] = sum(each.computed_tokens for each in served)
    assert computed == {"first-come": 240, "quire": 120 + 8}


def test_a_scheduler_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="unknown scheduler 'fifo'; there are first-come, quire"):
        run([], scheduler="fifo")


@pytest.mark.cases(1)
@both_schedulers
def test_two_runs_give_the_same_json_to_the_byte(scheduler):
    def text():
        result, _ = run(
            random_requests(11, 100),
            PoissonArrivals(200.0, seed=4),
            num_replicas=3,
            router=PrefixAware(),
            tiers=HOST,
            block_bytes=1000,
            scheduler=scheduler,
        )
        return json.dumps(msgspec.to_builtins(result), allow_nan=False)

    assert text() == text()


@pytest.mark.cases(1)
@both_schedulers
def test_a_closed_loop_obeys_littles_law(scheduler):
    users, think_s = 12, 0.05
    result, served = run(
        random_requests(13, 600), ClosedLoop(users, think_s, seed=1), scheduler=scheduler
    )
    in_system = result.requests_per_s * result.e2e_s.mean
    assert result.mean_in_system == pytest.approx(in_system, rel=1e-9)
    # users are in the system or think; the start and the end of the run are not steady
    assert in_system + result.requests_per_s * think_s == pytest.approx(users, rel=0.1)
    assert max(each.replica for each in served) == 0
    assert result.overloaded is None


@both_schedulers
def test_users_ask_again_only_after_their_answer(scheduler):
    _, served = run([request(row) for row in range(1, 6)], ClosedLoop(1), scheduler=scheduler)
    for before, after in pairwise(served):
        assert after.arrived_s == before.finished_s


@both_schedulers
def test_an_arrival_at_the_very_end_of_a_step_is_in_the_next_one(scheduler):
    end_s = LinearTiming().prefill_s(100, 0)
    _, served = run([request(1, 0.0, 100, 50), request(2, end_s, 100, 50)], scheduler=scheduler)
    assert served[1].admitted_s == served[1].arrived_s == served[0].first_token_s


@both_schedulers
def test_a_request_that_fits_no_replica_is_named_before_anything_runs(scheduler):
    with pytest.raises(
        OutOfBlocks, match=r"row 2: 2000 tokens of prompt and 10 of output need 126"
    ):
        run([request(1), request(2, prompt=2000)], limits=limits(100), scheduler=scheduler)


@both_schedulers
@pytest.mark.parametrize("prompt", [100 * BLOCK - 9, 100 * BLOCK - 1, 99 * BLOCK, 99 * BLOCK + 1])
def test_a_request_that_just_fits_is_served(prompt, scheduler):
    asked = request(1, prompt=prompt, output=100 * BLOCK - prompt + 1)
    result, _ = run([asked, asked], limits=limits(100), scheduler=scheduler)
    assert result.num_requests == 2


def test_a_request_that_just_fits_with_an_id_for_its_partial_block_is_served():
    asked = request(1, prompt=100 * BLOCK - 9, output=10, ids=range(100))
    _, served = run([asked, asked], limits=limits(101))
    assert [each.cached_tokens for each in served] == [0, 100 * BLOCK - 10]
    with pytest.raises(OutOfBlocks, match="need 101 blocks of 16, but a replica has 100"):
        run([asked], limits=limits(100))


def test_a_prompt_of_whole_blocks_needs_one_more_for_its_last_token():
    with pytest.raises(OutOfBlocks, match="need 101 blocks of 16, but a replica has 100"):
        run([request(1, prompt=100 * BLOCK, output=1)], limits=limits(100))


def test_nothing_arrives_after_the_duration():
    requests = [request(row, float(row)) for row in range(10)]
    cluster = Cluster(limits(), LinearTiming())
    result = simulate(cluster, Load(requests, duration_s=4.0))
    assert result.num_requests == 5
    assert simulate(cluster, Load(requests[:3])).num_requests == 3
    with pytest.raises(ConfigError, match="duration is a number above 0"):
        Load(requests, duration_s=math.nan)


def test_a_service_that_falls_behind_says_so_and_how_many_replicas_it_takes():
    requests = random_requests(17, 400, span_s=0.5)
    slow, _ = run(requests, TraceArrivals())
    assert "overloaded: " in slow.overloaded
    assert "one replica finishes" in slow.overloaded
    needed = int(slow.overloaded.split(" replicas")[0].split()[-1])
    enough, _ = run(requests, TraceArrivals(), num_replicas=needed + 1)
    assert enough.overloaded is None
    assert enough.max_waiting < slow.max_waiting


def test_a_trace_can_be_played_faster():
    requests = [request(row, float(row - 1)) for row in range(1, 4)]
    _, served = run(requests, TraceArrivals(speed=4.0))
    assert [each.arrived_s for each in served] == [0.0, 0.25, 0.5]


def _ids(node):
    return np.frombuffer(node.key, np.int32).tolist()

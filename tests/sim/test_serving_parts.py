"""Arrivals, tiers, routers, timing and figures of the serving simulation, each by itself."""

import numpy as np
import pytest
from serving_help import BLOCK, LinearTiming, limits, request, run

from quire.core import CacheManager
from quire.errors import ConfigError
from quire.routing import PrefixAware, router_named
from quire_sim.hardware import MemoryTier, Roofline, accelerator_named, calibrate, model_named
from quire_sim.plan import Placement, blocks_that_fit, budget
from quire_sim.serving import (
    ClosedLoop,
    Objective,
    PoissonArrivals,
    ReplicaLimits,
    TraceArrivals,
    parse_arrivals,
)
from quire_sim.serving.metrics import Collector
from quire_sim.serving.tiers import Tiers

H100 = accelerator_named("h100")
MODELS = ("llama-3.1-8b", "gpt-oss-20b", "qwen3-30b-a3b", "gemma-4-31b", "deepseek-v3")

# -- timing --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_gpus", [1, 8])
def test_sequences_that_decode_together_take_what_they_do_one_by_one(name, num_gpus):
    roofline = Roofline(model_named(name), H100, num_gpus, overhead_s=1e-4)
    contexts = np.array([1, 30, 127, 128, 129, 1000, 5000, 70_000], np.int64)
    decodes = [(1, context) for context in contexts.tolist()]
    for chunks in ([], [(500, 0)], [(3000, 1000), (7, 64)]):
        expected = roofline.step_s([*chunks, *decodes])
        assert roofline.step_s(chunks, contexts) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_a_run_of_decode_steps_equals_each_step_to_the_bit(name):
    roofline = Roofline(model_named(name), H100, 2)
    contexts = np.array([1, 100, 120, 4000], np.int64)
    run_s = roofline.decode_run_s(contexts, 50)
    assert run_s.tolist() == [roofline.step_s([], contexts + step) for step in range(50)]


def test_two_measured_points_predict_the_simulated_times_of_others():
    facts = model_named("llama-3.1-8b")
    machine = Roofline(facts, H100, mfu=0.31, overhead_s=0.02)
    points = [
        (new, cached, machine.prefill_s(new, cached)) for new, cached in ((192, 256), (4096, 0))
    ]
    fitted = calibrate(Roofline(facts, H100), points)
    for new, cached in ((640, 0), (128, 1024), (2048, 4096)):
        ids = range((new + cached) // BLOCK)
        asks = [request(1, 0.0, cached, 1, ids[: cached // BLOCK])] if cached else []
        asks.append(request(2, 100.0, new + cached, 1, ids))
        _, served = run(asks, timing=fitted, limits=limits(max_step_tokens=8192))
        assert served[-1].cached_tokens == cached
        assert served[-1].ttft_s == pytest.approx(machine.prefill_s(new, cached), rel=1e-6)


# -- memory --------------------------------------------------------------------------------


def placed(model, num_gpus=1, **settings):
    placed = {"accelerator": H100, "num_gpus": num_gpus} | settings
    return Placement(model=model_named(model), **placed)


def test_blocks_fill_what_weights_and_room_to_compute_in_leave():
    here = placed("llama-3.1-8b")
    left = int(0.9 * H100.memory_bytes) - here.model.weight_bytes - here.reserved_bytes
    assert blocks_that_fit(here) == left // (16 * here.model.kv.per_token)
    assert blocks_that_fit(placed("llama-3.1-8b", 2)) > 2 * blocks_that_fit(here)


def test_larger_steps_more_sequences_and_peers_leave_fewer_blocks():
    blocks = blocks_that_fit(placed("llama-3.1-8b"))
    for more in ({"step_tokens": 16_384}, {"max_sequences": 1024}, {"utilization": 0.8}):
        assert blocks_that_fit(placed("llama-3.1-8b", **more)) < blocks
    alone = placed("llama-3.1-8b", 2).reserved_bytes
    assert alone > 2 * (placed("llama-3.1-8b").reserved_bytes - 8192 * 14336 * 3)


@pytest.mark.parametrize("num_gpus", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_a_plan_has_the_blocks_that_a_simulation_has(name, num_gpus):
    here = placed(name, num_gpus)
    split = budget(here, 2048)
    assert split.users >= here.max_sequences or not here.model.kv.window_bytes
    assert split.num_blocks == blocks_that_fit(here)


def test_groups_that_share_experts_hold_a_part_of_them_each():
    moe, dense = placed("qwen3-30b-a3b", data_parallel=2), placed("qwen3-8b", data_parallel=2)
    assert moe.weight_bytes == moe.model.weight_bytes - moe.model.expert_params
    assert dense.weight_bytes == dense.model.weight_bytes


def test_a_model_that_does_not_fit_is_refused_with_sizes():
    with pytest.raises(ConfigError, match=r"90% of 1 x h100 is 71.3 GiB, but the weights of"):
        blocks_that_fit(placed("llama-3.1-70b"))
    windows = placed("gemma-4-31b")
    with pytest.raises(ConfigError, match="Run fewer sequences, for example "):
        blocks_that_fit(windows)
    assert blocks_that_fit(windows, 8) > 0


# -- arrivals ------------------------------------------------------------------------------


def test_poisson_arrivals_have_the_rate_and_are_the_seeds():
    requests = [request(1)] * 20_000
    times = np.array(PoissonArrivals(5.0, seed=1).start(requests))
    gaps = np.diff(times)
    assert times.tolist() == PoissonArrivals(5.0, seed=1).start(requests)
    assert times.tolist() != PoissonArrivals(5.0, seed=2).start(requests)
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)


def test_a_closed_loop_starts_no_more_users_than_there_are_requests():
    assert len(ClosedLoop(50, 1.0).start([request(1)] * 3)) == 3
    assert ClosedLoop(2).start([request(1)] * 3) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trace", "the trace's times"),
        ("poisson:2.5", "Poisson, 2.5 requests/s"),
        ("closed:8", "8 users in a closed loop"),
        ("closed:8:1.5", "8 users in a closed loop, 1.5 s of thought between"),
    ],
)
def test_arrivals_are_read_from_text(text, expected):
    assert str(parse_arrivals(text)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poison:3", "did you mean poisson"),
        ("poisson", "'poisson' does not say when requests arrive; write trace, poisson:RATE"),
        ("poisson:fast", "poisson:RATE"),
        ("poisson:0", "rate is a number above 0, got 0"),
        ("poisson:inf", "rate is a number above 0, got inf"),
        ("poisson:nan", "rate is a number above 0, got nan"),
        ("closed:2.5", "closed:USERS"),
        ("closed:0", "1 user or more, got 0"),
        ("closed:inf", "closed:USERS"),
        ("closed:3:-1", "0 seconds or more, got -1"),
        ("trace:2", "write trace"),
    ],
)
def test_arrivals_that_cannot_be_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_arrivals(text)


def test_a_speed_is_above_zero():
    with pytest.raises(ConfigError, match="speed is a number above 0, got 0"):
        TraceArrivals(0.0)


# -- routers -------------------------------------------------------------------------------


def ask(row, time_s, family, prompt=320):
    ids = range(family * 1000, family * 1000 + prompt // BLOCK)
    return request(row, time_s, prompt, 4, ids)


def test_round_robin_takes_turns():
    asks = [ask(row, row * 0.001, 1) for row in range(1, 7)]
    _, served = run(asks, router=router_named("round-robin"), num_replicas=3)
    assert [each.replica for each in served] == [0, 1, 2, 0, 1, 2]


def test_least_loaded_routing_avoids_busy_replicas():
    asks = [request(1, 0.0, 3000, 50), *(ask(row, 0.01 * row, 1, 32) for row in range(2, 5))]
    _, served = run(asks, router=router_named("least-loaded"), num_replicas=2)
    assert [each.replica for each in served] == [0, 1, 1, 1]


def test_the_prefix_router_goes_where_the_prefix_is():
    asks = [ask(row, row * 1.0, row % 3) for row in range(1, 31)]
    found = {}
    for name in ("round-robin", "prefix"):
        result, served = run(asks, router=router_named(name), num_replicas=2)
        found[name] = result.hit_rate
    assert found["prefix"] > found["round-robin"]
    homes = [{each.replica for each in served if each.row % 3 == family} for family in range(3)]
    assert all(len(home) == 1 for home in homes)


def test_the_prefix_router_leaves_a_full_replica_alone():
    asks = [ask(1, 0.0, 1)] + [ask(row, 5.0 + row * 1e-6, 1) for row in range(2, 22)]
    _, served = run(asks, router=PrefixAware(load_limit=1.25), num_replicas=2)
    counts = np.bincount([each.replica for each in served[1:]], minlength=2)
    assert counts.min() >= 7  # of 20: 1.25 times a half at most go to one


def test_an_unknown_router_is_refused_with_the_closest_name():
    with pytest.raises(ConfigError, match="did you mean round-robin"):
        router_named("round_robbin")
    with pytest.raises(ConfigError, match="load limit is 1 or more, got"):
        PrefixAware(0.5)


def test_limits_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="leave prompts no room"):
        ReplicaLimits(100, 16, max_step_tokens=256, max_sequences=256)
    with pytest.raises(ConfigError, match="num_blocks"):
        ReplicaLimits(0, 16)


# -- tiers ---------------------------------------------------------------------------------

FAST = MemoryTier("host", 40_000, 1e9, 1e-5)
SLOW = MemoryTier("disk", 1_000_000, 1e3, 1e-3)


def fill(manager, first, num_blocks):
    tokens = np.arange(first, first + num_blocks, dtype=np.int32)
    seq = manager.open(np.concatenate((tokens, [2**31 - 1])))
    manager.reserve(seq, num_blocks - seq.computed)
    manager.commit(seq, tokens[seq.computed :])
    manager.close(seq)


def held(tiers):
    return [len(store) for store in tiers._stores]


def test_evicted_blocks_move_down_tier_by_tier_and_out():
    tiers = Tiers((MemoryTier("a", 3000, 1e9), MemoryTier("b", 4000, 1e9)), 1000)
    manager = CacheManager(11, 1, sub_block=False, watchers=[tiers])
    fill(manager, 0, 10)
    assert held(tiers) == [0, 0]
    fill(manager, 100, 6)
    assert held(tiers) == [3, 2]
    assert tiers.segments(np.arange(5, 10)) == [(0, 3), (1, 2)]  # ends of prefixes go first
    fill(manager, 200, 5)
    assert held(tiers) == [3, 4]
    assert tiers.demoted_blocks == [10, 7]
    assert tiers.segments(np.arange(10)) == [(0, 3), (1, 4)]


def test_a_block_stored_again_leaves_its_tier():
    tiers = Tiers((MemoryTier("a", 50_000, 1e9),), 1000)
    manager = CacheManager(11, 1, sub_block=False, watchers=[tiers])
    fill(manager, 0, 10)
    fill(manager, 100, 10)
    assert held(tiers) == [9]
    fill(manager, 0, 4)
    assert tiers.tier_of(3) is None
    assert tiers.segments(np.arange(4, 10)) == [(0, 6)]


def test_fetching_takes_latency_and_bytes_over_bandwidth_and_tiers_work_side_by_side():
    tiers = Tiers((FAST, SLOW), 500)
    assert tiers.fetch_s([(0, 4)]) == 1e-5 + 4 * 500 / 1e9
    assert tiers.fetch_s([(0, 4), (1, 1), (0, 2)]) == 1e-3 + 500 / 1e3
    assert tiers.fetch_s([]) == 0.0


def three_asks(tier):
    """A prompt, another that pushes it off the device, and the first again."""
    asks = [ask(1, 0.0, 1), ask(2, 1.0, 2), ask(3, 2.0, 1)]
    result, served = run(asks, limits=limits(21), tiers=(tier,), block_bytes=500)
    return result, served[2]


def test_a_prompt_below_is_fetched_where_that_is_faster():
    result, again = three_asks(FAST)
    assert again.cached_tokens + again.fetched_tokens == 319  # the last token is computed
    assert result.tiers[0].fetched_blocks * BLOCK >= again.fetched_tokens > 0
    num_blocks = result.tiers[0].fetched_blocks
    assert again.ttft_s == pytest.approx(
        max(FAST.fetch_s(num_blocks * 500), LinearTiming().prefill_s(1, 319)), rel=1e-9
    )


def test_a_prompt_in_a_memory_tier_is_computed_where_that_is_faster():
    result, again = three_asks(SLOW)
    assert again.fetched_tokens == 0
    assert result.tiers[0].fetched_blocks == 0
    assert again.cached_tokens + again.computed_tokens == 320


def test_a_fetch_longer_than_the_computing_beside_it_is_what_the_step_takes():
    middling = MemoryTier("host", 40_000, 5e6, 1e-3)
    result, again = three_asks(middling)
    num_bytes = result.tiers[0].fetched_blocks * 500
    assert num_bytes > 0
    assert again.ttft_s == pytest.approx(middling.fetch_s(num_bytes), rel=1e-9)


def test_a_tier_too_small_for_a_block_is_refused():
    with pytest.raises(ConfigError, match=r"'host' of 999 bytes holds not one block of 1000"):
        Tiers((MemoryTier("host", 999, 1e9),), 1000)


# -- figures -------------------------------------------------------------------------------


def test_goodput_counts_requests_that_meet_both_objectives():
    asks = [request(row, float(row), prompt, output) for row, prompt, output in
            ((0, 100, 10), (1, 3000, 10), (2, 100, 1))]  # fmt: skip
    _, served = run(asks)
    first_s = served[0].ttft_s
    result, _ = run(asks, objective=Objective(ttft_s=2 * first_s))
    assert result.goodput.share == pytest.approx(2 / 3)
    assert result.goodput.requests_per_s == pytest.approx(2 / result.makespan_s)
    strict, _ = run(asks, objective=Objective(ttft_s=1.0, tpot_s=1e-6))
    assert strict.goodput.share == pytest.approx(1 / 3)  # one token has no time per token
    with pytest.raises(ConfigError, match="tpot_s is a number above 0, got -1"):
        Objective(tpot_s=-1.0)


def test_the_timeline_is_the_mean_over_each_span():
    class Fake:
        def __init__(self, waiting, running):
            self.num_waiting, self.num_running = waiting, running

    collector = Collector()
    for now, waiting, running in ((1.0, 2, 0), (2.0, 0, 2), (3.0, 0, 1), (4.0, 0, 0)):
        collector.sample(now, [Fake(waiting, running)])
    waiting, running = collector._means(4.0, 2)
    assert waiting.tolist() == [1.0, 0.0]
    assert running.tolist() == [0.0, 1.5]


def test_the_histogram_holds_every_request():
    asks = [request(row, row * 0.01, 50 * row, 3) for row in range(1, 20)]
    result, served = run(asks)
    assert sum(result.ttft_histogram.counts) == 19
    assert result.ttft_histogram.edges[0] == min(each.ttft_s for each in served)
    assert result.ttft_histogram.edges[-1] == pytest.approx(result.ttft_s.max)

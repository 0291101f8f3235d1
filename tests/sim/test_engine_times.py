"""Times of an engine's steps from data sheets: what they are made of, and how they grow."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from quire.errors import ConfigError
from quire_sim.hardware import EngineTimes, accelerator_named, accelerator_names, model_named
from quire_sim.hardware.collectives import all_reduce_s, gather_s
from quire_sim.hardware.engine_times import EAGER_LAYER_S, HOST_S

MODELS = ("llama-3.1-8b", "gpt-oss-20b", "qwen3-30b-a3b", "gemma-4-31b", "deepseek-v3")
LLAMA = model_named("llama-3.1-8b")
CONTEXTS = np.array([1, 30, 127, 128, 129, 1000, 5000, 70_000], np.int64)


def times(model="llama-3.1-8b", gpu="h100", *devices, **settings):
    return EngineTimes(model_named(model), accelerator_named(gpu), *devices, **settings)


def by_hand(device, rows, sampled):
    """Seconds of a step of Llama-3.1-8B beside its attention, on a card whose products reach `rate`."""
    stream, rate, layers = device["bandwidth"] * 0.94, device["rate"], 32
    body, head = 6_979_588_096, 128_256 * 4096
    products = sum(
        ((2 * (each + 32) * params / rate) ** 2 + (2 * params / stream) ** 2) ** 0.5
        for params, each in ((body, max(rows, 32)), (head, max(sampled, 32)))
    )
    activations = rows * 2 * (8 * 4096 * layers + body / 4096) * 0.65 / stream
    logits = sampled * 128_256 * 4 * 2 / stream
    return products + activations + logits + 0.2e-3 + layers * 30e-6


CARD = {"bandwidth": 1.008e12, "rate": 165.2e12}


def test_the_time_of_a_decode_step_equals_a_sum_by_hand():
    cached = 1001 * 131_072 / (1.008e12 * 0.85)
    expected = by_hand(CARD, 1, 1) + cached
    assert times(gpu="rtx-4090").decode_s([1000]) == pytest.approx(expected, rel=1e-12)


def test_beside_a_prompt_decoding_sequences_read_their_cache_for_each_query_head():
    prompt = 1000 * 1001 / 2 * 524_288 / (165.2e12 * 0.5)
    tiles = 64 * 1001 * 524_288 / (165.2e12 * 0.5)
    reads = 4 * 1001 * 131_072 / (1.008e12 * 1.5)
    assert tiles > reads
    expected = by_hand(CARD, 1001, 2) + prompt + tiles
    found = times(gpu="rtx-4090").step_s([(1000, 0)], np.array([1000]))
    assert found == pytest.approx(expected, rel=1e-12)


def test_sharing_heads_or_having_one_latent_saves_that_time():
    contexts = np.full(64, 4096, np.int64)
    card = msgspec.structs.replace(accelerator_named("h100"), packs_heads=False)
    packed = times().step_s([(512, 0)], contexts)
    apart = EngineTimes(LLAMA, card).step_s([(512, 0)], contexts)
    assert apart > packed + 5e-3
    latent = model_named("deepseek-v3")
    assert latent.num_kv_heads == 1
    assert EngineTimes(latent, card, 8).step_s([(512, 0)], contexts) == EngineTimes(
        latent, accelerator_named("h100"), 8
    ).step_s([(512, 0)], contexts)


def test_a_consumer_card_reaches_its_halved_peak_and_others_a_share_of_theirs():
    assert times(gpu="rtx-4090").matrix_rate == 165.2e12
    assert times(gpu="h100").matrix_rate == pytest.approx(0.75 * 989.5e12)
    small = LLAMA.stored_as(weights="fp8")
    for gpu, rate in (("h100", 0.75 * 1979e12), ("a100", 0.75 * 312e12)):
        assert EngineTimes(small, accelerator_named(gpu)).matrix_rate == pytest.approx(rate)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("devices", [(1,), (8,), (2, 4)])
def test_a_run_of_decode_steps_equals_each_step_to_the_bit(name, devices):
    model = times(name, "h100", *devices)
    run_s = model.decode_run_s(CONTEXTS, 50)
    assert run_s.tolist() == [model.step_s([], CONTEXTS + step) for step in range(50)]


@pytest.mark.cases(54)
@pytest.mark.parametrize("gpu", accelerator_names())
@pytest.mark.parametrize("name", MODELS)
def test_more_work_never_takes_less_time(name, gpu):
    model = times(name, gpu)
    steps = [
        model.step_s([], CONTEXTS[:4]),
        model.step_s([], CONTEXTS),
        model.step_s([(64, 0)], CONTEXTS),
        model.step_s([(64, 4096)], CONTEXTS),
        model.step_s([(1024, 4096)], CONTEXTS),
        model.step_s([(1024, 4096), (1024, 0)], CONTEXTS),
    ]
    assert steps == sorted(steps)
    assert 0 < steps[0] < steps[-1]


def test_an_empty_step_takes_no_time_and_negative_work_is_refused():
    assert times().step_s([]) == times().step_s([(0, 100)]) == 0
    for work in ([(-1, 0)], [(1, -1)]):
        with pytest.raises(ConfigError, match="both are 0 or more"):
            times().step_s(work)


def test_devices_that_share_a_model_pay_for_the_link_between_them():
    one, nvlink = times("llama-3.1-70b", "h100"), times("llama-3.1-70b", "h100", 4)
    pcie = times("llama-3.1-70b", "h100-pcie", 4)
    assert one.prefill_s(2048) / 4 < nvlink.prefill_s(2048) < one.prefill_s(2048) / 2.8
    assert pcie.prefill_s(2048) > 2 * nvlink.prefill_s(2048)


def test_a_sum_over_devices_is_twice_the_work_of_a_gather_and_nothing_for_one():
    h100, card = accelerator_named("h100"), accelerator_named("rtx-pro-6000")
    assert all_reduce_s(h100, 1, 1e9) == gather_s(card, 1, 1e9) == 0
    for device in (h100, card):
        small = gather_s(device, 4, 0)
        assert all_reduce_s(device, 4, 0) == small > 0
        assert all_reduce_s(device, 4, 1e9) - small == pytest.approx(
            2 * (gather_s(device, 4, 1e9) - small)
        )
    assert all_reduce_s(card, 2, 1e9) == pytest.approx(20e-6 + 1e9 / (64e9 * 0.25))


@pytest.mark.parametrize(
    ("heads", "num_gpus"), [("32 heads and 8 KV", 3), ("32 heads and 8 KV", 64)]
)
def test_devices_that_cannot_share_the_heads_are_refused(heads, num_gpus):
    with pytest.raises(ConfigError, match=f"{num_gpus} devices cannot share the {heads} heads"):
        times("llama-3.1-8b", "h100", num_gpus)
    assert times("llama-3.1-8b", "h100", 16).kv_copies == 2


def test_an_engine_without_graphs_takes_at_least_what_its_host_needs_to_start_kernels():
    tiny = model_named("qwen3-0.6b")
    graphs, eager = (EngineTimes(tiny, accelerator_named("h100"), eager=kind) for kind in (0, 1))
    assert graphs.decode_s([100]) == HOST_S
    assert eager.decode_s([100]) == tiny.num_layers * EAGER_LAYER_S
    assert eager.prefill_s(100_000) == graphs.prefill_s(100_000)


def test_groups_that_share_experts_read_them_once_together():
    apart, together = times("qwen3-30b-a3b", "h100"), times("qwen3-30b-a3b", "h100", 1, 2)
    batch = [1000] * 64
    assert together.decode_s(batch * 2) < apart.decode_s(batch)
    dense = EngineTimes(LLAMA, accelerator_named("h100"), 1, 2)
    assert dense.decode_s(batch * 2) == pytest.approx(times().decode_s(batch), rel=1e-9)


def test_ranks_that_step_together_wait_for_the_one_that_comes_last():
    two = times("qwen3-30b-a3b", "rtx-pro-6000", 1, 2)
    decodes, prompt = ((), np.full(8, 500, np.int64)), ([(2048, 0)], CONTEXTS[:0])
    both = two.ranks_s([decodes, prompt], 1)
    assert both == two.ranks_s([prompt, decodes], 1)
    assert both > two.ranks_s([decodes, ((), CONTEXTS[:0])], 1)
    assert both < two.ranks_s([prompt, prompt], 1) < 2 * both
    even = two.step_s([(2048, 0)], np.full(8, 500, np.int64))
    assert both > even
    assert two.ranks_s([decodes, decodes], 3).shape == (3,)


def test_a_window_bounds_what_a_sequence_reads():
    model = model_named("gpt-oss-20b")
    only = msgspec.structs.replace(
        model, kv=msgspec.structs.replace(model.kv, per_token=0), pair_flops=0
    )
    here = EngineTimes(only, accelerator_named("l4"))
    assert here.decode_s([200]) == here.decode_s([100_000])
    assert here.decode_s([50]) < here.decode_s([200])
    assert here.prefill_s(4096, 200) == here.prefill_s(4096, 100_000)


@pytest.mark.parametrize(
    ("name", "devices"), [("llama-3.1-70b", (2, 4, 8)), ("qwen3-32b", (1, 2, 4))]
)
@pytest.mark.parametrize("gpu", ["h100", "a100", "rtx-pro-6000"])
def test_decoding_on_more_devices_is_faster_but_less_than_in_proportion(name, devices, gpu):
    contexts = np.full(16, 2048, np.int64)
    took = [times(name, gpu, each).step_s([], contexts) for each in devices]
    for one, two in pairwise(took):
        assert one / 2 < two < one


def test_a_link_between_peers_is_worth_more_than_the_host():
    contexts = np.full(64, 1024, np.int64)
    direct, host = (times("llama-3.1-70b", gpu, 4) for gpu in ("a100", "a100-pcie"))
    alone = [times("llama-3.1-8b", gpu).step_s([(4096, 0)]) for gpu in ("a100", "a100-pcie")]
    assert alone[0] == pytest.approx(alone[1], rel=0.02)
    assert host.step_s([(4096, 0)]) > 1.5 * direct.step_s([(4096, 0)])
    assert host.step_s([], contexts) > 1.3 * direct.step_s([], contexts)


def test_experts_cost_as_the_few_that_are_chosen_and_at_last_as_all():
    model = times("qwen3-30b-a3b")
    facts, rate = model.model, model.accelerator.bandwidth
    one, many = (model.step_s([], np.full(n, 64, np.int64)) for n in (1, 128))
    assert 2 * facts.active_params / rate < one < 0.35 * 2 * facts.params / rate
    assert many > 2 * facts.params / rate


@pytest.mark.parametrize("gpu", ["h100", "a100", "rtx-4090"])
def test_fewer_bits_are_read_faster_and_computed_faster_only_in_eight_where_the_device_can(gpu):
    device = accelerator_named(gpu)
    full, eight, four = (
        EngineTimes(LLAMA.stored_as(bits), device) for bits in ("bfloat16", "fp8", "int4")
    )
    decode = [each.step_s([], CONTEXTS[:4]) for each in (full, eight, four)]
    assert decode == sorted(decode, reverse=True)
    prompt = [each.step_s([(8192, 0)]) for each in (full, eight, four)]
    assert prompt[2] == pytest.approx(prompt[0], rel=0.01)
    assert (prompt[1] < 0.8 * prompt[0]) == bool(device.fp8_flops)

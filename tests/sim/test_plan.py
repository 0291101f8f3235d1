"""Plans: what fits, when to fetch, what memory is worth."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from traces_read import head

from quire.errors import ConfigError
from quire_sim.curves import curves
from quire_sim.hardware import MemoryTier, Roofline, accelerator_named, model_facts, model_named
from quire_sim.plan import LruHits, Placement, advise, budget, crossover, plan, worth_of
from quire_sim.reuse import reuses
from quire_sim.trace import with_block_size
from traces import AGENT, CONVERSATION

GIB = 1 << 30
H100 = accelerator_named("h100")
HOST = MemoryTier("host", 256 * GIB, 50e9, 20e-6)


def conversation():
    trace = head(CONVERSATION)
    return reuses(trace, trace.block_size)


def sized(tier, num_bytes):
    return msgspec.structs.replace(tier, capacity_bytes=num_bytes)


def placed(model="llama-3.1-8b", **settings):
    return Placement(**({"model": model_named(model), "accelerator": H100} | settings))


def test_memory_left_by_weights_and_activations_is_for_kv():
    split = budget(placed(reserve_bytes=GIB), 8192)
    assert split.usable_bytes == int(H100.memory_bytes * 0.9)
    assert split.weight_bytes == 2 * 8_030_261_248
    assert split.kv_bytes == split.usable_bytes - split.weight_bytes - GIB
    assert split.block_bytes == 16 * 131_072
    assert split.num_blocks == split.kv_bytes // split.block_bytes
    assert split.users == split.kv_bytes // (8192 * 131_072)


def test_the_longest_sequence_is_the_last_that_fits():
    here = placed("gemma-4-31b")
    longest = budget(here, 8192).longest_tokens
    assert here.sequence_bytes(longest) <= here.free_bytes < here.sequence_bytes(longest + 1)


def test_windows_and_states_are_set_aside_for_each_user():
    here = placed("nemotron-3-super-120b", num_gpus=4)
    split = budget(here, 8192)
    assert split.kv_copies == 2
    per_user = 2 * (8192 * 8192 + here.model.kv.state_bytes)
    assert split.sequence_bytes == per_user
    assert split.users == split.kv_bytes // per_user
    states = split.users * 2 * here.model.kv.state_bytes
    assert split.num_blocks * split.block_bytes <= split.kv_bytes - states


def test_a_model_of_windows_alone_has_users_but_no_blocks():
    config = {
        "model_type": "mistral", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 100,
        "num_attention_heads": 4, "intermediate_size": 128, "sliding_window": 256,
    }  # fmt: skip

    here = Placement(model=model_facts(config), accelerator=H100)
    split = budget(here, 8192)
    assert (split.block_bytes, split.num_blocks) == (0, 0)
    assert split.users > 0


@pytest.mark.parametrize(
    ("model", "gpu", "context", "needed"),
    [
        ("llama-3.1-405b", "h100", 8192, 16),
        ("llama-3.1-70b", "h100", 8192, 2),
        ("deepseek-v3", "h200", 8192, 8),
    ],
)
def test_a_model_that_does_not_fit_says_how_many_devices_it_takes(model, gpu, context, needed):
    here = placed(model, accelerator=accelerator_named(gpu))
    with pytest.raises(ConfigError, match=f"--num-gpus {needed}"):
        budget(here, context)
    enough = msgspec.structs.replace(here, num_gpus=needed)
    assert budget(enough, context).users >= 1
    fewer = msgspec.structs.replace(here, num_gpus=needed // 2)
    assert not fewer.users(context)


def test_weights_that_leave_no_room_for_a_sequence_say_how_many_devices_it_takes():
    here = placed("qwen3-32b", utilization=0.85)
    split = budget(here, 40_960)
    assert split.users == 0
    assert split.num_gpus_needed == 2
    assert budget(msgspec.structs.replace(here, num_gpus=2), 40_960).users > 0


def test_a_model_that_fits_nowhere_says_so():
    tiny = msgspec.structs.replace(H100, memory_bytes=1 << 20)
    with pytest.raises(ConfigError, match="1,024 x h100"):
        budget(placed("llama-3.1-405b", accelerator=tiny), 8192)


@pytest.mark.parametrize(
    "settings", [{"num_gpus": 0}, {"utilization": 0}, {"utilization": 1.5}, {"block_size": 0}]
)
def test_a_placement_that_cannot_be_is_refused(settings):
    with pytest.raises(ConfigError):
        placed(**settings)


ROOFLINE = Roofline(model_named("llama-3.1-8b"), H100)


def found(bandwidth, latency_s=0.0, limit=131_072):
    return crossover(ROOFLINE, MemoryTier("x", GIB, bandwidth, latency_s), limit)


def test_a_fast_tier_always_wins_and_a_hopeless_one_never():
    assert found(50e9).verdict == "always"
    assert found(50e9, latency_s=1e4).verdict == "never"


def test_a_slow_start_is_worth_it_from_some_length_on():
    answer = found(50e9, latency_s=0.05)
    (first, last) = answer.wins[0]
    assert last == answer.limit
    assert answer.verdict == f"from {first:,}"
    tier = MemoryTier("x", GIB, 50e9, 0.05)
    for tokens, wins in ((first, True), (first - 16, False)):
        fetched = ROOFLINE.ttft_s(256, tokens, tier)
        assert (fetched < ROOFLINE.ttft_s(256 + tokens)) is wins


def test_a_slow_tier_wins_where_the_fetch_hides_and_where_attention_grows():
    answer = found(2.5e9)
    assert len(answer.wins) == 2
    assert answer.wins[0][0] == 16
    assert answer.wins[1][1] == answer.limit
    assert " and from " in answer.verdict


@pytest.mark.cases(4)
@pytest.mark.parametrize("bandwidth", [0.5e9, 2.5e9, 3.3e9, 50e9])
@pytest.mark.parametrize("latency_s", [0.0, 2e-3, 0.2])
def test_the_length_from_which_a_tier_pays_is_exact(bandwidth, latency_s):
    limit = 16_384
    answer = found(bandwidth, latency_s, limit)
    tier = MemoryTier("x", GIB, bandwidth, latency_s)
    inside = [
        tokens
        for tokens in range(16, limit + 1, 16)
        if ROOFLINE.ttft_s(256, tokens, tier) < ROOFLINE.ttft_s(256 + tokens) * (1 - 1e-9)
    ]
    said = [tokens for first, last in answer.wins for tokens in range(first, last + 1, 16)]
    assert said == inside


@pytest.mark.parametrize("name", [CONVERSATION, AGENT])
def test_hits_of_single_requests_add_up_to_the_exact_curve(name):
    trace = head(name)
    work, curve = LruHits(reuses(trace, trace.block_size)), curves(trace).lru
    for blocks in (0, 10, 100, 1000, 10**6):
        cached = work.cached_tokens(blocks * trace.block_size)
        assert (cached >= 0).all()
        assert cached.sum() / work.prompt_tokens == pytest.approx(curve.at(blocks), abs=2e-3)
    assert work.token_hit(work.unique_tokens) == pytest.approx(curve.ceiling, abs=2e-3)


def small():
    """A device so small that the beginning of a trace does not fit."""
    return msgspec.structs.replace(H100, memory_bytes=20 * GIB)


def test_more_memory_never_hits_less_nor_takes_longer():
    rooms = [[], *([sized(HOST, size * GIB)] for size in (16, 64, 256))]
    rows = worth_of(LruHits(conversation()), ROOFLINE, 8 * GIB, rooms)
    for less, more in pairwise(rows):
        assert more.token_hit >= less.token_hit
        assert more.prefill_gpu_s <= less.prefill_gpu_s
        assert more.ttft_s <= less.ttft_s
    assert rows[-1].token_hit > rows[0].token_hit
    assert rows[0].saved_gpu_s == 0
    assert rows[-1].saved_gpu_s == pytest.approx(rows[0].prefill_gpu_s - rows[-1].prefill_gpu_s)


def test_without_reuse_every_prompt_is_computed():
    work = LruHits(conversation())
    (row,) = worth_of(work, ROOFLINE, 0, [[]])
    alone = [ROOFLINE.prefill_s(request.prompt_tokens) for request in head(CONVERSATION)]
    assert row.token_hit == 0
    assert row.prefill_gpu_s == pytest.approx(sum(alone))
    assert row.ttft_s == pytest.approx(np.mean(alone))


def test_a_tier_too_slow_to_fetch_from_saves_nothing():
    slow = MemoryTier("tape", 1 << 50, 1e6, 10.0)
    rooms = [[], [slow], [HOST, slow]]
    none, tape, both = worth_of(LruHits(conversation()), ROOFLINE, 8 * GIB, rooms)
    assert tape.token_hit > none.token_hit
    assert (tape.saved_gpu_s, tape.fetched) == (0, 0)
    assert tape.ttft_s == none.ttft_s
    assert both.saved_gpu_s > 0


def test_memory_is_listed_in_steps_of_64_gib_up_to_the_tier_then_the_next_tier():
    disk = MemoryTier("disk", 2048 * GIB, 6e9, 1e-4)
    host = MemoryTier("host", 130 * GIB, 50e9, 2e-5)
    here = placed(accelerator=small())
    rows = plan(here, 8192, [host, disk], trace=head(CONVERSATION)).worth
    sizes = [row.below.get("host", 0) // GIB for row in rows]
    assert sizes[:2] == [0, 64]
    assert max(sizes) <= 130
    assert rows[-1].below == {"host": 130 * GIB, "disk": 2048 * GIB}


def test_without_a_trace_half_a_block_of_the_context_is_expected_to_be_lost():
    advice = advise(model_named("llama-3.1-8b"), 8192)
    assert [each.lost for each in advice.choices] == [
        size / 2 / 8192 for size in (16, 32, 64, 128, 256)
    ]
    assert advice.recommended == 64
    assert advise(model_named("llama-3.1-8b"), 512).recommended == 16


def test_the_largest_block_that_loses_little_on_the_trace_is_recommended():
    hits = {16: 0.80, 32: 0.799, 64: 0.797, 128: 0.78, 256: 0.7}
    advice = advise(model_named("llama-3.1-8b"), 8192, trace_block=16, hit_at=hits.__getitem__)
    assert advice.recommended == 64
    assert [each.token_hit for each in advice.choices] == list(hits.values())
    assert any("128" in reason for reason in advice.reasons)


def test_block_sizes_are_measured_at_the_memory_of_the_plan():
    made = plan(placed(accelerator=small()), 8192, trace=head(AGENT))
    held = made.memory.kv_bytes
    for choice in made.blocks.choices:
        trace = with_block_size(head(AGENT), choice.block_size)
        blocks = held // (131_072 * choice.block_size)
        assert choice.token_hit == pytest.approx(curves(trace).lru.at(blocks), abs=2e-3)


def test_small_blocks_are_to_be_moved_together():
    advice = advise(model_named("nemotron-3-super-120b"), 8192, [HOST])
    assert any("at once" in reason for reason in advice.reasons)


def test_a_plan_is_data():
    made = plan(placed(), 8192, [HOST], trace=head(CONVERSATION))
    read = msgspec.json.decode(msgspec.json.encode(made))
    assert read["memory"]["users"] == made.memory.users
    assert read["tiers"][0]["name"] == "host"
    assert read["trace"]["num_requests"] == sum(1 for _ in head(CONVERSATION))
    assert read["worth"][0]["below"] == {}


def test_a_plan_without_tiers_looks_at_host_memory_behind_the_link():
    (tier,) = plan(placed(num_gpus=2), 8192).tiers
    assert tier.name == "host"
    assert tier.bandwidth == pytest.approx(2 * 0.8 * H100.link_bandwidth)


@pytest.mark.parametrize(("context", "new"), [(0, 1), (1, 0), (131_073, 1)])
def test_a_plan_for_sequences_that_cannot_be_is_refused(context, new):
    with pytest.raises(ConfigError):
        plan(placed(), context, new_tokens=new)

"""A real vLLM with the connector beside others, under a burst, with ranks and roles: `make test-vllm`. Minutes."""

import pytest
from vllm_help import NEEDS_VLLM, differ, extra, run, whole

from quire import demo_model

pytestmark = NEEDS_VLLM

BURST = {"seed": 7, "conversations": 36, "turns": 1, "max_tokens": 8, "repeat": 0}
FEW = {"seed": 8, "conversations": 6, "turns": 2, "max_tokens": 8, "repeat": 6}
SEATS = {"max_num_seqs": 12, "enable_prefix_caching": False}
SLOTS = "1MiB"
"""Quire-tiny takes 64 KiB a block of 32 tokens: 4 prompts of 5 blocks."""


@pytest.mark.parametrize("beside", ["before", "behind"])
def test_beside_another_connector_texts_are_equal_hits_come_and_metrics_are_exported(
    tmp_path, beside
):
    plain, _ = run(tmp_path, demo_model(), FEW, {"enable_prefix_caching": False})
    load = FEW | {"beside": beside}
    cold, told = run(tmp_path, demo_model(), load, None, extra(tmp_path / "kv"))
    assert told["counts"]["vllm:quire_saved_blocks"] > 0
    again, told = run(tmp_path, demo_model(), load, None, extra(tmp_path / "kv"))
    assert differ(plain, cold) == differ(plain, again) == (0, 0)
    assert [each["cached"] for each in again[:6]] == [whole(each) for each in again[:6]]
    assert told["counts"]["vllm:quire_loaded_requests"] >= 6


def test_every_hit_of_a_burst_over_small_staging_is_loaded_or_counted(tmp_path):
    tiers = extra(tmp_path / "kv")
    plain, _ = run(tmp_path, demo_model(), BURST, SEATS, tiers)
    burst, told = run(tmp_path, demo_model(), BURST, SEATS, tiers | {"staging": SLOTS})
    assert differ(plain, burst) == (0, 0)
    assert [each["cached"] for each in burst] == [whole(each) for each in burst]
    assert told["counts"]["vllm:quire_cut_blocks"] == 0
    assert "longer hits are cut" in told["said"]
    assert told["counts"]["vllm:quire_tier_hits disk"] > 0
    assert told["counts"]["vllm:quire_tier_in_service disk"] == 1
    gated = tiers | {"staging": SLOTS, "settings": {"busy_share": 1.0}}
    burst, told = run(tmp_path, demo_model(), BURST, SEATS, gated)
    assert differ(plain, burst) == (0, 0)
    counts = told["counts"]
    missed = sum(whole(each) - each["cached"] for each in burst) // 32
    told_of = sum(counts[f"vllm:quire_{name}_blocks"] for name in ("cut", "refused", "failed"))
    assert missed == told_of, counts


def test_a_consumer_loads_and_stores_nothing_and_a_producer_loads_nothing(tmp_path):
    tiers = extra(tmp_path / "kv")
    first, told = run(tmp_path, demo_model(), FEW | {"role": "kv_producer"}, SEATS, tiers)
    assert told["counts"]["vllm:quire_loaded_tokens"] == 0
    again, told = run(tmp_path, demo_model(), FEW | {"role": "kv_consumer"}, SEATS, tiers)
    assert differ(first, again) == (0, 0)
    assert told["counts"]["vllm:quire_loaded_requests"] == 18
    assert told["counts"]["vllm:quire_saved_blocks"] == 0


def test_requests_for_logprobs_of_prompts_load_nothing(tmp_path):
    tiers, load = extra(tmp_path / "kv"), FEW | {"prompt_logprobs": 1}
    first, _ = run(tmp_path, demo_model(), FEW, SEATS, tiers)
    again, told = run(tmp_path, demo_model(), load, SEATS, tiers)
    assert differ(first, again) == (0, 0)
    counts = {name.removeprefix("vllm:quire_"): count for name, count in told["counts"].items()}
    assert counts["loaded_tokens"] == counts["late"] == counts["cut_blocks"] == 0

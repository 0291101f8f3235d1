"""quire as a secondary tier of vLLM's own offloading: `make test-vllm`. Minutes."""

from pathlib import Path

import pytest
from vllm_help import ENVIRONMENT, NEEDS_VLLM, differ, run

from peer_checks import assert_checks_hold
from quire import demo_model

pytestmark = NEEDS_VLLM

SCRIPT = Path(__file__).with_name("tier_run.py")
FEW = {"seed": 8, "conversations": 6, "turns": 2, "max_tokens": 8, "repeat": 6}
POOL = {"enable_prefix_caching": True, "num_gpu_blocks_override": 160, "max_num_seqs": 4}


def offloading(place, num_chunks=24):
    """Return the options of vLLM's connector: host memory for a few chunks, and quire's tiers below."""
    tier = {
        "type": "QuireTier",
        "module_path": "quire.engines.vllm",
        "tiers": ["host:1MiB", f"disk:{place}?capacity=1GiB"],
        "settings": {"close_timeout_s": 30, "load_timeout_s": 30, "lookup_timeout_s": 10},
    }
    return {
        "spec_name": "HostCopySpec",
        "spec_module_path": "host_copies",
        "cpu_bytes_to_use": num_chunks * 64 * 1024,
        "secondary_tiers": [tier],
    }


def test_the_tier_holds_its_contract_under_vllms_own_classes():
    assert_checks_hold(ENVIRONMENT / "bin/python", SCRIPT, {"HOME": str(Path.home())})


@pytest.mark.parametrize("kind", ["full", "windows"])
def test_texts_are_equal_and_chunks_come_back_in_another_engine(tmp_path, kind):
    model = demo_model() if kind == "full" else tmp_path / "tiny-gemma"
    plain, _ = run(tmp_path, model, FEW, POOL)
    tiers = offloading(tmp_path / "kv")
    cold, told = run(tmp_path, model, FEW, POOL, tiers)
    assert told["counts"]["vllm:kv_offload_tiering_write_bytes 1:QuireTier"] > 0
    assert told["counts"]["vllm:kv_offload_quire_in_service disk"] == 1
    warm, told = run(tmp_path, model, FEW, POOL, tiers)
    assert differ(plain, cold) == differ(plain, warm) == (0, 0)
    assert told["counts"]["vllm:kv_offload_tiering_read_bytes 1:QuireTier"] > 0
    assert "vllm:kv_offload_tiering_promotion_job_failures 1:QuireTier" not in told["counts"]
    assert [each["cached"] > 100 for each in warm[:6]] == [True] * 6

"""Tiers below pools on a CUDA device: the same tokens, and records that the host reads as well."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parents[1] / "differential"))

from hf_help import random_ids, tiny_config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from quire.engines.hf import PrefixCache  # noqa: E402
from quire.tiers.disk.tier import Disk  # noqa: E402
from quire.tiers.host.tier import Host  # noqa: E402
from quire.tiers.stack.settings import StackSettings  # noqa: E402
from quire.tiers.stack.stack import TierStack  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

OPEN = StackSettings(gate=False)


def cuda_model(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32)
    return model.eval().to("cuda")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"])
def test_a_restart_is_warm_from_disk_on_a_device(family, tmp_path):
    model = cuda_model(family)
    ids = random_ids(torch.Generator().manual_seed(1), 90).to("cuda")
    plain = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    for came in ({}, {"disk": 80}):
        with TierStack([Disk(tmp_path, "64MiB")], OPEN) as tiers:
            cache = PrefixCache(model, "4MiB", tiers=tiers, debug=True)
            text = cache.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
            assert torch.equal(text, plain)
            assert cache.last.tier_tokens == came
            assert tiers.drain(20)


def test_blocks_evicted_from_a_small_device_pool_come_back_under_either_policy():
    model = cuda_model("llama")
    prompts = [random_ids(torch.Generator().manual_seed(n), 80).to("cuda") for n in range(4)]
    plain = [model.generate(p, max_new_tokens=4, do_sample=False, pad_token_id=0) for p in prompts]
    for write in ("through", "back"):
        with TierStack([Host("64MiB")], StackSettings(gate=False, write=write)) as tiers:
            cache = PrefixCache(model, {"full": 9}, tiers=tiers, debug=True)
            came = 0
            for _ in range(2):
                for ids, expected in zip(prompts, plain, strict=True):
                    text = cache.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
                    assert torch.equal(text, expected)
                    came += sum(cache.last.tier_tokens.values())
            assert came

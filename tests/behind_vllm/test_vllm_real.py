"""A real vLLM on a CPU with the connector: `make test-vllm`. Minutes; each engine takes most of one to start."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from quire import demo_model

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("QUIRE_VLLM", REPOSITORY / ".venv-vllm"))
CLOSE = 1e-4
"""Logits that are nearer than this may change places with the batch that they are computed in."""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (ENVIRONMENT / "bin/python").exists(),
        reason=f"no vLLM in {ENVIRONMENT}: `make test-vllm` installs it",
    ),
]

LLAMA = {"seed": 1, "conversations": 40, "turns": 5, "max_tokens": 24, "repeat": 8}
SMALL_POOL = {"num_gpu_blocks_override": 120, "max_num_seqs": 16}
HYBRID = {"seed": 2, "conversations": 6, "turns": 3, "max_tokens": 24, "repeat": 6}
FAULTS = {
    "errors": 0.05,
    "losses": 0.1,
    "full": 0.05,
    "corruption": 0.05,
    "short_reads": 0.05,
    "false_hits": 0.05,
    "hangs": 0.005,
    "hang_s": 3.0,
}


def extra(place):
    return {
        "tiers": ["host:16MiB", f"disk:{place}?capacity=1GiB"],
        "settings": {"busy_share": 1.0, "gate": False},
        "staging": "64MiB",
    }


def run(tmp_path, model, load, engine=None, options=None, *, faults=None):
    """Serve a load with an engine of its own; return its results."""
    job, result = tmp_path / "job.json", tmp_path / "result.json"
    told = {"model": str(model), "engine": engine or {}, "extra": options, "faults": faults} | load
    job.write_text(json.dumps(told))
    result.unlink(missing_ok=True)
    here = Path(__file__).parent
    path = os.pathsep.join([str(REPOSITORY / "src"), str(here)])
    done = subprocess.run(
        [ENVIRONMENT / "bin/python", here / "vllm_run.py", job, result],
        env=os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        check=False,
        text=True,
        timeout=900,
    )
    assert result.exists(), done.stderr[-5000:]
    told = json.loads(result.read_text())
    return told["requests"], told


def differ(ones, others):
    """Return how many requests have another text, those apart whose first difference is between close logits."""
    wrong, flipped = 0, 0
    for one, other in zip(ones, others, strict=True):
        at = next(
            (
                i
                for i, (a, b) in enumerate(zip(one["tokens"], other["tokens"], strict=True))
                if a != b
            ),
            None,
        )
        if at is not None:
            close = one["gaps"][at] < CLOSE
            flipped, wrong = flipped + close, wrong + (not close)
    return wrong, flipped


def whole(request):
    return (request["prompt"] - 1) // 32 * 32


def test_conversations_with_preemption_have_the_same_text_with_tiers_and_with_faults_in_them(
    tmp_path,
):
    model = demo_model()
    plain, told = run(tmp_path, model, LLAMA, SMALL_POOL)
    assert told["preemptions"] > 0
    cold, told = run(tmp_path, model, LLAMA, SMALL_POOL, extra(tmp_path / "kv"))
    assert told["preemptions"] > 0
    assert told["counts"]["vllm:quire_loaded_requests"] > 0
    assert differ(plain, cold) == (0, 0)
    again, told = run(tmp_path, model, LLAMA, SMALL_POOL, extra(tmp_path / "kv"))
    assert differ(plain, again) == (0, 0)
    assert all(each["cached"] >= whole(each) - 64 for each in again[:40])
    faulty, told = run(
        tmp_path, model, LLAMA, SMALL_POOL, extra(tmp_path / "faulty"), faults=FAULTS
    )
    assert differ(plain, faulty) == (0, 0)
    assert told["counts"]["vllm:quire_loaded_requests"] > 0


def test_a_hybrid_model_is_found_again_after_a_restart_and_other_weights_are_not(tmp_path):
    model = tmp_path / "gemma"
    plain, _ = run(tmp_path, model, HYBRID)
    cold, _ = run(tmp_path, model, HYBRID, None, extra(tmp_path / "kv"))
    assert differ(plain, cold) == (0, 0)
    again, _ = run(tmp_path, model, HYBRID, None, extra(tmp_path / "kv"))
    assert differ(plain, again) == (0, 0)
    assert [each["cached"] for each in again[:6]] == [whole(each) for each in again[:6]]
    weights = model / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # the lowest bit of a sign or exponent: other weights, as long as these
    weights.write_bytes(content)
    other, _ = run(
        tmp_path, model, HYBRID | {"turns": 1, "repeat": 0}, None, extra(tmp_path / "kv")
    )
    assert other[0]["cached"] == 0
    assert (
        max(each["cached"] for each in other) == 96
    )  # what vLLM itself has of the others' first text

"""A real vLLM on a CPU with the connector: `make test-vllm`. Minutes; each engine takes most of one to start."""

import torch
from safetensors.torch import load_file, save_file
from vllm_help import CLOSE, NEEDS_VLLM, differ, extra, run, whole

from quire import demo_model

pytestmark = NEEDS_VLLM

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
    other_weights(model / "model.safetensors")
    first_turn = HYBRID | {"turns": 1, "repeat": 0}
    alone, _ = run(tmp_path, model, first_turn)
    other, _ = run(tmp_path, model, first_turn, None, extra(tmp_path / "kv"))
    assert min(apart(plain, alone)) > 100 * CLOSE  # what the first weights computed would show
    assert differ(alone, other) == (0, 0)
    assert max(apart(alone, other)) < CLOSE
    # Nobody finds the own text, 128 tokens and more, that is in the tiers of the first weights; what all begin with, these computed.
    assert max(each["cached"] for each in other) <= 96


def apart(ones, others):
    """Return of each request how far its logits are from those of another run, at the place where they differ most."""
    near = zip(ones, others, strict=False)
    return [
        max(abs(a - b) for a, b in zip(one["gaps"], two["gaps"], strict=True)) for one, two in near
    ]


def other_weights(file):
    """Replace weights by others, in a file of the same size."""
    before, drawn = file.stat().st_size, torch.Generator().manual_seed(4)
    weights = load_file(file)
    for tensor in weights.values():
        tensor.normal_(0, 0.3, generator=drawn)
    save_file(weights, file, metadata={"format": "pt"})
    assert file.stat().st_size == before

"""`benchmarks/lint_beside_servers.py`: predicted cached tokens equal those that real servers count."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "lint_beside_servers.py"
VLLM = Path(os.environ.get("QUIRE_VLLM", REPOSITORY / ".venv-vllm"))
LLAMA = REPOSITORY / ".llama"


def compared(*words):
    command = [sys.executable, SCRIPT, *map(str, words)]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.ci
def test_quire_serve_counts_what_its_cache_predicts():
    said = compared("quire", "--requests", 60, "--blocks", 96)
    assert "60 equal (100.00%)" in said
    assert "'evicted'" in said


@pytest.mark.long
@pytest.mark.skipif(
    not (VLLM / "bin/python").exists(), reason="no vLLM: make test-vllm installs it"
)
@pytest.mark.parametrize("at_once", [1, 4])
def test_vllm_counts_what_its_cache_predicts(at_once):
    words = ("--requests", 200, "--blocks", 160, "--tools", VLLM.parent, "--at-once", at_once)
    assert "'evicted'" in compared("vllm", *words)


@pytest.mark.long
@pytest.mark.skipif(not (LLAMA / "llama-server").exists(), reason="no .llama: make llama")
def test_llama_server_counts_what_its_slots_predict():
    folder = os.environ.get("QUIRE_SMOLLM2", str(Path.home() / ".cache/quire/models"))
    (model,) = Path(folder).glob("smollm2-*")
    words = ("--requests", 100, "--model", LLAMA / "model.gguf", "--tokenizer", model)
    compared("llama.cpp", *words)

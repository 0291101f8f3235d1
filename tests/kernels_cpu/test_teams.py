"""Threads that OpenMP keeps are let go of, before an engine computes on a thread of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

COUNTED = """
import os, torch
torch.set_num_threads(3)
def count(): return len(os.listdir("/proc/self/task"))
def work(): return float(torch.ones(1 << 20).add_(1).sum())
"""
RELEASED = """
from quire.kernels.teams import release_team
work(); before = count(); release_team(); after = count()
assert work() == 2 << 20 and count() == before
print(before - after)
"""
ENGINE = """
from transformers import LlamaConfig, LlamaForCausalLM
from quire.engines.loop import AsyncEngine, Engine
config = LlamaConfig(vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
engine = Engine(LlamaForCausalLM(config).eval(), num_blocks=8)
work(); before = count(); running = AsyncEngine(engine); after = count()
running.close()
print(before + 1 - after)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("program", [RELEASED, ENGINE])
def test_threads_of_a_team_end_and_come_back(program):
    run = subprocess.run(
        [sys.executable, "-c", COUNTED + program], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.returncode) == ("2\n", 0), run.stderr

"""Two engines of vLLM with ranks on one machine, real weights, faults drawn in all tiers: `make test-vllm`. Minutes.

QUIRE_VLLM_FAULTED=504 python -m pytest -m long tests/behind_vllm/test_vllm_ranks.py
"""

import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from vllm_help import NEEDS_VLLM, differ, ended, options, run, started

import real_models

sys.path.append(str(Path(__file__).parents[1] / "tiers"))

from servers import running

pytestmark = NEEDS_VLLM

NUM_REQUESTS = int(os.environ.get("QUIRE_VLLM_FAULTED", "60"))
"""Requests of both engines together."""

SEATS = {"enable_prefix_caching": False, "max_num_seqs": 2}
"""All that is found comes from tiers."""

FAULTS = {
    "errors": 0.03,
    "losses": 0.05,
    "full": 0.05,
    "corruption": 0.03,
    "short_reads": 0.03,
    "false_hits": 0.03,
    "hangs": 0.005,
    "hang_s": 2.0,
}


def stopping(server, num_records):
    """Kill a Redis server, on a thread, once it has so many records."""

    def wait():
        with server.client() as client:
            while client.dbsize() < num_records:
                time.sleep(0.05)
        server.stop()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.system("redis-server")
@pytest.mark.parametrize("name", list(real_models.MODELS))
def test_two_ranks_with_faults_in_all_tiers_and_a_killed_redis_have_the_same_texts(tmp_path, name):
    if why := real_models.missing(name):
        pytest.skip(why)
    model = real_models.kept_at(name)
    turns = 3 if name == real_models.SMOLLM2 else 10  # past a window of 512
    load = {"seed": 11, "conversations": max(2, NUM_REQUESTS // 2 // turns), "turns": turns}
    load |= {"max_tokens": 8, "repeat": 0}
    plain, _ = run(tmp_path, model, load, SEATS)
    with running(tmp_path) as server, ExitStack() as stack:
        killed = stopping(server, 20)
        engines = []
        for rank in (0, 1):
            place = f"{tmp_path}/kv/{{rank}}"
            tiers = options("host:8MiB", f"disk:{place}?capacity=1GiB", server.url)
            job = {"model": str(model), "engine": SEATS, "extra": tiers, "faults": FAULTS}
            job |= load | {"environment": {"VLLM_DP_RANK": str(rank)}}
            engines.append(stack.enter_context(started(tmp_path, "vllm_run.py", job, f"r{rank}")))
        told = [ended(*each)[0] for each in engines]
        killed.join(1)
        assert not killed.is_alive()
    for each in told:
        assert differ(plain, each["requests"]) == (0, 0)
        assert each["counts"]["vllm:quire_loaded_requests"] > 0
    assert {each.name for each in (tmp_path / "kv").iterdir()} == {"0", "1"}

"""Random requests over real GGUF files: rows bit by bit, and logits within llama.cpp's distance to itself.

pytest -m long -s tests/real/test_real_gguf_traffic.py    # 500 requests of each of four files
"""

import random
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gguf")

from gguf_engine_help import tiny_file
from gguf_files import FILES, real_file
from gguf_traffic import RealTraffic

pytestmark = pytest.mark.system("llama.cpp")
LONG = 500


@pytest.mark.ci
@pytest.mark.parametrize("seed", range(2))
def test_rows_and_logits_of_random_requests_to_a_tiny_model_are_right(seed, tmp_path):
    draw = random.Random(seed)
    sources = [[draw.randrange(3, 97) for _ in range(700)] for _ in range(4)]
    traffic = RealTraffic(Path(tiny_file()), seed, tmp_path, sources=sources)
    traffic.run(90, at_once=15)
    assert max(traffic.worst.values()) < 0.05
    for what in ("cached", "from tiers", "failed"):
        assert traffic.counts[what] > 0
    traffic.close()


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("num_requests", [40, LONG])
def test_logits_of_random_requests_are_within_the_distance_of_llama_cpp_to_itself(
    name, num_requests, tmp_path, record_property
):
    begun = time.perf_counter()

    def tell(line):
        sys.stderr.write(f"{time.perf_counter() - begun:6.0f} s  {line}\n")

    traffic = RealTraffic(real_file(name), num_requests, tmp_path, tell=tell)
    traffic.run(num_requests)
    record_property("told", traffic.told())
    assert max(*traffic.worst.values(), traffic.gap) <= traffic.own, traffic.told()
    for what in ("cached", "tokens"):
        assert traffic.counts[what] > 0
    assert {"computed", "saved", "restored"} <= {*traffic.rows.counts}
    if num_requests == LONG:
        for what in ("from tiers", "preemptions", "aborted", "failed", "dropped", "purged"):
            assert traffic.counts[what] > 0
    traffic.close()

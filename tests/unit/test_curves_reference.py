"""Curves of the public traces: published numbers, to all printed digits, and how long they take."""

import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest
from replay_help import ListTrace

from quire.sim.curves import curves
from quire.sim.trace import open_trace
from quire.sim.trace.rows import TraceRequest, compress

TRACES = Path(__file__).parents[3] / "shared" / "traces"
SHARES = (1, 5, 10, 25, 50)


def path_of(name):
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"the full trace {path} is not here")
    return path


class EveryId:
    """The conversation trace as the published numbers count it: every id is a block.

    The last id of a prompt stands for a partial block, which takes room and hits with the tokens
    that it has.
    """

    source, format, block_size = "conversation", "mooncake", 512

    def __init__(self, path):
        self._path = path

    def __iter__(self):
        dense = np.full(1 << 20, -1, np.int32)
        known = 0
        with gzip.open(self._path, "rt") as lines:
            for number, line in enumerate(lines, 1):
                row = json.loads(line)
                ids = np.array(row["hash_ids"])
                new = ids[dense[ids] < 0]
                dense[new] = np.arange(known, known + len(new))
                known += len(new)
                tokens, runs = row["input_length"], compress(dense[ids])
                yield TraceRequest(number, row["timestamp"] / 1000, tokens, 0, runs)


@pytest.fixture(scope="module")
def every_id():
    trace = EveryId(path_of("mooncake_conversation.jsonl.gz"))
    return ListTrace(list(trace), trace.block_size)


def percent(curve, capacities, digits):
    return [round(100 * curve.at(int(capacity)), digits) for capacity in capacities]


def shares_of(both):
    return [both.num_unique * share / 100 for share in SHARES]


def test_the_conversation_trace_gives_the_reference_table(every_id):
    both = curves(every_id)
    assert both.num_unique == 182_790
    assert percent(both.lru, shares_of(both), 2) == [5.35, 19.96, 28.44, 36.04, 37.03]
    assert percent(both.optimum, shares_of(both), 2) == [25.12, 37.36, 37.36, 37.36, 37.36]
    assert round(100 * both.ceiling, 2) == 37.36


def test_the_last_half_of_the_conversation_trace_gives_the_public_values(every_id):
    both = curves(every_id, count_from=12_031 // 2)
    sizes = (819, 3_276, 6_553, 13_107, 26_214, 52_428)
    assert percent(both.lru, sizes, 3) == [4.649, 7.297, 15.305, 25.024, 33.000, 37.798]
    assert percent(both.optimum, (409, 1_638, 3_276, 6_553), 3) == [12.647, 24.537, 32.002, 38.601]
    assert round(100 * both.ceiling, 3) == 39.811


def test_the_agent_trace_gives_the_reference_table():
    both = curves(open_trace(path_of("agent_16tok.jsonl.gz")))
    assert both.num_unique == 24_751
    assert percent(both.lru, shares_of(both)[:4], 2) == [41.86, 80.91, 88.77, 89.72]
    assert percent(both.optimum, shares_of(both)[:4], 2) == [48.86, 82.52, 89.23, 89.73]


def test_full_blocks_of_the_coding_agent_trace_reach_its_ceiling():
    trace = open_trace(path_of("coding_agent_64tok.jsonl.gz"))
    both = curves(trace)
    assert both.num_unique == 1_727_499
    assert round(100 * both.ceiling, 2) == 96.31
    assert both.lru.at(both.num_unique) == both.optimum.at(both.num_unique) == both.ceiling


@pytest.mark.parametrize(
    ("name", "seconds"),
    [("mooncake_conversation.jsonl.gz", 0.5), ("coding_agent_64tok.jsonl.gz", 3.0)],
)
def test_both_curves_take_little_more_than_reading_the_file(name, seconds):
    path = path_of(name)
    taken = []
    for _ in range(3):
        begun = time.process_time()
        curves(open_trace(path))
        taken.append(time.process_time() - begun)
        if taken[-1] <= seconds:
            return
    pytest.fail(f"{name}: {min(taken):.2f} s of CPU, the limit is {seconds} s")

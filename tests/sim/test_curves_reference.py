"""Curves of the public traces: published numbers, to all printed digits, and how long they take."""

from pathlib import Path

import pytest

from cpu_time import cpu_s
from quire_sim.curves import curves
from quire_sim.trace import open_trace
from traces import AGENT, NAMES
from turns import few

TRACES = Path(__file__).parents[3] / "shared" / "traces"
SHARES = (1, 5, 10, 25, 50)


def path_of(name):
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"the full trace {path} is not here")
    return path


@pytest.fixture(scope="module")
def conversation():
    return open_trace(path_of("mooncake_conversation.jsonl.gz"))


def percent(curve, capacities, digits):
    return [round(100 * curve.at(capacity), digits) for capacity in capacities]


def shares_of(both):
    return [both.num_unique * share // 100 for share in SHARES]


@pytest.mark.ci
def test_the_conversation_trace_gives_the_reference_table(conversation):
    both = curves(conversation)
    assert both.num_unique == 182_790
    assert percent(both.lru, shares_of(both), 2) == [5.35, 19.96, 28.44, 36.04, 37.03]
    assert percent(both.optimum, shares_of(both), 2) == [25.14, 37.36, 37.36, 37.36, 37.36]
    assert percent(both.reachable, shares_of(both), 2) == [24.47, 37.36, 37.36, 37.36, 37.36]
    assert round(100 * both.ceiling, 2) == 37.36


@pytest.mark.ci
def test_the_last_half_of_the_conversation_trace_gives_the_public_values(conversation):
    both = curves(conversation, count_from=12_031 // 2)
    sizes = (819, 3_276, 6_553, 13_107, 26_214, 52_428)
    assert percent(both.lru, sizes, 3) == [4.649, 7.297, 15.305, 25.024, 33.000, 37.798]
    # Belady's rule on blocks gives 12.647, 24.537, 32.002 and 38.601; the bound weighs the last, partial ones.
    assert percent(both.optimum, (409, 1_638, 3_276, 6_553), 3) == [12.678, 24.562, 32.020, 38.608]
    assert round(100 * both.ceiling, 3) == 39.811


def test_the_agent_trace_gives_the_reference_table():
    both = curves(open_trace(path_of("agent_16tok.jsonl.gz")))
    assert both.num_unique == 24_751
    assert percent(both.lru, shares_of(both)[:4], 2) == [41.86, 80.91, 88.77, 89.72]
    assert percent(both.optimum, shares_of(both)[:4], 2) == [48.86, 82.52, 89.23, 89.73]
    assert percent(both.reachable, shares_of(both)[:4], 2) == [43.39, 81.31, 89.14, 89.73]


@pytest.mark.long
def test_the_coding_agent_trace_reaches_its_ceiling():
    trace = open_trace(path_of("coding_agent_64tok.jsonl.gz"))
    both = curves(trace)
    assert both.num_unique == 1_727_499
    assert round(100 * both.ceiling, 2) == 96.31
    assert both.lru.at(both.num_unique) == both.optimum.at(both.num_unique) == both.ceiling


TIMED = [f"{name}.jsonl.gz" for name in NAMES]


@pytest.mark.parametrize("name", few(TIMED, f"{AGENT}.jsonl.gz"))
def test_curves_take_less_than_ten_times_the_cpu_time_of_reading_the_trace(name):
    path = path_of(name)
    assert cpu_s(lambda: curves(open_trace(path))) < 10 * cpu_s(lambda: list(open_trace(path)))

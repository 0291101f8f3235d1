"""Replays of the public traces: published numbers, to all printed digits, and how fast."""

import pytest
from traces_read import whole

from cpu_time import cpu_s
from quire_sim.replay import replay
from traces import AGENT, CONVERSATION
from turns import few_rows

pytestmark = pytest.mark.slow


CELLS = [
    ("lru", 1827, 5.35),
    ("lru", 18279, 28.44),
    ("lru", 91395, 37.03),
    ("fifo", 18279, 28.42),
]


@pytest.fixture(scope="module")
def conversation(kept):
    return kept(CONVERSATION)


@pytest.mark.ci
@pytest.mark.parametrize(("policy", "capacity", "percent"), few_rows(CELLS, CELLS[3]))
def test_the_conversation_trace_gives_the_reference_table(conversation, policy, capacity, percent):
    assert round(100 * replay(conversation, capacity, policy).token_hit, 2) == percent


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("policy", "capacity", "percent"),
    [
        ("lru", 247, 41.86),
        ("lru", 1237, 80.91),
        ("lru", 2475, 88.77),
        ("lru", 6187, 89.72),
        ("fifo", 247, 41.88),
        ("fifo", 1237, 80.47),
        ("fifo", 2475, 88.49),
    ],
)
def test_the_agent_trace_gives_the_reference_table(kept, policy, capacity, percent):
    assert round(100 * replay(kept(AGENT), capacity, policy).token_hit, 2) == percent


def test_the_last_half_gives_the_public_reference_value(conversation):
    result = replay(conversation, 6553, count_from=12_031 // 2)
    assert round(100 * result.token_hit, 3) == 15.305


@pytest.mark.ci
def test_knowing_the_last_use_makes_lru_the_optimum(conversation):
    hit = replay(conversation, 9139, hints="last-use").token_hit
    assert round(100 * hit, 2) == 37.36


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "capacity"), few_rows([(AGENT, 2475), (CONVERSATION, 18279)], (AGENT, 2475))
)
def test_a_replay_takes_a_few_dozen_times_what_going_through_the_requests_does(name, capacity):
    trace = whole(name)
    assert cpu_s(lambda: replay(trace, capacity)) < 50 * cpu_s(lambda: list(trace))

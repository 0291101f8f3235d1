"""Thousands of histories of a stack whose tiers fail in every way, in virtual time."""

import pytest
from faulty_stack import RECORDS, FaultyStack, fresh, prompt, sizes

from quire.tiers.base import Outcome


def run(seed, num_clients=4, num_steps=6, jumping=0.0):
    simulated = FaultyStack(seed, jumping)

    def history():
        simulated.together(num_clients, num_steps)
        simulated.heal()
        simulated.lanes.sleep(120)
        after(simulated)
        return simulated

    return simulated.lanes.run(history)


def after(simulated):
    """All faults are over and two minutes have passed."""
    stack = simulated.stack
    keys = prompt(0)
    for _ in range(4):  # trials are made when somebody asks; what was torn or lost goes
        stack.find(keys, contiguous=False)
        stack.count_use(keys)
        stack.delete(keys)
        for key in keys:  # one by one, since a queue may hold a few only
            stack.store_evicted([key], fresh([key]))
            assert stack.drain(5)
        simulated.lanes.sleep(10)
        outcomes, buffers = stack.load(keys, sizes(keys))
    assert outcomes == [Outcome.HIT] * len(keys)
    assert [bytes(buffer) for buffer in buffers] == [RECORDS[key] for key in keys]
    if stack.settings.write != "back":
        assert all(all(tier.contains(keys)) for tier in stack.tiers)
    stats = stack.stats()
    assert [tier.reading for tier in stats.tiers] == ["closed"] * len(stats.tiers)
    assert [tier.queued_bytes for tier in stats.tiers] == [0] * len(stats.tiers)
    assert sum(map(len, stack._reader._flights)) == 0
    assert stack._prefetching.active == {}
    stack.check()
    lanes = [lane for level in stack._levels for lane in (level.loads, level.stores)]
    assert sum(len(lane._alive) for lane in lanes) <= len(stack.tiers) * (
        stack.settings.threads + 1
    )
    stack.close()
    assert [len(lane._alive) for lane in lanes] == [0] * len(lanes)


pytestmark = pytest.mark.slow
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "block", [pytest.param(block, marks=LONG if block else []) for block in range(20)]
)
def test_whatever_fails_hits_are_right_calls_end_in_time_and_service_returns(block):
    for seed in range(50 * block, 50 * block + 50):
        try:
            run(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.ci
@pytest.mark.parametrize("num_histories", [30, pytest.param(200, marks=LONG)])
def test_a_clock_that_jumps_does_no_harm(num_histories):
    for seed in range(2000, 2000 + num_histories):
        try:
            run(seed, jumping=0.1)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.ci
def test_the_same_seed_gives_the_same_history():
    for seed in range(10):
        one, two = run(seed), run(seed)
        assert one.history == two.history
        assert one.lanes.num_switches == two.lanes.num_switches


@pytest.mark.ci
def test_histories_meet_every_fault_and_every_outcome():
    met, outcomes = set(), set()
    for seed in range(60):
        simulated = run(seed)
        for tier in simulated.faulty:
            met.update(name for name, count in tier.met.items() if count)
        outcomes.update(
            each
            for event in simulated.history
            for each in event[-1:]
            if isinstance(each, list)
            for each in each
        )
    assert met == {
        "latency_s",
        "errors",
        "hangs",
        "losses",
        "full",
        "corruption",
        "short_reads",
        "false_hits",
        "crash_at",
    }
    assert {
        "hit",
        "absent",
        "corrupt",
        "timeout",
        "error",
        "skipped",
        "stored",
        "present",
    } <= outcomes

"""Sweeps: the same rows, in the same order, wherever they were computed."""

import subprocess
import sys
import time

import pytest
from hypothesis import strategies as st
from replay_help import random_chains, trace_of
from trace_help import mooncake_rows, write

from quire.core.policies import policy_names
from quire.errors import ConfigError, TraceError
from quire_sim.curves import curves
from quire_sim.executors import EXECUTORS, Processes, RayWorkers, Serial, executor_named
from quire_sim.foresight import KINDS
from quire_sim.optimum import optimum_results
from quire_sim.replay import replay
from quire_sim.sweep import Experiment, SweepPoint, points_of, sweep
from quire_sim.trace import open_trace
from turns import drawn

POINTS = points_of([40, 7, 20], ["fifo", "optimum", "lru", "lfu"])


@pytest.fixture
def trace(tmp_path):
    """A trace in a file, so that other processes can read it."""
    rows = mooncake_rows(trace_of(random_chains(7), tail=0))
    return open_trace(write(tmp_path / "trace.jsonl", rows), block_size=4)


def timeless(results):
    """Rows without the time they took."""
    return [{**result.row(), "seconds": None} for result in results]


def test_rows_come_in_the_order_asked_for_and_equal_single_replays(trace):
    results = sweep(Experiment(trace), POINTS)
    assert [(row.capacity_blocks, row.policy) for row in results] == [
        (point.capacity_blocks, point.policy) for point in POINTS
    ]
    alone = [
        optimum_results(trace, [point.capacity_blocks])[0]
        if point.policy == "optimum"
        else replay(trace, point.capacity_blocks, point.policy)
        for point in POINTS
    ]
    assert timeless(results) == timeless(alone)


def test_a_point_asked_for_twice_is_replayed_once():
    trace, told = trace_of([[1], [1]]), []
    first, second = sweep(
        Experiment(trace), [SweepPoint(3, "lru"), SweepPoint(3, "lru")], done=told.append
    )
    assert first is second
    assert told == [SweepPoint(3, "lru")]


@pytest.mark.slow
def test_processes_give_the_rows_of_a_serial_run(trace):
    told = []
    results = sweep(Experiment(trace, "last-use"), POINTS, executor=Processes(2), done=told.append)
    assert timeless(results) == timeless(sweep(Experiment(trace, "last-use"), POINTS))
    assert sorted(told, key=POINTS.index) == POINTS


@pytest.mark.ci
@pytest.mark.slow
def test_a_local_ray_of_two_workers_gives_the_rows_of_a_serial_run_and_is_shut_down(trace):
    ray = pytest.importorskip("ray")
    results = sweep(Experiment(trace), POINTS, executor=RayWorkers(2))
    assert timeless(results) == timeless(sweep(Experiment(trace), POINTS))
    assert not ray.is_initialized()


def test_a_bad_row_is_an_error_of_the_sweep(trace, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(path.read_text() + '{"timestamp": 99000000, "input_length": -3}\n')
    with pytest.raises(TraceError, match="row 61"):
        sweep(Experiment(trace), POINTS)


# -- before anything runs ------------------------------------------------------------------


class NeverRuns:
    """An executor that must not be reached."""

    def run(self, function, tasks):
        raise AssertionError


@pytest.mark.parametrize(
    ("points", "hints", "message"),
    [
        ([SweepPoint(4, "lruu")], "none", "unknown policy 'lruu'; did you mean lru"),
        ([SweepPoint(4, "optimun")], "none", "did you mean optimum"),
        ([SweepPoint(0, "lru")], "none", "a capacity in blocks must be from 1"),
        ([SweepPoint(4, "lru")], "sesion-end", "did you mean session-end"),
    ],
)
def test_a_sweep_refuses_an_impossible_point_before_it_runs(points, hints, message):
    with pytest.raises(ConfigError, match=message):
        sweep(Experiment(trace_of([[1]]), hints), points, executor=NeverRuns())


def test_an_executor_has_a_known_name_and_some_workers():
    assert sorted(EXECUTORS) == ["process", "ray"]
    with pytest.raises(ConfigError, match="unknown executor 'thread'"):
        executor_named("thread", 2)
    with pytest.raises(ConfigError, match="from 1 to 4096, got 0"):
        executor_named("process", 0)


def test_a_single_process_or_task_starts_no_other_process():
    assert list(Processes(1).run(lambda task: -task, [3, 4])) == [(0, -3), (1, -4)]
    assert list(Processes(8).run(lambda task: -task, [3])) == [(0, -3)]
    assert list(Serial().run(str, [])) == []


INTERRUPTED = """
import os, signal, threading, time
from pathlib import Path
from quire_sim.executors import Processes

HERE = Path(__file__).parent

def work(number):
    (HERE / f"begun-{number}").touch()
    time.sleep(600)

def interrupt():
    while len([*HERE.glob("begun-*")]) < 2:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        list(Processes(2).run(work, [0, 1, 2]))
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interrupt_of_the_parent_alone_ends_all_workers(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr, done.returncode) == ("interrupted\n", "", 0)


IGNORED = """
import os, signal, threading, time
from quire_sim.executors import Processes

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    results = Processes(2).run(time.sleep, [0, 2, 0])
    print(next(results))
    os.killpg(0, signal.SIGINT)
    print(sorted(results))
"""


def test_an_interrupt_that_is_ignored_ends_nothing(tmp_path):
    script = tmp_path / "ignored.py"
    script.write_text(IGNORED)
    done = subprocess.run(
        [sys.executable, script], check=False, capture_output=True, text=True, timeout=120,
        start_new_session=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n", 1)[1] == "[(1, None), (2, None)]\n"


def test_closing_a_sweep_early_does_not_wait_for_running_points():
    began_s = time.monotonic()
    results = Processes(2).run(time.sleep, [0, 600, 600])
    assert next(results) == (0, None)
    results.close()
    assert time.monotonic() - began_s < 300


def test_without_ray_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[ray\]' in a clone"):
        list(RayWorkers(2).run(str, [1]))


# -- the optimum ---------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("seed", range(5))
def test_the_optimum_finds_what_its_curve_says_and_no_policy_more(seed):
    trace = trace_of(random_chains(seed, num_requests=120))
    curve = curves(trace).optimum
    for row in optimum_results(trace, [1, 3, 9, 20, 500]):
        assert row.token_hit == curve.at(row.capacity_blocks)
        assert row.hit_tokens + sum(row.missed.values()) == row.prompt_tokens
        lru = replay(trace, row.capacity_blocks)
        assert row.hit_blocks >= lru.hit_blocks
        for reason in ("cold", "oversized", "partial_block"):
            assert row.missed[reason] == lru.missed[reason]


@drawn(
    30,
    600,
    st.integers(0, 10**6),
    st.integers(1, 25),
    st.sampled_from([*KINDS, "return-time:2"]),
    st.sampled_from(policy_names()),
)
def test_no_policy_finds_more_than_is_reachable_whatever_it_is_told(seed, capacity, hints, policy):
    trace = trace_of(random_chains(seed % 1000, num_requests=50))
    (best,) = optimum_results(trace, [capacity], "reachable")
    assert best.token_hit == curves(trace).reachable.at(capacity)
    assert replay(trace, capacity, policy, hints=hints).hit_blocks <= best.hit_blocks


def test_the_optimum_counts_from_a_request_like_a_replay_does():
    trace = trace_of(random_chains(3))
    (row,) = optimum_results(trace, [1000], count_from=20)
    assert row.hit_tokens == replay(trace, 1000, count_from=20).hit_tokens
    assert row.num_requests == 40

"""Profiles of measured steps, and what is found from them."""

import gzip
import json

import msgspec
import numpy as np
import pytest

from cli_help import refusal, shown, told
from quire.errors import ConfigError, TraceError
from quire_sim.hardware import accelerator_named, model_named
from quire_sim.hardware.profiles import (
    Calibration,
    MeasuredStep,
    MeasuredTimes,
    StepCosts,
    calibrate_steps,
    read_calibration,
    read_profile,
    work_of,
)

TRUE = StepCosts(4e-3, 5e-4, 2e-5, 3e-9, 1e-4, 2e-7, 3e-5)
NAMES = StepCosts.__struct_fields__


def measured(num_steps=400, noise=0.0, seed=0, costs=TRUE):
    """Return steps of all kinds: parts of prompts, sequences that decode, both."""
    random = np.random.default_rng(seed)
    steps = []
    for _ in range(num_steps):
        chunks = [
            (int(random.integers(1, 500)), int(random.integers(0, 2000)))
            for _ in range(random.integers(0, 3))
        ]
        contexts = random.integers(1, 3000, random.integers(0 if chunks else 1, 12)).tolist()
        work = work_of(chunks, len(contexts), sum(contexts))
        seconds = float(np.dot(work, msgspec.structs.astuple(costs)))
        steps.append(MeasuredStep(chunks, contexts, seconds * (1 + noise * random.normal())))
    return steps


def write(path, steps):
    path.write_bytes(b"\n".join(map(msgspec.json.encode, steps)))
    return path


def test_the_costs_that_made_the_measurements_are_found():
    found = calibrate_steps(measured())
    for name in NAMES:
        assert getattr(found.costs, name) == pytest.approx(getattr(TRUE, name), rel=1e-6)
    assert found.error < 1e-9
    assert found.num_steps == 400


@pytest.mark.cases(1)
@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_the_error_is_that_of_steps_left_out(noise):
    found = calibrate_steps(measured(noise=noise, num_steps=2000))
    assert found.error == pytest.approx(noise * (2 / np.pi) ** 0.5, rel=0.1)  # mean of |normal|
    assert found.sum_error < noise / 5
    for name in ("step_s", "token_s", "sequence_s"):
        assert getattr(found.costs, name) == pytest.approx(getattr(TRUE, name), rel=0.1)


def test_a_cost_that_is_not_there_is_none():
    found = calibrate_steps(measured(costs=StepCosts(step_s=1e-3, token_s=1e-5)))
    assert found.costs == StepCosts(pytest.approx(1e-3), 0, pytest.approx(1e-5), 0, 0, 0, 0)


def times(found):
    return MeasuredTimes(model_named("quire-tiny"), accelerator_named("cpu"), calibration=found)


def test_times_are_sums_of_costs_and_a_run_equals_its_steps_to_the_bit():
    timing = times(Calibration(TRUE, 100, 0.05, 0.01))
    contexts = np.array([10, 200, 3000], np.int64)
    run_s = timing.decode_run_s(contexts, 40)
    assert run_s.tolist() == [timing.step_s([], contexts + step) for step in range(40)]
    step = MeasuredStep([(100, 50)], contexts.tolist(), 1.0)
    work = work_of(step.chunks, 3, 3210)
    expected = np.dot(work, msgspec.structs.astuple(TRUE))
    assert timing.step_s(step.chunks, contexts) == pytest.approx(expected)
    assert timing.step_s([]) == 0.0
    assert timing.known_error() == 0.05


@pytest.mark.cases(1)
@pytest.mark.parametrize("compressed", [False, True])
def test_a_profile_is_read_as_it_was_written(tmp_path, compressed):
    steps = measured(30)
    path = write(tmp_path / "steps.jsonl", steps)
    if compressed:
        path.write_bytes(gzip.compress(path.read_bytes()))
    assert read_profile(path) == steps
    assert read_calibration(path) == calibrate_steps(steps)


LOG = """INFO 11-25 22:35:11 [loggers.py:248] Engine 000: Avg prompt throughput: 1.0 tokens/s
(EngineCore_DP0 pid=7) INFO Iteration(3): 2 context requests, 301 context tokens, 1 generation \
requests, 1 generation tokens, iteration elapsed time: 12.50 ms, GPU KV cache usage: 1.2%
INFO Iteration(4): 0 context requests, 0 context tokens, 3 generation requests, 3 generation \
tokens, iteration elapsed time: 4.25 ms, GPU KV cache usage: 1.3%
INFO Iteration(5): 0 context requests, 0 context tokens, 0 generation requests, 0 generation \
tokens, iteration elapsed time: 1.00 ms (dummy), GPU KV cache usage: 1.3%
"""


def test_steps_are_read_from_the_log_of_vllm(tmp_path):
    log = tmp_path / "vllm.log"
    log.write_text(LOG.replace("\\\n", ""))
    assert read_profile(log) == [
        MeasuredStep([(151, 0), (150, 0)], [0], 0.0125),
        MeasuredStep([], [0, 0, 0], 0.00425),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no measured steps"),
        ("hello\nworld\n", "enable-logging-iteration-details"),
        ('{"chunks": [], "contexts": [1]}\n', "row 1"),
        ('{"chunks": [[1, -2]], "contexts": [], "seconds": 1}\n', "row 1"),
        ('{"chunks": [], "contexts": [5], "seconds": 0}\n', "row 1"),
        ('{"chunks": [], "contexts": [5], "seconds": 0.1}\n{', "row 2"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path, text, says):
    path = tmp_path / "profile"
    path.write_text(text)
    with pytest.raises(TraceError, match=says):
        read_profile(path)


def test_steps_that_tell_too_little_are_refused():
    with pytest.raises(ConfigError, match="19 measured steps are too few; it takes 20"):
        calibrate_steps(measured(19))
    with pytest.raises(ConfigError, match="all measured steps have the same work"):
        calibrate_steps(measured(1) * 30)


# -- as people type it ---------------------------------------------------------------------


@pytest.fixture
def profile(tmp_path):
    return write(tmp_path / "steps.jsonl", measured(200, 0.05))


def test_the_table_has_each_cost_and_the_error(profile):
    text = shown("calibrate", profile)
    for part in ("a step, whatever is in it", "a sequence that decodes", "200 steps", "left out"):
        assert part in text


@pytest.mark.ci
def test_a_saved_calibration_replaces_its_profile(profile, tmp_path):
    timing = tmp_path / "timing.json"
    shown("calibrate", profile, "--timing", timing)
    assert read_calibration(timing) == calibrate_steps(read_profile(profile))
    assert told("calibrate", profile)["error"] == read_calibration(timing).error
    rows = [{"timestamp": 100 * i, "input_length": 1033, "output_length": 20,
             "hash_ids": [i, 100 + i, 200 + i]}
            for i in range(20)]  # fmt: skip
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(map(json.dumps, rows)))
    words = ("simulate", "--trace", trace, "--model", "quire-tiny", "--gpu", "cpu", "--kv-memory",
             "1GiB", "--json")  # fmt: skip
    by_profile = shown(*words, "--measured", profile)
    assert shown(*words, "--measured", timing) == by_profile
    found = json.loads(by_profile)
    assert found["times_off_by"] == {"step": read_calibration(timing).error}
    assert found["times_by"] == "costs found from 200 measured steps"


def test_a_measurement_that_is_none_is_refused(profile, tmp_path):
    words = ("plan", "--model", "quire-tiny", "--gpu", "cpu", "--measured")
    assert "is no file, and no steps like" in refusal(*words, tmp_path / "none.jsonl")
    assert "both say how long" in refusal(*words, profile, "--mfu", 0.5)
    assert "no share of the peak" in refusal(*words[:-1], "--mfu", 1.5)
    assert "cannot write" in refusal("calibrate", profile, "--timing", tmp_path / "no" / "where")

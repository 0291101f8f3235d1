"""`quire replay`: rows for people and for programs."""

import csv

import pytest
from replay_help import random_chains, trace_of
from trace_help import mooncake_rows, write

from cli_help import refusal, shown, told
from quire_sim.curves import curves
from quire_sim.replay import REASONS, replay
from quire_sim.trace import open_trace

TRACE = trace_of(random_chains(11, num_requests=80), tail=0, block_size=16)


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "trace.jsonl", mooncake_rows(TRACE, output=40))


@pytest.fixture
def command(path):
    return ("replay", path, "--block-size", "16", "--jobs", "1")


@pytest.fixture
def rows_of(command):
    return lambda *words: told(*command, *words)["rows"]


def test_json_has_a_row_per_capacity_and_policy_with_the_optimum_beside(command, path):
    trace = open_trace(path, block_size=16)
    both = curves(trace)
    curve = both.optimum
    found = told(*command, "--capacity", "20", "--capacity", "50%", "--policies", "fifo,lru")
    rows, unique = found["rows"], found["num_unique"]
    assert [(row["capacity_blocks"], row["policy"]) for row in rows] == [
        (20, "fifo"), (20, "lru"), (unique // 2, "fifo"), (unique // 2, "lru"),
    ]  # fmt: skip
    for row in rows:
        result = replay(trace, row["capacity_blocks"], row["policy"])
        assert (row["token_hit"], row["block_hit"]) == (result.token_hit, result.block_hit)
        assert (row["evictions"], row["missed"]) == (result.evicted_blocks, result.missed)
        assert tuple(row["missed"]) == REASONS
        assert row["optimum_token_hit"] == curve.at(row["capacity_blocks"])
        reachable, lru = (each.at(row["capacity_blocks"]) for each in (both.reachable, both.lru))
        assert row["reachable_token_hit"] == reachable
        closed = (row["token_hit"] - lru) / (reachable - lru) if reachable > lru else None
        assert row["gap_closed"] == closed
        assert row["seconds"] > 0


def test_replay_without_options_shows_five_capacities_and_three_policies(rows_of):
    rows = rows_of()
    policies = ["lru", "learned", "optimum"]
    assert [row["policy"] for row in rows] == policies * 5
    assert [round(row["share"], 2) for row in rows[::3]] == [0.01, 0.05, 0.1, 0.25, 0.5]


def test_the_table_names_the_figures_and_the_command(command, rows_of):
    text = shown(*command, "--capacity", "20,30", "--policies", "lru,optimum")
    row, *_ = rows_of("--capacity", "20", "--policies", "lru")
    assert f"{100 * row['token_hit']:.2f} %" in text
    assert f"{row['evictions']:,}" in text
    assert "quire " in text.splitlines()[-2]


def test_csv_has_the_rows_of_json(rows_of, tmp_path):
    rows = rows_of("--csv", tmp_path / "rows.csv", "--capacity", "20")
    with (tmp_path / "rows.csv").open() as file:
        listed = list(csv.DictReader(file))
    assert [float(row["token_hit"]) for row in listed] == [row["token_hit"] for row in rows]
    assert [int(row["missed_cold"]) for row in listed] == [row["missed"]["cold"] for row in rows]


def test_bytes_become_blocks_of_the_model_rounded_down(rows_of):
    words = ("--capacity", "100MiB", "--model", "llama-3.1-8b", "--policies", "lru")
    (row,) = rows_of(*words)
    assert row["capacity_blocks"] == (100 << 20) // (16 * 131_072)


def test_with_a_model_rows_say_what_prefill_is_saved(rows_of):
    rows = rows_of("--capacity", "2,50%,100%", "--model", "llama-3.1-8b")
    for row in rows:
        assert 0 <= row["saved_prefill_flops"] < row["prefill_flops"]
        assert 0 <= row["saved_prefill_s"] < row["prefill_s"]
    saved = [row["saved_prefill_flops"] for row in rows if row["policy"] == "lru"]
    assert saved == sorted(saved)
    assert "saved_prefill_s" not in rows_of("--capacity", "2")[0]


def test_a_capacity_beyond_the_trace_is_reported_as_asked_for(rows_of):
    (row,) = rows_of("--capacity", "2000000000", "--policies", "lru")
    assert (row["capacity_blocks"], row["evictions"]) == (2_000_000_000, 0)


def test_concurrent_rows_say_how_long_requests_waited(command, rows_of):
    words = ("--concurrent", "--capacity", "30")
    lru, optimum = rows_of(*words, "--decode-rate", "1", "--policies", "lru,optimum")
    assert lru["mean_wait_s"] > 0
    assert "mean_wait_s" not in optimum
    assert "mean wait" in shown(*command, *words)


def test_hints_reach_the_replay(rows_of, path):
    (row,) = rows_of("--hints", "last-use", "--capacity", "12", "--policies", "lru")
    result = replay(open_trace(path, block_size=16), 12, hints="last-use")
    assert row["token_hit"] == result.token_hit


@pytest.mark.cases(5)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--capacity", "0"], "--capacity 0 is less than one block"),
        (["--capacity", "0%"], "less than one block: a capacity is a share like 10%"),
        (["--capacity", "-5"], "'-5' is none: a capacity is"),
        (["--capacity", "nonsense"], "'nonsense' is none"),
        (["--capacity", "1e999%"], "'1e999%' is none"),
        (["--capacity", "1.5"], "'1.5' is none"),
        (["--capacity", ""], "--capacity is empty"),
        (["--capacity", "5ZiB"], "'ZiB' in '5ZiB' is not a unit"),
        (["--capacity", "1GiB"], "--capacity 1GiB needs --model"),
        (["--capacity", "1KiB", "--model", "llama-3.1-8b"], "16 tokens of llama-3.1-8b take 2.0 MiB"),
        (["--model", "lama-3.1-8b"], "did you mean"),
        (["--gpu", "h100"], "--gpu h100 says nothing without --model"),
        (["--policies", "lruu"], "did you mean lru"),
        (["--policies", ","], "--policies names no policy"),
        (["--hints", "sessions-end"], "did you mean session-end"),
        (["--executor", "threads"], "unknown executor 'threads'"),
        (["--decode-rate", "5"], "say nothing without --concurrent"),
        (["--concurrent", "--decode-rate", "0"], "the decode rate in tokens per second is a number above 0, got 0"),
        (["--csv", "/nowhere/rows.csv", "--capacity", "9"], "there is no folder '/nowhere'"),
    ],
)  # fmt: skip
def test_an_impossible_option_of_replay_is_one_line_with_the_reason(command, words, message):
    assert message in refusal(*command, *words)

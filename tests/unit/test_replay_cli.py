"""`quire replay`: rows for people and for programs."""

import csv
import json

import pytest
from replay_help import random_chains, trace_of
from typer.testing import CliRunner

from quire.cli.app import app
from quire.sim.curves import curves
from quire.sim.replay import REASONS, replay
from quire.sim.trace import open_trace

CHAINS = random_chains(11, num_requests=80)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "trace.jsonl"
    trace = trace_of(CHAINS, tail=0, block_size=16)
    rows = [
        {
            "timestamp": 1000 * request.row,
            "input_length": request.prompt_tokens,
            "output_length": 40,
            "hash_ids": request.blocks.tolist(),
        }
        for request in trace
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(path):
    def call(*words):
        words = ["replay", str(path), "--block-size", "16", "--jobs", "1", *words]
        return CliRunner().invoke(app, words)

    return call


@pytest.fixture
def refused(run):
    def call(*words):
        done = run(*words)
        assert done.exit_code == 2
        assert done.stdout == ""
        return " ".join(done.stderr.split())

    return call


def rows_of(done):
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["rows"]


def test_json_has_a_row_per_capacity_and_policy_with_the_optimum_beside(run, path):
    trace = open_trace(path, block_size=16)
    curve = curves(trace).optimum
    rows = rows_of(run("--capacity", "20", "--capacity", "50%", "--policies", "fifo,lru", "--json"))
    unique = json.loads(run("--json").stdout)["num_unique"]
    assert [(row["capacity_blocks"], row["policy"]) for row in rows] == [
        (20, "fifo"), (20, "lru"), (unique // 2, "fifo"), (unique // 2, "lru"),
    ]  # fmt: skip
    for row in rows:
        result = replay(trace, row["capacity_blocks"], row["policy"])
        assert (row["token_hit"], row["block_hit"]) == (result.token_hit, result.block_hit)
        assert (row["evictions"], row["missed"]) == (result.evicted_blocks, result.missed)
        assert tuple(row["missed"]) == REASONS
        assert row["optimum_token_hit"] == curve.at(row["capacity_blocks"])
        assert row["seconds"] > 0


def test_without_options_it_shows_five_capacities_and_the_policies_worth_a_look(run):
    rows = rows_of(run("--json"))
    policies = ["lru", "learned", "optimum"]
    assert [row["policy"] for row in rows] == policies * 5
    assert [round(row["share"], 2) for row in rows[:: len(policies)]] == [
        0.01,
        0.05,
        0.1,
        0.25,
        0.5,
    ]


def test_the_table_names_the_figures_and_the_command(run):
    done = run("--capacity", "20,30", "--policies", "lru,optimum")
    row, *_ = rows_of(run("--capacity", "20", "--policies", "lru", "--json"))
    assert done.exit_code == 0
    assert f"{100 * row['token_hit']:.2f} %" in done.stdout
    assert f"{row['evictions']:,}" in done.stdout
    assert "quire " in done.stdout.splitlines()[-2]


def test_csv_has_the_rows_of_json(run, tmp_path):
    rows = rows_of(run("--json", "--csv", str(tmp_path / "rows.csv"), "--capacity", "20"))
    with (tmp_path / "rows.csv").open() as file:
        listed = list(csv.DictReader(file))
    assert [float(row["token_hit"]) for row in listed] == [row["token_hit"] for row in rows]
    assert [int(row["missed_cold"]) for row in listed] == [row["missed"]["cold"] for row in rows]


def test_bytes_become_blocks_of_the_model_rounded_down(run):
    done = run("--capacity", "100MiB", "--model", "llama-3.1-8b", "--policies", "lru", "--json")
    (row,) = rows_of(done)
    assert row["capacity_blocks"] == (100 << 20) // (16 * 131_072)


def test_with_a_model_rows_say_what_prefill_is_saved(run):
    rows = rows_of(run("--capacity", "2,50%,100%", "--model", "llama-3.1-8b", "--json"))
    for row in rows:
        assert 0 <= row["saved_prefill_flops"] < row["prefill_flops"]
        assert 0 <= row["saved_prefill_s"] < row["prefill_s"]
    saved = [row["saved_prefill_flops"] for row in rows if row["policy"] == "lru"]
    assert saved == sorted(saved)
    assert "saved_prefill_s" not in rows_of(run("--capacity", "2", "--json"))[0]


def test_a_capacity_beyond_the_trace_is_reported_as_asked_for(run):
    (row,) = rows_of(run("--capacity", "2000000000", "--policies", "lru", "--json"))
    assert (row["capacity_blocks"], row["evictions"]) == (2_000_000_000, 0)


def test_concurrent_rows_say_how_long_requests_waited(run):
    lru, optimum = rows_of(
        run("--concurrent", "--decode-rate", "1", "--capacity", "30", "--policies", "lru,optimum",
            "--json")
    )  # fmt: skip
    assert lru["mean_wait_s"] > 0
    assert "mean_wait_s" not in optimum
    assert "mean wait" in run("--concurrent", "--capacity", "30").stdout


def test_hints_reach_the_replay(run, path):
    (row,) = rows_of(
        run("--foreseen", "last-use", "--capacity", "12", "--policies", "lru", "--json")
    )
    result = replay(open_trace(path, block_size=16), 12, hints="last-use")
    assert row["token_hit"] == result.token_hit


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--capacity", "0"], "--capacity 0 is less than one block"),
        (["--capacity", "0%"], "less than one block: a capacity is a share like 10%"),
        (["--capacity", "-5"], "'-5' is none: a capacity is"),
        (["--capacity", "nonsense"], "'nonsense' is none"),
        (["--capacity", "1e999%"], "'1e999%' is none"),
        (["--capacity", "1.5"], "no whole number of blocks"),
        (["--capacity", ""], "--capacity is empty"),
        (["--capacity", "5ZiB"], "'ZiB' in '5ZiB' is not a unit"),
        (["--capacity", "1GiB"], "--capacity 1GiB needs --model"),
        (["--capacity", "1KiB", "--model", "llama-3.1-8b"], "16 tokens of llama-3.1-8b take 2.0 MiB"),
        (["--model", "lama-3.1-8b"], "did you mean"),
        (["--gpu", "h100"], "--gpu h100 says nothing without --model"),
        (["--policies", "lruu"], "did you mean 'lru'"),
        (["--policies", ","], "--policies names no policy"),
        (["--foreseen", "sessions-end"], "did you mean 'session-end'"),
        (["--executor", "threads"], "unknown executor 'threads'"),
        (["--decode-rate", "5"], "say nothing without --concurrent"),
        (["--concurrent", "--decode-rate", "0"], "the decode rate is 0"),
        (["--csv", "/nowhere/rows.csv", "--capacity", "9"], "there is no folder '/nowhere'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line_that_says_why(refused, words, message):
    assert message in refused(*words)

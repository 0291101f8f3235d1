"""`quire curve`: pictures for people, numbers for programs."""

import csv
import io
import json

import pytest
from curves_help import SmallTrace
from typer.testing import CliRunner

from quire.cli.app import app
from quire.sim.curves import curves

TEXTS = ["ab" * (i % 7) + "c" * (i % 5) for i in range(60)]


@pytest.fixture
def path(tmp_path):
    trace = SmallTrace(TEXTS, block_size=16, tails=[3] * len(TEXTS))
    rows = [
        {"timestamp": 1000 * i, "input_length": tokens, "output_length": 1, "hash_ids": chain}
        for i, (chain, tokens) in enumerate(zip(trace.chains, trace.tokens, strict=True))
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(path):
    def call(*words):
        return CliRunner().invoke(app, ["curve", str(path), *words])

    return call


@pytest.fixture
def exact():
    return curves(SmallTrace(TEXTS, block_size=16, tails=[3] * len(TEXTS)))


def test_json_holds_both_curves_exact_at_every_capacity(run, exact):
    document = json.loads(run("--json").stdout)
    assert document["num_unique"] == exact.num_unique
    for name, curve in (("lru", exact.lru), ("optimum", exact.optimum)):
        assert document[name][0] == [0, 0.0]
        assert all(hit == curve.at(capacity) for capacity, hit in document[name])
    assert document["seconds"] > 0


def test_listed_capacities_are_in_json_however_few_points(run, exact):
    document = json.loads(run("--json", "--points", "2", "--at", "7,33%").stdout)
    listed = {7, exact.num_unique * 33 // 100}
    listed |= {exact.num_unique * share // 100 for share in (1, 5, 10, 25, 50, 100)}
    assert listed <= {capacity for capacity, _ in document["lru"]}


def test_csv_has_a_row_per_capacity(run, exact, tmp_path):
    assert "optimum" in run("--csv", str(tmp_path / "curve.csv")).stdout
    rows = list(csv.DictReader(io.StringIO((tmp_path / "curve.csv").read_text())))
    assert [int(row["capacity_blocks"]) for row in rows] == sorted(
        {int(row["capacity_blocks"]) for row in rows}
    )
    for row in rows:
        assert float(row["lru"]) == exact.lru.at(int(row["capacity_blocks"]))
        assert float(row["optimum"]) == exact.optimum.at(int(row["capacity_blocks"]))


def test_tiers_say_where_tokens_are_found(run, exact):
    words = ("--hierarchy", "10%,5", "--json")
    tiers = json.loads(run(*words).stdout)["tiers"]
    first = exact.num_unique // 10
    assert [(tier["tier"], tier["capacity_blocks"]) for tier in tiers] == [
        ("device", first),
        ("host", 5),
    ]
    assert sum(tier["token_hit"] for tier in tiers) == pytest.approx(exact.lru.at(first + 5))


def test_people_get_a_picture_a_table_and_the_knee(run, exact):
    shown = run("--hierarchy", "10%,100%").stdout
    assert "90% of the ceiling" in shown
    assert f"{exact.lru.capacity_for(0.9):,} blocks" in shown
    assert "device" in shown
    assert "optimum" in shown


def test_larger_blocks_are_multiples(run):
    assert json.loads(run("--json", "--block-size", "32").stdout)["block_size"] == 32
    wrong = run("--block-size", "24")
    assert wrong.exit_code == 2
    assert "32" in wrong.stderr


def test_requests_that_warm_up_are_not_counted(run, exact):
    document = json.loads(run("--json", "--count-from", "50%").stdout)
    half = curves(SmallTrace(TEXTS, block_size=16, tails=[3] * len(TEXTS)), count_from=30)
    assert document["prompt_tokens"] == half.prompt_tokens < exact.prompt_tokens
    assert document["ceiling"] == half.ceiling


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--at", "many"), "'many'"),
        (("--hierarchy", "-5"), "'-5'"),
        (("--hierarchy", "5;6"), "'5;6'"),
        (("--count-from", "100%"), "60 requests"),
        (("--csv", "/nowhere/curve.csv"), "there is no folder '/nowhere'"),
    ],
)
def test_bad_arguments_are_one_line(run, words, says):
    result = run(*words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1

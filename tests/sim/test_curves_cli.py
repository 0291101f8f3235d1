"""`quire curve`: pictures for people, numbers for programs."""

import csv

import pytest
from curves_help import SmallTrace
from trace_help import mooncake_rows, write

from cli_help import refusal, shown, told
from quire_sim.curves import curves

TEXTS = ["ab" * (i % 7) + "c" * (i % 5) for i in range(60)]
TRACE = SmallTrace(TEXTS, block_size=16, tails=[3] * len(TEXTS))


@pytest.fixture
def path(tmp_path):
    return write(tmp_path / "trace.jsonl", mooncake_rows(TRACE))


@pytest.fixture(scope="module")
def exact():
    return curves(TRACE)


def test_json_holds_both_curves_exact_at_every_capacity(path, exact):
    document = told("curve", path)
    assert document["num_unique"] == exact.num_unique
    for name, curve in (
        ("lru", exact.lru),
        ("optimum", exact.optimum),
        ("reachable", exact.reachable),
    ):
        assert document[name][0] == [0, 0.0]
        assert all(hit == curve.at(capacity) for capacity, hit in document[name])
    assert document["seconds"] > 0


def test_listed_capacities_are_in_json_however_few_points(path, exact):
    document = told("curve", path, "--points", 2, "--at", "7,33%")
    listed = {7, exact.num_unique * 33 // 100}
    listed |= {exact.num_unique * share // 100 for share in (1, 5, 10, 25, 50, 100)}
    assert listed <= {capacity for capacity, _ in document["lru"]}


def test_csv_has_a_row_per_capacity(path, exact, tmp_path):
    assert "optimum" in shown("curve", path, "--csv", tmp_path / "curve.csv")
    rows = list(csv.DictReader((tmp_path / "curve.csv").read_text().splitlines()))
    capacities = [int(row["capacity_blocks"]) for row in rows]
    assert capacities == sorted(set(capacities))
    for row, capacity in zip(rows, capacities, strict=True):
        assert float(row["lru"]) == exact.lru.at(capacity)
        assert float(row["optimum"]) == exact.optimum.at(capacity)
        assert float(row["reachable"]) == exact.reachable.at(capacity)


def test_tiers_say_where_tokens_are_found(path, exact):
    tiers = told("curve", path, "--hierarchy", "10%,5")["tiers"]
    first = exact.num_unique // 10
    sizes = [(tier["tier"], tier["capacity_blocks"]) for tier in tiers]
    assert sizes == [("device", first), ("host", 5)]
    assert sum(tier["token_hit"] for tier in tiers) == pytest.approx(exact.lru.at(first + 5))


def test_people_get_a_picture_a_table_and_the_knee(path, exact):
    text = shown("curve", path, "--hierarchy", "10%,100%")
    knee = f"{exact.lru.capacity_for(0.9):,} blocks"
    assert all(word in text for word in ("90% of the ceiling", knee, "device", "optimum"))


def test_larger_blocks_are_multiples(path):
    assert told("curve", path, "--block-size", 32)["block_size"] == 32
    assert "32" in refusal("curve", path, "--block-size", 24)


def test_requests_that_warm_up_are_not_counted(path, exact):
    document = told("curve", path, "--count-from", "50%")
    half = curves(TRACE, count_from=30)
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
def test_bad_arguments_are_one_line(path, words, says):
    assert says in refusal("curve", path, *words)

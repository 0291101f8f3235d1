"""`benchmarks/peers`: the schedule, and the rows that peers are asked for; the peers themselves are not installed here."""

import re
from pathlib import Path

import pytest

from quire.bench import core_rows, hybrid_rows

FOLDER = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.syspath_prepend(Path(core_rows.__file__).parent)
    monkeypatch.chdir(tmp_path)
    import run

    return run


def test_peers_measure_hybrid_rows_under_the_names_they_have_here():
    ours = set(hybrid_rows.ROWS)
    for script in ("sglang_hybrid.py", "vllm_hybrid.py"):
        theirs = set(re.findall(r'"(hybrid_[a-z0-9_]+)"', (FOLDER / script).read_text("utf-8")))
        assert theirs
        assert theirs <= ours


def test_an_adapter_measures_only_the_rows_asked_for(run):
    import adapter

    done = []

    def measure(name):
        done.append(name)
        return [{"name": f"{name}_1"}, {"name": f"{name}_2"}]

    there = [((f"{name}_1", f"{name}_2"), lambda name=name: measure(name)) for name in "ab"]
    assert list(adapter.measured(there, "b_2,no_such")) == [{"name": "b_2"}]
    assert done == ["b"]
    assert len(list(adapter.measured(there, ""))) == 4


def test_rounds_alternate_in_order_and_a_peer_that_is_not_installed_has_the_reason(
    run, monkeypatch
):
    order = []

    def ours(names):
        order.append("quire")
        return [{"name": name, "median_us": float(len(order))} for name in names]

    def theirs(system, names, real=run.adapter_rows):
        order.append(system)
        return real(system, names)

    monkeypatch.setattr(run, "our_rows", ours)
    monkeypatch.setattr(run, "adapter_rows", theirs)
    rounds = [run.one_round(["vllm-16"], ["match_1k"], number) for number in range(2)]
    assert order == ["quire", "vllm-16", "vllm-16", "quire"]
    found = run.merged(rounds, run.best)
    assert found["quire"] == [{"name": "match_1k", "median_us": 1.0}]
    assert "environment.py vllm" in found["vllm-16"][0]["reason"]


def test_peers_stand_beside_ours_with_a_ratio_to_the_best(run):
    found = {
        "quire": [{"name": "match", "median_us": 2.0}, {"name": "serve", "requests_per_s": 90.0}],
        "one": [{"name": "match", "median_us": 8.0}, {"name": "serve", "requests_per_s": 30.0}],
        "two": [{"name": "match", "median_us": 6.0}],
        "three": [{"name": "not_installed", "reason": "not found"}],
    }
    _, _, match, serve, missing = run.table(found).splitlines()
    assert match.endswith("| 3.0x |")
    assert serve.endswith("| 3.0x |")
    assert missing == "three: not found"


@pytest.mark.parametrize(("of", "expected"), [("best", 30.0), ("median", 20.0)])
def test_a_figure_is_the_median_of_its_rounds_or_the_best(run, of, expected):
    rounds = [{"quire": [{"name": "serve", "requests_per_s": rate}]} for rate in (10.0, 30.0, 20.0)]
    assert run.merged(rounds, getattr(run, of))["quire"][0]["requests_per_s"] == expected

"""The rows of the benchmarks: transformers on a model of no size, and hybrid groups."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from cli_help import shown, told
from quire.bench import core_rows, hf_rows, turn_rows
from quire.bench.hf_rows import random_llama


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(hf_rows, "MODELS", {"": lambda: random_llama(64, 2)})
    monkeypatch.setattr(hf_rows, "PREFIXES", {"64": 64, "96": 96})
    monkeypatch.setattr(hf_rows, "QUICK_PREFIXES", ("64",))
    monkeypatch.setattr(hf_rows, "QUICK_ROUNDS", 2)
    monkeypatch.setattr(hf_rows, "CAPACITY", "4MiB")
    yield
    torch.set_num_threads(threads)


@pytest.mark.ci
def test_bench_hf_gives_each_way_times_rates_and_ratios():
    rows = {row["name"]: row for row in hf_rows.rows(quick=True)}
    assert list(rows) == hf_rows.row_names(quick=True)
    warm = rows["hf_ttft_warm_64"]
    assert warm["median_ms"] > 0
    assert warm["ratio_to_plain"] > 0
    assert warm["ratio_to_hand"] > 0
    assert warm["same_tokens"] == "yes"
    assert rows["hf_decode_by_hand_64"]["tokens_per_s"] > 0
    assert rows["hf_decode_by_hand_64"]["same_tokens"] == "yes"
    assert "ratio_to_plain" not in rows["hf_ttft_plain_64"]


@pytest.mark.ci
def test_only_the_rows_asked_for_are_measured():
    said = []
    rows = hf_rows.rows(["hf_decode_plain_96", "hf_ttft_cold_96"], said.append, quick=True)
    assert [row["name"] for row in rows] == ["hf_decode_plain_96", "hf_ttft_cold_96"]
    assert len(said) == 1


def test_an_unknown_row_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no_such.*hf_ttft_warm_64"):
        hf_rows.rows(["no_such"])


@pytest.mark.ci
def test_the_command_prints_a_table_or_json():
    words = ["bench", "hf", "--quick", "--rows", "hf_ttft_warm_64"]
    text = shown(*words)
    assert "hf_ttft_warm_64" in text
    assert "ratio to hand" in text
    assert told(*words)[0]["name"] == "hf_ttft_warm_64"


def test_core_has_rows_of_full_attention_beside_a_sliding_window():
    insert, decode = told("bench", "core", "--rows", "hybrid_insert_turn,hybrid_decode_256")
    assert insert["median_us"] > 0
    assert decode["median_us"] > decode["reserve_only_us"] > 0


def test_sixteen_forks_of_a_long_sequence_are_one_row():
    (row,) = core_rows.rows(["fork_16_of_100k"])
    assert row["median_us"] > 0


def test_a_served_turn_publishes_the_same_whatever_is_switched_on(monkeypatch):
    loop = replace(turn_rows.LOOP, num_sessions=20, num_requests=130, pool_tokens=8_000)
    monkeypatch.setattr(turn_rows, "LOOP", loop)
    monkeypatch.setattr(turn_rows, "WARMUP", 20)
    rows = core_rows.rows(list(turn_rows.ROWS))
    names = ["turn_evicting", "turn_evicting_curve", "turn_evicting_events"]
    assert [row["name"] for row in rows] == names
    assert all(row["median_us"] > 0 for row in rows)
    assert len({row["hit_rate"] for row in rows}) == 1
    assert rows[0]["published_blocks"] > 60


def test_tiers_of_which_none_can_be_timed_are_no_success():
    done = subprocess.run(
        [sys.executable, "-m", "quire", "bench", "tiers", "redis://127.0.0.1:1", "--json"],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 1
    (row,) = json.loads(done.stdout)
    assert row["tier"] == "redis"
    assert row["reason"]

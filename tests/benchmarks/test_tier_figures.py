"""`benchmarks/tiers`: figures of tiers beside the raw thing, on little data."""

import json
from pathlib import Path

import pytest

from quire.bench import tier_rows
from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.host import Host

FOLDER = Path(__file__).parents[2] / "benchmarks" / "tiers"
KEYS = ("put_mb_s", "get_mb_s", "raw_put_mb_s", "raw_get_mb_s", "put_ratio", "lookups_s")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(tier_rows, "LOOKUP_SECONDS", 0.005)


def rows(capsys, *options):
    import beside_raw

    beside_raw.main(
        ["--block-bytes", "16KiB", "--bytes", "8MiB", "--rounds", "3", *options, "--json"]
    )
    return json.loads(capsys.readouterr().out)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "kind",
    ["host", "disk", pytest.param("redis", marks=pytest.mark.system("redis-server")), "objects"],
)
def test_a_tier_has_figures_beside_the_raw_thing(kind, tmp_path, capsys):
    (row,) = rows(capsys, "--kinds", kind, "--path", str(tmp_path))
    assert row["tier"] == kind
    assert all(row[key] > 0 for key in KEYS)
    assert not list(tmp_path.iterdir()), "nothing stays on the disk"


def test_a_measurement_writes_no_more_bytes_than_asked_for(tmp_path, monkeypatch, capsys):
    import measure

    most = 0

    def watched(pair, records, number, real=measure._round):
        nonlocal most
        taken = real(pair, records, number)
        files = [path.stat() for path in tmp_path.rglob("*") if path.is_file()]
        most = max(most, sum(512 * file.st_blocks for file in files))
        return taken

    monkeypatch.setattr(measure, "_round", watched)
    rows(capsys, "--kinds", "disk,objects", "--path", str(tmp_path))
    assert 1 << 20 < most <= 8 << 20


class Forgetful(Host):
    def _put(self, keys, records, timeout_s, done):
        done[:] = [Outcome.STORED] * len(keys)


def test_a_tier_that_does_not_keep_what_it_is_given_has_no_figures():
    from measure import Pair, RawRecords, measure
    from raw import RawMemory

    with Forgetful("1MiB") as tier, pytest.raises(TierError, match="absent, not hit"):
        measure(Pair(tier, RawMemory(1000, 4)), RawRecords(1000, 4), rounds=3, budget_s=1)


def test_a_raw_way_that_moves_nothing_has_no_figures():
    from measure import Pair, Raw, RawRecords, measure

    class Liar(Raw):
        def put(self, numbers, payloads):
            pass

        def get(self, numbers, buffers):
            pass

    with Host("1MiB") as tier, pytest.raises(TierError, match="raw way read other bytes"):
        measure(Pair(tier, Liar()), RawRecords(1000, 4), rounds=3, budget_s=1)


def test_a_tier_that_is_not_there_has_a_reason_instead_of_figures(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", "")
    (row,) = rows(capsys, "--kinds", "redis", "--path", str(tmp_path))
    assert "redis-server" in row["reason"]


class Side:
    """A side of `beside_lmcache.py` that takes so many seconds a round, and writes down what it is asked."""

    def __init__(self, seconds, asked):
        self._seconds, self._asked = seconds, asked

    def store(self):
        self._asked.append(("store", self))
        return self._seconds

    def load(self):
        self._asked.append(("load", self))
        return 2 * self._seconds

    def forget(self):
        self._asked.append(("forget", self))


def test_sides_take_turns_way_by_way_and_the_first_round_does_not_count(tmp_path):
    from beside_lmcache import measured

    asked = []
    sides = {name: Side(seconds, asked) for name, seconds in (("quire", 1.0), ("lmcache", 3.0))}
    taken = measured(sides, 3, tmp_path, is_cold=True)
    assert taken["load", "lmcache"] == [6.0] * 3
    assert taken["store", "quire"] == [1.0] * 3
    assert [way for way, _ in asked] == ["store", "store", "load", "load", "forget", "forget"] * 4
    first = [side for way, side in asked if way == "store"][::2]
    assert first == [sides["lmcache"], sides["quire"]] * 2


def test_a_table_beside_lmcache_has_ratios_and_their_geometric_mean():
    from beside_lmcache import table

    row = {"scene": "direct", "block_bytes": 1 << 20, "way": "store"}
    for name, rate in (("quire", 1200.0), ("raw", 1000.0), ("lmcache", 800.0)):
        row |= {name: rate, f"{name}_median": rate / 2}
    text = table([row, row | {"lmcache": 2400.0}])
    assert "| direct | 1024 KiB | store | 1,200 | 1,000 | 800 | 1.20 | 1.50 | 1.50 |" in text
    assert text.endswith("Geometric mean over LMCache: 0.87, lowest 0.50.")


@pytest.mark.ci
def test_first_tokens_from_a_tier_stand_beside_those_computed_and_are_the_same(
    tmp_path, monkeypatch, capsys
):
    torch = pytest.importorskip("torch")
    import first_tokens

    from quire.bench.hf_rows import random_llama

    monkeypatch.setattr(first_tokens, "quire_tiny", lambda: random_llama(64, 2))
    for name, value in {"TOKENS": 256, "PROMPTS": 1, "NEW": 2, "POOL": "1MiB"}.items():
        monkeypatch.setattr(first_tokens, f"COLD_{name}", value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    words = ["--kinds", "host,far", "--prefixes", "32,64", "--rounds", "2", "--json"]
    first_tokens.main([*words, "--path", str(tmp_path), "--report", str(tmp_path / "picture.svg")])
    torch.set_num_threads(threads)
    *found, cold = json.loads(capsys.readouterr().out)
    places = [(row["tier"], row["prefix"]) for row in found]
    assert places == [("host", 32), ("host", 64), ("far", 32), ("far", 64)]
    assert {row["same_tokens"] for row in found} == {"yes"}
    assert cold["name"] == "no_reuse"
    assert 0 < cold["stored_share"] <= 1
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")

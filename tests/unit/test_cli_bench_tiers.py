"""`quire bench tiers`: figures of tiers beside the raw thing, on little data."""

import gc
import json

import pytest
from typer.testing import CliRunner

from quire.bench import tier_measure, tier_peers
from quire.bench.peers.lmcache_tiers import Figures
from quire.bench.tier_measure import Pair, Raw, Records, measure
from quire.bench.tier_pairs import PAIRS
from quire.bench.tier_raw import RawMemory
from quire.bench.tier_rows import TierBench, rows
from quire.cli.app import app
from quire.cli.bench_tiers import first_token_table, tier_table
from quire.errors import ConfigError, TierError
from quire.tiers.base import Outcome
from quire.tiers.host import Host

KEYS = ("tier", "block_bytes", "put_mb_s", "get_mb_s", "raw_put_mb_s", "raw_get_mb_s")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(tier_measure, "LOOKUP_SECONDS", 0.005)
    gc.freeze()  # a collection before each round takes long with all that other tests have left
    yield
    gc.unfreeze()


def small(name, path, **words):
    words = {"block_bytes": (16 << 10,), "num_bytes": 4 << 20, "rounds": 3} | words
    return rows(TierBench(names=(name,), path=path, **words))


@pytest.mark.parametrize(
    "name",
    [
        "host",
        "disk",
        "files",
        pytest.param("redis", marks=pytest.mark.system("redis-server")),
        "objects",
    ],
)
def test_a_tier_has_a_row_for_each_block_size(name, tmp_path):
    found = small(name, tmp_path, block_bytes=(4 << 10, 100_000))
    assert [row["block_bytes"] for row in found] == [4 << 10, 100_000]
    for row in found:
        assert row["tier"] == name
        assert all(row[key] > 0 for key in KEYS[1:])
        assert row["rounds"] == 3
        assert row["lookups_s"] > 0
    assert not list(tmp_path.iterdir()), "nothing stays on the disk"


def test_the_ratio_is_that_of_rounds_and_not_of_medians(tmp_path):
    (row,) = small("host", tmp_path)
    assert row["put_ratio"] == pytest.approx(row["put_mb_s"] / row["raw_put_mb_s"], rel=0.9)


def test_no_more_than_the_bytes_asked_for_are_on_the_disk(tmp_path, monkeypatch):
    most = 0

    def watched(pair, records, number, real=tier_measure._round):
        nonlocal most
        taken = real(pair, records, number)
        files = [path.stat() for path in tmp_path.rglob("*") if path.is_file()]
        most = max(most, sum(512 * file.st_blocks for file in files))
        return taken

    monkeypatch.setattr(tier_measure, "_round", watched)
    for name in ("disk", "files", "objects"):
        small(name, tmp_path, num_bytes=8 << 20, block_bytes=(64 << 10,))
    assert 1 << 20 < most <= 8 << 20


class Forgetful(Host):
    def _put(self, keys, records, timeout_s, done):
        done[:] = [Outcome.STORED] * len(keys)


class Liar(Raw):
    def put(self, numbers, payloads):
        pass

    def get(self, numbers, buffers):
        pass


def test_a_tier_that_does_not_keep_what_it_is_given_has_no_figures():
    with Forgetful("1MiB") as tier, pytest.raises(TierError, match="get of 4 records gave absent"):
        measure(Pair(tier, RawMemory(1000, 4)), Records(1000, 4), rounds=3, budget_s=1)


def test_a_raw_way_that_moves_nothing_has_no_figures():
    with Host("1MiB") as tier, pytest.raises(TierError, match="raw way read other bytes"):
        measure(Pair(tier, Liar()), Records(1000, 4), rounds=3, budget_s=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"names": ("dsk",)}, "no tiers named dsk; there are host, disk"),
        ({"num_bytes": 1 << 20}, "too few for blocks"),
        ({"block_bytes": (0,)}, "at least 1 byte"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        rows(TierBench(path=tmp_path, **words))
    with pytest.raises(ConfigError, match="is no directory"):
        rows(TierBench(path=tmp_path / "nowhere"))


def test_a_tier_that_is_not_there_has_a_reason_instead_of_figures(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    (row,) = small("redis", tmp_path)
    assert row.keys() == {"tier", "reason"}
    assert "redis-server" in row["reason"]
    assert "redis-server" in str(tier_table([row]).caption)


def test_the_command_prints_json_with_the_promised_keys_or_a_table(tmp_path):
    words = ["bench", "tiers", "--kinds", "host,files", "--block-bytes", "16KiB", "--bytes", "4MiB"]
    words += ["--quick", "--path", str(tmp_path)]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert [row["tier"] for row in found] == ["host", "files"]
    assert all(set(KEYS) <= row.keys() for row in found)
    shown = CliRunner().invoke(app, words).stdout
    assert "16 KiB" in shown


def test_every_tier_of_the_package_is_measured():
    assert set(PAIRS) >= {"host", "disk", "files", "redis", "objects", "mooncake"}


class Beside:
    """LMCache as it might answer: twice 100 MB/s, then a failure."""

    def beside(self, name, block_bytes):
        return {"lmcache-file": Figures(100.0, 200.0, 10.0), "lmcache-direct": "no O_DIRECT here"}


def test_peers_stand_below_our_row_which_says_how_much_faster_it_is(tmp_path):
    bench = TierBench(names=("host",), block_bytes=(16 << 10,), path=tmp_path, num_bytes=4 << 20)
    ours, peer, failed = rows(bench, None, Beside())
    assert ours["put_over_lmcache-file"] == pytest.approx(ours["put_mb_s"] / 100)
    assert (peer["tier"], peer["get_mb_s"]) == ("lmcache-file", 200.0)
    assert set(KEYS) <= peer.keys()
    assert failed["reason"] == "no O_DIRECT here"


def test_peers_that_cannot_be_installed_are_an_error(monkeypatch, tmp_path):
    missing = tier_peers.environment.Prepared(tmp_path, {}, {"lmcache": "no such version"})
    monkeypatch.setattr(tier_peers.environment, "prepare", lambda **_: missing)
    with pytest.raises(TierError, match=r"LMCache 0\.5\.6: no such version"):
        tier_peers.Peers(tmp_path)


@pytest.fixture
def _tiny_model(monkeypatch):
    torch = pytest.importorskip("torch")
    from quire.bench import tier_ttft
    from quire.bench.hf_models import random_llama

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(tier_ttft, "quire_tiny", lambda: random_llama(64, 2))
    monkeypatch.setattr(tier_ttft, "QUICK_PREFIXES", (32, 64))
    monkeypatch.setattr(tier_ttft, "COLD_TOKENS", 32)
    monkeypatch.setattr(tier_ttft, "COLD_PROMPTS", 1)
    monkeypatch.setattr(tier_ttft, "COLD_NEW", 2)
    monkeypatch.setattr(tier_ttft, "COLD_POOL", "1MiB")
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_tiny_model")
def test_first_tokens_from_a_tier_stand_beside_those_computed_and_are_the_same(tmp_path):
    words = ["bench", "tiers", "--first-tokens", "--kinds", "host,far", "--quick", "--json"]
    words += ["--path", str(tmp_path), "--report", str(tmp_path / "crossover.svg")]
    found = json.loads(CliRunner().invoke(app, words).stdout)
    assert [(row["tier"], row["prefix"]) for row in found[:-1]] == [
        ("host", 32),
        ("host", 64),
        ("far", 32),
        ("far", 64),
    ]
    for row in found[:-1]:
        assert row["same_tokens"] == "yes"
        assert row["hit_ratio"] > 0
        assert row["gated_ratio"] > 0
    assert found[-1]["name"] == "no_reuse"
    assert found[-1]["cpu_ratio"] > 0
    assert 0 < found[-1]["stored_share"] <= 1
    assert (tmp_path / "crossover.svg").read_text().startswith("<?xml")
    assert "never come back" in str(first_token_table(found).caption)


def test_a_picture_of_what_is_not_measured_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["bench", "tiers", "--report", str(tmp_path / "x.svg")])
    assert isinstance(result.exception, ConfigError) or result.exit_code != 0

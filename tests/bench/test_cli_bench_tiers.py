"""`quire bench tiers`: what tiers give, on little data."""

import pytest

from cli_help import shown, told
from quire.bench import tier_rows
from quire.bench.tier_rows import rows
from quire.errors import ConfigError

SMALL = {"block_bytes": (4 << 10, 100_000), "round_bytes": 1 << 20, "rounds": 2}


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(tier_rows, "LOOKUP_SECONDS", 0.005)


def test_memory_and_a_disk_are_measured_where_no_tier_is_named():
    found = rows(**SMALL)
    sizes = [(row["tier"], row["block_bytes"]) for row in found]
    assert sizes == [(tier, size) for tier in ("host", "disk") for size in SMALL["block_bytes"]]
    assert all(row[key] > 0 for row in found for key in ("put_mb_s", "get_mb_s", "lookups_s"))


def test_a_tier_that_is_named_keeps_nothing_of_what_was_put(tmp_path):
    line = f"disk:{tmp_path}/kv?capacity=16MiB"
    rows([line], **SMALL)
    with tier_rows.open_tier(line) as tier:
        assert tier.stats().num_records == 0


def test_a_tier_that_fails_has_a_reason_and_the_others_have_figures():
    broken, whole = rows(["redis://127.0.0.1:1", "host:16MiB"], **SMALL | {"block_bytes": (4096,)})
    assert "127.0.0.1:1" in broken["reason"]
    assert whole["put_mb_s"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"lines": ("dsk:here",)}, "no tier is called 'dsk'"),
        ({"round_bytes": 1000}, "holds no block of 100000"),
        ({"block_bytes": (0,)}, "at least 1 byte"),
    ],
)
def test_bench_tiers_refuses_sizes_and_places_that_it_cannot_measure(words, message):
    with pytest.raises(ConfigError, match=message):
        rows(**SMALL | words)


def test_the_command_prints_json_or_a_table():
    words = ["bench", "tiers", "host:16MiB", "--block-bytes", "16KiB", "--bytes", "1MiB", "--quick"]
    (row,) = told(*words)
    assert row["tier"] == "host"
    assert "16,384" in shown(*words)

"""What `--tier` has made is recognised, and what is evicted gives its room back."""

import json

import pytest
from typer.testing import CliRunner

from quire.cli.app import app

pytest.importorskip("transformers")

PROMPT = "What is a list? " * 20


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*words):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
        return done.stdout

    return call


def size(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    ("tier", "kind"),
    [("disk:./kv?capacity=64MiB", "disk"), ("files:./kv", "files"), ("file://TMP/kv", "objects")],
)
@pytest.mark.parametrize("prompt", [PROMPT, "a"])
def test_inspect_recognises_what_a_tier_has_made(run, tmp_path, tier, kind, prompt):
    if kind == "objects":
        pytest.importorskip("obstore")
        (tmp_path / "kv").mkdir()
        tier = tier.replace("TMP", str(tmp_path))
    run("generate", "--tier", tier, "--max-new-tokens", "1", prompt)
    if kind == "objects" and prompt == "a":
        return  # an empty folder: nothing was stored, and nothing says what it is
    for place in ("kv", str(tmp_path / "kv"), tier):
        found = json.loads(run("inspect", place, "--json"))
        assert found["kind"] in {kind, "file"}
        assert (found["total"]["records"] > 0) == (prompt == PROMPT)
    assert "records" in run("inspect", "kv")


@pytest.mark.parametrize("tier", ["disk:kv?capacity=64MiB", "files:kv"])
def test_evicting_all_gives_the_room_back_and_the_tier_goes_on(run, tmp_path, tier):
    run("generate", "--tier", tier, "--max-new-tokens", "1", PROMPT)
    before = size(tmp_path / "kv")
    assert before > 1 << 20
    assert json.loads(run("cache", "evict", "kv", "--all", "--json"))["left"] == 0
    assert size(tmp_path / "kv") < 4096
    run("generate", "--tier", tier, "--max-new-tokens", "1", PROMPT)
    assert json.loads(run("cache", "verify", "kv", "--json"))["whole"] > 0


def test_evicting_down_to_a_size_keeps_what_it_says(run, tmp_path):
    run("generate", "--tier", "disk:kv?capacity=64MiB", "--max-new-tokens", "1", PROMPT)
    done = json.loads(run("cache", "evict", "kv", "--to", "500KiB", "--json"))
    assert 0 < done["left_bytes"] <= 500 << 10
    assert size(tmp_path / "kv") < 700 << 10
    assert json.loads(run("cache", "verify", "kv", "--json"))["whole"] == done["left"]

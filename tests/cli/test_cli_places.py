"""`--tier` recognises the files it has made, and evicted records give their room back."""

import pytest

from cli_help import shown, told

pytest.importorskip("transformers")

PROMPT = "What is a list? " * 20


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def size(folder):
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("tier", "kind"),
    [("disk:./kv?capacity=64MiB", "disk"), ("files:./kv", "files")],
)
@pytest.mark.parametrize("prompt", [PROMPT, "a"])
def test_inspect_recognises_what_a_tier_has_made(tmp_path, tier, kind, prompt):
    shown("generate", "--tier", tier, "--max-new-tokens", "1", prompt)
    for place in ("kv", str(tmp_path / "kv"), tier):
        found = told("inspect", place)
        assert found["kind"] == kind
        assert (found["total"]["records"] > 0) == (prompt == PROMPT)
    assert "records" in shown("inspect", "kv")


@pytest.mark.cases(1)
@pytest.mark.parametrize("tier", ["disk:kv?capacity=64MiB", "files:kv"])
def test_evicting_all_gives_the_room_back_and_the_tier_goes_on(tmp_path, tier):
    shown("generate", "--tier", tier, "--max-new-tokens", "1", PROMPT)
    before = size(tmp_path / "kv")
    assert before > 1 << 20
    assert told("cache", "evict", "kv", "--all")["left"] == 0
    assert size(tmp_path / "kv") < 4096
    shown("generate", "--tier", tier, "--max-new-tokens", "1", PROMPT)
    assert told("cache", "verify", "kv")["whole"] > 0


def test_evicting_down_to_a_size_keeps_what_it_says(tmp_path):
    shown("generate", "--tier", "disk:kv?capacity=64MiB", "--max-new-tokens", "1", PROMPT)
    done = told("cache", "evict", "kv", "--to", "500KiB")
    assert 0 < done["left_bytes"] <= 500 << 10
    assert size(tmp_path / "kv") < 700 << 10
    assert told("cache", "verify", "kv")["whole"] == done["left"]

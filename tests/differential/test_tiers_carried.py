"""Tiers carried elsewhere and looked into: the same tokens, names by scope."""

import json
import shutil

import pytest
import torch
from hf_help import make_cache, random_ids, same, tiny_model
from typer.testing import CliRunner

from quire.cli.app import app
from quire.core import Scope
from quire.tiers.disk import Disk
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

OPEN = StackSettings(gate=False)


def quire(*words):
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_a_copied_directory_gives_the_same_tokens_elsewhere(family, tmp_path):
    model = tiny_model(family)
    ids = random_ids(torch.Generator().manual_seed(1), 90)
    here, there = tmp_path / "here", tmp_path / "there"
    with TierStack([Disk(here, "64MiB")], OPEN) as tiers:
        text = same(model, make_cache(model, tiers=tiers), ids)
    shutil.copytree(here, there)
    with TierStack([Disk(there, "64MiB")], OPEN) as tiers:
        again = make_cache(model, tiers=tiers)
        assert torch.equal(same(model, again, ids), text)
        assert again.last.tier_tokens == {"disk": 80}


def test_inspect_shows_what_an_engine_stored_by_scope(tmp_path):
    model = tiny_model("llama")
    ids = random_ids(torch.Generator().manual_seed(1), 90)
    with TierStack([Disk(tmp_path, "64MiB")], OPEN) as tiers:
        cache = make_cache(model, tiers=tiers)
        cache.generate(ids, max_new_tokens=1)
        cache.generate(ids, max_new_tokens=1, scope=Scope(salt="tenant"))
        assert tiers.drain(20)
    found = quire("inspect", tmp_path)
    labels = sorted(scope["label"] for scope in found["scopes"])
    assert labels[0] == "everyone"
    assert labels[1].startswith("salt #")
    assert [run["stop_token"] for scope in found["scopes"] for run in scope["runs"]] == [80, 80]
    assert found["unnamed"]["records"] == 0
    assert "tenant" not in (tmp_path / "names.jsonl").read_text()

"""The tier of one's own in docs/tiers-how.md: it passes the contract of quire's tiers, and a cache uses it."""

import re
from pathlib import Path

import pytest

from quire.tiers.contract import TierContract

PAGE = Path(__file__).parents[2] / "docs" / "tiers-how.md"
SNIPPET, TEST = re.findall(r"```(?:python|py)\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
names = {"pytest": pytest, "__name__": __name__}
exec(SNIPPET, names)
exec(TEST, names)
TestTable = names["TestTable"]


def test_the_page_shows_a_tier_and_its_contract():
    assert issubclass(TestTable, TierContract)
    assert len(SNIPPET.splitlines()) <= 65


def test_a_cache_stores_prompts_in_the_tier():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from quire import PrefixCache, demo_model

    model = transformers.AutoModelForCausalLM.from_pretrained(demo_model())
    table, ids = names["Table"](64 << 20), torch.arange(200)[None]
    with PrefixCache(model, "64MiB", tiers=[table]) as cache:
        cache.generate(input_ids=ids, max_new_tokens=1)
        cache.tiers.drain(60)
        outcomes = table.stats().outcomes
    assert outcomes["stored"] >= 10

"""Prefixes that come back from tiers: the same tokens as without any cache, and as much as there is."""

import pytest
import torch
from hf_help import (
    ALL_FAMILIES,
    HYBRID_FAMILIES,
    check_stored,
    make_cache,
    random_ids,
    same,
    tiny_model,
)

from quire.core import Scope
from quire.tiers.disk import Disk
from quire.tiers.host import Host
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack
from turns import by_turns, few

OPEN = StackSettings(gate=False)
FAMILIES = ["llama", "deepseek_v3", *HYBRID_FAMILIES]


def disk(path, settings=OPEN):
    return TierStack([Disk(path, "64MiB")], settings)


def prompt(seed, num_tokens=90):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


def written(cache):
    """Wait until all that a cache handed down is written."""
    assert cache.tiers.drain(20)
    return cache.tiers.stats()


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", few(FAMILIES, *FAMILIES[::4]))
def test_after_a_restart_a_prompt_is_warm_from_disk_and_gives_the_same_tokens(family, tmp_path):
    model, ids = tiny_model(family), prompt(1)
    with disk(tmp_path) as tiers:
        first = make_cache(model, tiers=tiers)
        text = same(model, first, ids, max_new_tokens=8)
        assert first.last.tier_tokens == {}
        written(first)
    with disk(tmp_path) as tiers:
        again = make_cache(model, tiers=tiers)
        assert torch.equal(same(model, again, ids, max_new_tokens=8), text)
        assert again.last.tier_tokens == {"disk": 80}
        assert again.last.cached_tokens == 80
        assert again.last.tier_misses == {}
        check_stored(model, again, text[0])
    with disk(tmp_path) as tiers:
        longer = make_cache(model, tiers=tiers)
        follow = torch.cat([text, prompt(2, 20)], dim=1)
        same(model, longer, follow)
        assert longer.last.cached_tokens == 96, "the answer was kept as well"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "write"), by_turns(FAMILIES, ["through", "back"], default=FAMILIES[1::4])
)
def test_evicted_blocks_are_found_in_host_memory_under_either_write_policy(family, write):
    model = tiny_model(family)
    with TierStack([Host("64MiB")], StackSettings(gate=False, write=write)) as tiers:
        cache = make_cache(model, num_blocks=9, tiers=tiers)
        prompts = [prompt(seed, 70 + 5 * seed) for seed in range(4)]
        texts = [same(model, cache, ids) for ids in prompts]
        came = 0
        for ids, text in zip(prompts, texts, strict=True):
            assert torch.equal(same(model, cache, ids), text)
            came += sum(cache.last.tier_tokens.values())
            check_stored(model, cache, text[0])
        assert came >= 64
        assert came % 16 == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_next"])
def test_salts_never_cross_in_a_tier(family, tmp_path):
    model, ids = tiny_model(family), prompt(1)
    with disk(tmp_path) as tiers:
        first = make_cache(model, tiers=tiers)
        same(model, first, ids, scope=Scope(salt="a"))
        written(first)
        second = make_cache(model, tiers=tiers)
        for other in (None, Scope(salt="b"), Scope(lora="a"), Scope(salt=b"a")):
            same(model, second, ids, scope=other)
            assert second.last.cached_tokens == 0
        same(model, second, ids, scope=Scope(salt="a"))
        assert second.last.tier_tokens == {"disk": 80}


def test_the_sampled_families_are_known_ones():
    assert set(FAMILIES) <= set(ALL_FAMILIES)

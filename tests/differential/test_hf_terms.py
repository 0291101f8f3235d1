"""Token ranges through PrefixCache: what is kept on other terms, or not at all."""

import pytest
import torch
from hf_help import make_cache, random_ids, same, tiny_model

from quire import TokenRange
from quire.errors import ConfigError

FAMILIES = ["llama", "gemma3_text"]


def ids_of(num_tokens, seed=1):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_that_is_not_stored_finds_and_leaves_nothing_behind(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    nothing = [TokenRange(0, store=False)]
    ids = ids_of(40)
    same(model, cache, ids, ranges=nothing)
    assert cache.manager.num_cached == 0
    same(model, cache, ids[:, :20])
    same(model, cache, ids, ranges=nothing)
    assert cache.last.cached_tokens >= 16, "it may still find what others stored"
    same(model, cache, ids)
    assert cache.last.cached_tokens < 24, "and left nothing of its own"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_is_not_to_be_reused_is_computed_again(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    ids = ids_of(24)
    out = same(model, cache, ids, max_new_tokens=16, ranges=[TokenRange(24, store=False)])
    same(model, cache, torch.cat([out, ids_of(4, seed=2)], dim=1))
    assert 20 <= cache.last.cached_tokens <= 24


def test_the_head_of_a_prompt_outlives_its_rest():
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4, num_blocks=24)
    system = ids_of(16)
    prompt = torch.cat([system, ids_of(24, seed=3)], dim=1)
    same(model, cache, prompt, ranges=[TokenRange(0, 16, priority=5)])
    for seed in range(4, 9):
        same(model, cache, ids_of(60, seed))
    assert cache.explain(prompt).hit.num_tokens == 16


@pytest.mark.parametrize(
    "ranges", [[TokenRange(4, 2)], [TokenRange(-1)], ["all"], [TokenRange(0, 4), TokenRange(2)]]
)
def test_a_bad_range_is_refused_and_changes_nothing(ranges):
    model = tiny_model("llama")
    cache = make_cache(model)
    same(model, cache, ids_of(40))
    before = cache.manager.snapshot()
    with pytest.raises(ConfigError):
        cache.generate(input_ids=ids_of(40), ranges=ranges, max_new_tokens=2)
    assert cache.manager.snapshot() == before


def test_a_session_takes_ranges_too():
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4)
    ids = ids_of(20)
    with cache.session(ids, ranges=[TokenRange(8, store=False)]) as past:
        model.generate(ids, past_key_values=past, max_new_tokens=6)
    assert cache.explain(ids).hit.num_tokens == 8

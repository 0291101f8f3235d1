"""`store_until` through PrefixCache: how much of a request is kept."""

import pytest
import torch
from hf_help import make_cache, random_ids, same, tiny_model

from quire import ops
from quire.errors import ConfigError

FAMILIES = ["llama", "gemma3_text"]


def ids_of(num_tokens, seed=1):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_that_is_not_stored_finds_and_leaves_nothing_behind(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    ids = ids_of(40)
    same(model, cache, ids, store_until=0)
    assert cache.manager.num_cached == 0
    same(model, cache, ids[:, :20])
    same(model, cache, ids, store_until=0)
    assert cache.last.cached_tokens >= 16, "it may still find what others stored"
    same(model, cache, ids)
    assert cache.last.cached_tokens < 24, "and left nothing of its own"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_that_is_not_to_be_reused_is_computed_again(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4)
    ids = ids_of(24)
    out = same(model, cache, ids, max_new_tokens=16, store_until=24)
    same(model, cache, torch.cat([out, ids_of(4, seed=2)], dim=1))
    assert 20 <= cache.last.cached_tokens <= 24


@pytest.mark.parametrize("store_until", [-1, 1.5, "all"])
def test_a_bad_number_is_refused_and_changes_nothing(store_until):
    model = tiny_model("llama")
    cache = make_cache(model)
    same(model, cache, ids_of(40))
    before = ops.snapshot(cache.manager)
    with pytest.raises(ConfigError):
        cache.generate(input_ids=ids_of(40), store_until=store_until, max_new_tokens=2)
    assert ops.snapshot(cache.manager) == before


def test_a_session_takes_store_until():
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4)
    ids = ids_of(20)
    with cache.session(ids, store_until=8) as past:
        model.generate(ids, past_key_values=past, max_new_tokens=6)
    assert cache.explain(ids).hit.num_tokens == 8

"""Greedy tokens with quire are those without, whatever is asked in whatever order."""

import pytest
import torch
from hf_conversation import Conversation
from hf_help import (
    FAMILIES,
    HYBRID_FAMILIES,
    TRAINED,
    WINDOWED_FAMILIES,
    check_stored,
    make_cache,
    random_ids,
    same,
    tiny_model,
    trained_model,
)

from turns import by_turns, few

EVERY = [*FAMILIES, *HYBRID_FAMILIES]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "block_size"), by_turns(EVERY, [3, 16, 1, 64], default=EVERY[::2])
)
@pytest.mark.parametrize("num_turns", few([4, 12], 4))
def test_random_conversations_give_the_tokens_of_the_plain_model(family, block_size, num_turns):
    model = tiny_model(family)
    cache = make_cache(model, block_size=block_size, num_blocks=2000 // block_size)
    talk = Conversation(model, cache, seed=block_size)
    talk.run(num_turns)
    assert talk.reused > 0 or block_size == 64
    for text in talk.texts:
        check_stored(model, cache, text)


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "num_blocks", "policy"),
    [
        ("llama", 3, "lru"),
        ("llama", 9, "fifo"),
        ("llama", 9, "lfu"),
        ("llama", 20, "lru"),
        ("deepseek_v3", 9, "lru"),
    ],
)
def test_a_small_cache_evicts_and_stays_right(policy, family, num_blocks):
    model = tiny_model(family)
    cache = make_cache(model, block_size=8, num_blocks=num_blocks, policy=policy)
    talk = Conversation(model, cache, seed=num_blocks)
    talk.run(15)
    assert cache.stats.evicted_blocks > 0
    for text in talk.texts:
        if len(text) <= 8 * num_blocks:
            check_stored(model, cache, text)


@pytest.mark.cases(3)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", *WINDOWED_FAMILIES])
def test_the_layout_of_the_config_is_what_the_model_caches(family):
    from quire.tensors import ModelLayout

    model = tiny_model(family)
    assert make_cache(model).layout == ModelLayout.from_config(model.config)


def test_a_draft_model_verifies_against_a_cached_prefix():
    model, draft = tiny_model("llama"), tiny_model("llama", seed=9)
    cache = make_cache(model)
    ids = random_ids(torch.Generator().manual_seed(3), 50)
    for _ in range(2):
        same(model, cache, ids, assistant_model=draft, max_new_tokens=12)
    assert cache.last.cached_tokens >= 48


@pytest.mark.ci
@pytest.mark.skipif(not (TRAINED / "config.json").exists(), reason="no trained model in assets")
@pytest.mark.parametrize("block_size", [3, 16])
def test_the_trained_model_gives_its_own_tokens(block_size):
    model = trained_model()
    cache = make_cache(model, block_size=block_size)
    talk = Conversation(model, cache, seed=11)
    talk.run(7)
    assert talk.reused > 0
    for text in talk.texts:
        check_stored(model, cache, text)

"""Pools that are too small: what is evicted is computed again, and nothing is ever wrong."""

import pytest
import torch
from hf_conversation import Conversation
from hf_help import (
    HYBRID_FAMILIES,
    check_stored,
    group_names,
    make_cache,
    random_ids,
    same,
    tiny_model,
)

from quire import ops
from turns import by_turns

SMALL = {"full": 60, "sliding": 12, "chunked": 9, "recurrent": 4}
TINY = {"full": 26, "sliding": 7, "chunked": 6, "recurrent": 2}
TWO_STATES = {"full": 100, "sliding": 30, "chunked": 30, "recurrent": 2}


def text(num_tokens, seed=0):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


def pools(model, num_blocks):
    return {name: num_blocks[name] for name in group_names(model)}


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "size", "policy"),
    by_turns(HYBRID_FAMILIES, ["small", "tiny"], ["lru", "lfu"], default=[*HYBRID_FAMILIES][::2]),
)
def test_small_pools_evict_and_stay_right(family, size, policy):
    model, num_blocks = tiny_model(family), SMALL if size == "small" else TINY
    cache = make_cache(model, block_size=4, num_blocks=pools(model, num_blocks), policy=policy)
    talk = Conversation(model, cache, seed=len(family) + num_blocks["full"])
    talk.run(9)
    assert cache.stats.evicted_blocks > 0
    for one in talk.texts:
        check_stored(model, cache, one)


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm3"])
def test_a_state_to_work_on_and_one_to_keep_are_enough(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4, num_blocks=pools(model, TWO_STATES))
    first = same(model, cache, text(40), max_new_tokens=9, min_new_tokens=9)
    same(model, cache, torch.cat([first, text(3, 1)], dim=1))
    assert cache.last.cached_tokens == 48
    talk = Conversation(model, cache, seed=3)
    talk.run(6)


@pytest.mark.cases(2)
@pytest.mark.parametrize("family", ["gemma3_text", "mistral+window", "llama4_text"])
def test_a_prompt_longer_than_the_windowed_pool_is_kept_in_pieces(family):
    model = tiny_model(family)
    num_blocks = {**SMALL, "full": 100}
    cache = make_cache(model, block_size=4, num_blocks=pools(model, num_blocks))
    prompt = text(203)
    same(model, cache, prompt)
    same(model, cache, torch.cat([prompt, text(5, 1)], dim=1))
    assert cache.last.cached_tokens >= 200
    assert check_stored(model, cache, prompt[0]) >= 200


def test_a_text_that_is_kept_in_part_has_states_only_where_they_were_copied():
    model = tiny_model("qwen3_next")
    num_blocks = {"full": 20, "recurrent": 30}
    cache = make_cache(model, block_size=4, num_blocks=num_blocks, snapshot_interval=4)
    same(model, cache, text(41, 1))
    with cache.session(text(41, 1)):  # holds half of the blocks
        out = cache.generate(text(20), max_new_tokens=70, min_new_tokens=70)
    assert cache.memory()[0].cached >= 18
    assert check_stored(model, cache, out[0]) == 16  # the next state would be that of token 88


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gemma2", "mistral+window"])
def test_a_window_that_was_evicted_is_computed_again_and_found_again(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4, num_blocks=pools(model, {**SMALL, "full": 400}))
    first = text(60)
    same(model, cache, first)
    for seed in range(1, 4):
        same(model, cache, text(60, seed))
    assert check_stored(model, cache, first[0]) < 32
    same(model, cache, first)
    assert cache.last.cached_tokens < 32
    same(model, cache, first)
    assert cache.last.cached_tokens >= 56


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gemma2", "qwen3_next"])
def test_a_pool_that_holds_part_of_a_prompt_keeps_its_head(family):
    model = tiny_model(family)
    num_blocks = {"full": 6, "sliding": 8, "recurrent": 3}
    cache = make_cache(model, block_size=4, num_blocks=pools(model, num_blocks))
    for _ in range(2):
        same(model, cache, text(70))
    assert cache.last.cached_tokens <= 24
    same(model, cache, text(20, 1))
    same(model, cache, text(20, 1))
    assert cache.last.cached_tokens >= 16


@pytest.mark.cases(1)
@pytest.mark.parametrize("family", ["gemma2", "bamba"])
def test_two_sessions_at_once_and_a_call_between_them(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4, num_blocks=pools(model, SMALL))
    one, two = text(40), torch.cat([text(40)[:, :24], text(9, 1)], dim=1)
    with cache.session(one) as first:
        with cache.session(two) as second:
            out_two = model.generate(two, past_key_values=second, max_new_tokens=9)
            between = cache.generate(text(30, 2), max_new_tokens=6)
        out_one = model.generate(one, past_key_values=first, max_new_tokens=9)
    for ids, out in ((one, out_one), (two, out_two), (text(30, 2), between)):
        num_new = out.shape[1] - ids.shape[1]
        assert torch.equal(out, model.generate(ids, max_new_tokens=num_new))
        check_stored(model, cache, out[0])
    assert cache.manager.num_active == 0
    ops.check(cache.manager)


def test_calls_beside_an_open_session_leave_what_it_holds():
    model = tiny_model("qwen3_next")
    cache = make_cache(model, block_size=4, num_blocks={"full": 30, "recurrent": 40})
    with cache.session(text(110)) as past:
        for seed in range(4):
            same_while_open(model, cache, text(60, seed))
        ops.check(cache.manager)
        out = model.generate(text(110), past_key_values=past, max_new_tokens=5)
    assert torch.equal(out, model.generate(text(110), max_new_tokens=5))
    check_stored(model, cache, out[0])


def same_while_open(model, cache, ids):
    assert torch.equal(cache.generate(ids, max_new_tokens=5), model.generate(ids, max_new_tokens=5))

"""Tiers under every way of calling: beams, return sequences, sessions, chunks, decoding on."""

import pytest
import torch
from hf_help import make_cache, random_ids, same, tiny_model

from turns import by_turns, few

IDS = random_ids(torch.Generator().manual_seed(3), 90)
CALLS = {
    "beams": {"num_beams": 3},
    "return sequences": {"num_return_sequences": 3, "do_sample": True, "temperature": 0.7},
    "a prompt in chunks": {"prefill_chunk_size": 32},
}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("family", "call"), by_turns(["llama", "gemma3_text", "qwen3_next"], CALLS)
)
def test_calls_of_every_sort_start_from_what_came_back(family, call, host):
    model, arguments = tiny_model(family), CALLS[call]
    if family != "llama" and "prefill_chunk_size" in arguments:
        arguments = {}
    first = make_cache(model, tiers=host)
    text = same(model, first, IDS, **arguments)
    again = make_cache(model, tiers=host)
    assert torch.equal(same(model, again, IDS, **arguments), text)
    assert again.last.tier_tokens == {"host": 80}


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "family", few(["llama", "gemma3_text", "qwen3_next"], "gemma3_text", "qwen3_next")
)
def test_a_session_goes_on_from_what_came_back_and_hands_down_what_it_computed(family, host):
    model = tiny_model(family)
    plain = model.generate(IDS, max_new_tokens=30, min_new_tokens=30)
    for came in ({}, {"host": 80}):
        cache = make_cache(model, tiers=host)
        with cache.session(IDS) as past:
            text = model.generate(IDS, past_key_values=past, max_new_tokens=30, min_new_tokens=30)
        assert torch.equal(text, plain)
        assert cache.last.tier_tokens == came
    cache = make_cache(model, tiers=host)
    same(model, cache, torch.cat([text, IDS[:, :9]], dim=1))
    assert cache.last.tier_tokens == {"host": 112}


def test_a_session_that_raises_hands_down_what_was_computed_before(host):
    model = tiny_model("llama")
    cache = make_cache(model, tiers=host)

    def interrupted():
        with cache.session(IDS) as past:
            model(IDS, past_key_values=past, use_cache=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    again = make_cache(model, tiers=host)
    same(model, again, IDS)
    assert again.last.tier_tokens == {"host": 80}


def test_a_cleared_cache_is_warm_from_its_tiers(host):
    model = tiny_model("llama")
    cache = make_cache(model, tiers=host)
    same(model, cache, IDS)
    cache.clear()
    assert cache.manager.num_cached == 0
    same(model, cache, IDS)
    assert cache.last.tier_tokens == {"host": 80}

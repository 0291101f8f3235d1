"""Pins of a `PrefixCache`: under the scope that it keeps its model's blocks in."""

from hf_help import make_cache, prompt, tiny_model

from quire import ops


def test_a_pin_keeps_what_the_cache_has_of_a_prompt_and_says_how_much_that_is():
    cache = make_cache(tiny_model("llama"))
    ids = prompt(40)
    cache.generate(ids, max_new_tokens=4, do_sample=False)
    hits = cache.stats.hit_tokens
    size = cache.manager.block_size
    pin = cache.pin(ids)
    assert pin.num_tokens == 40 // size * size > 0
    assert pin.num_missing == 40 - pin.num_tokens
    cache.clear()
    assert cache.explain(ids).hit.num_tokens >= pin.num_tokens - size
    assert cache.stats.hit_tokens == hits
    pin.close()
    cache.clear()
    assert cache.explain(ids).hit.num_tokens == 0


def test_a_pin_by_the_manager_alone_says_that_it_keeps_nothing():
    cache = make_cache(tiny_model("llama"))
    ids = prompt(40)
    cache.generate(ids, max_new_tokens=4, do_sample=False)
    pin = ops.pin(cache.manager, ids[0].numpy())
    assert (pin.num_tokens, pin.num_missing) == (0, 40)


def test_a_call_that_finds_its_whole_prompt_counts_as_a_request():
    cache = make_cache(tiny_model("llama"))
    ids = prompt(41)
    cache.generate(ids, max_new_tokens=1, do_sample=False)
    cache.generate(ids, max_new_tokens=1, do_sample=False)
    assert cache.stats.num_requests == 2
    assert cache.stats.hit_tokens > 0

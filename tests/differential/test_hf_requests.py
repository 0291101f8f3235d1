"""Requests: generate's settings, reports, who shares with whom, a full cache."""

import numpy as np
import pytest
import torch
import transformers
from hf_help import (
    check_stored,
    left_padded,
    make_cache,
    random_ids,
    same,
    tiny_model,
)

from quire import ops
from quire.core import Scope


@pytest.fixture
def cache(model):
    return make_cache(model, block_size=8)


@pytest.fixture
def ids():
    return random_ids(torch.Generator().manual_seed(1), 40)


# -- the same as generate ------------------------------------------------------------------


class Collect(transformers.generation.streamers.BaseStreamer):
    def __init__(self):
        self.seen, self.ended = [], False

    def put(self, value):
        self.seen.extend(value.flatten().tolist())

    def end(self):
        self.ended = True


def test_a_streamer_sees_the_same_tokens(model, cache, ids):
    plain = Collect()
    model.generate(ids, streamer=plain, max_new_tokens=8)
    for _ in range(2):
        ours = Collect()
        cache.generate(ids, streamer=ours, max_new_tokens=8)
        assert ours.seen == plain.seen
        assert ours.ended


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
        {"do_sample": True, "num_beams": 2},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"prefill_chunk_size": 7},
        {"prefill_chunk_size": 7, "num_beams": 2},
        {"max_length": 55},
        {"min_new_tokens": 8},
        {"generation_config": transformers.GenerationConfig(num_beams=2, max_new_tokens=6)},
        {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.5, "early_stopping": True},
        {"guidance_scale": 1.5},
    ],
    ids="+".join,
)
def test_generation_settings_mean_what_they_mean_without_quire(model, cache, ids, arguments):
    length = {} if {"max_length", "generation_config"} & set(arguments) else {"max_new_tokens": 8}
    outputs = []
    for generate in (model.generate, cache.generate, cache.generate):
        torch.manual_seed(3)
        outputs.append(generate(ids, attention_mask=torch.ones_like(ids), **length, **arguments))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    assert cache.last.cached_tokens == 39


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_cache_works_inside_and_outside_of_inference_mode(model, ids, mode):
    with mode():
        cache = make_cache(model, block_size=8)
        same(model, cache, ids[:, :20])
    same(model, cache, ids)
    with mode():
        same(model, cache, torch.cat([ids, ids], dim=1))
    assert cache.last.cached_tokens == 40


def test_drafting_with_the_models_own_first_layers_gives_the_same_tokens(model, cache, ids):
    for _ in range(2):
        same(model, cache, ids, assistant_early_exit=1)
    assert cache.last.cached_tokens == 39


def test_a_model_whose_config_turns_the_cache_off_reuses_all_the_same():
    model = tiny_model("mpt")
    assert model.generation_config.use_cache is False
    cache, ids = make_cache(model, block_size=8), random_ids(None, 40)
    for _ in range(2):
        same(model, cache, ids)
    assert cache.last.cached_tokens == 39


def test_the_cache_that_generate_returns_goes_on_working(model, cache, ids):
    out = cache.generate(ids, max_new_tokens=4, return_dict_in_generate=True)
    more = model.generate(out.sequences, past_key_values=out.past_key_values, max_new_tokens=4)
    assert torch.equal(more, model.generate(out.sequences, max_new_tokens=4))


# -- reports and sharing -------------------------------------------------------------------


def test_the_report_of_a_call_adds_up(model, ids):
    clock = iter(np.arange(100.0))
    cache = make_cache(model, block_size=8, clock=clock.__next__)
    cache.generate(ids, max_new_tokens=9, min_new_tokens=9)
    assert (cache.last.prompt_tokens, cache.last.cached_tokens) == (40, 0)
    assert (cache.last.computed_tokens, cache.last.stored_tokens) == (40, 48)
    assert cache.last.ttft_s == 1.0
    cache.generate(ids, max_new_tokens=2)
    assert (cache.last.cached_tokens, cache.last.computed_tokens) == (39, 1)
    assert cache.stats.hit_tokens == 39
    assert cache.stats.num_requests == 2


def test_a_ragged_batch_reports_what_it_reused(model, cache, ids):
    cache.generate(ids, max_new_tokens=1)
    padded, mask = left_padded([ids[0], ids[0, :25]])
    cache.generate(padded, attention_mask=mask, max_new_tokens=1)
    assert cache.last.prompt_tokens == 65
    assert cache.last.cached_tokens == 39 + 24


def test_repr_shows_occupancy(model, cache, ids):
    cache.generate(ids, max_new_tokens=1)
    text = repr(cache)
    assert "LlamaForCausalLM" in text
    assert "5 of 400 blocks of 8 tokens used" in text
    assert "5 cached" in text


def test_explain_says_what_is_cached(model, cache, ids):
    cache.generate(ids, max_new_tokens=1)
    assert "40" in str(cache.explain(ids))
    assert str(cache.explain(ids[0].tolist())) == str(cache.explain(ids))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Scope(salt="a"), Scope(salt="b")),
        (Scope(salt="a"), Scope(lora="a")),
        (Scope(lora="a"), Scope(lora="b")),
        (Scope(salt="a", lora="b"), Scope(salt="ab")),
        (Scope(lora="a"), None),
    ],
)
def test_scopes_do_not_share(model, cache, ids, one, other):
    same(model, cache, ids, scope=one)
    same(model, cache, ids, scope=other)
    assert cache.last.cached_tokens == 0
    same(model, cache, ids, scope=one)
    assert cache.last.cached_tokens == 39


def test_the_fingerprint_tells_models_apart(model):
    again = make_cache(tiny_model("llama")).fingerprint
    assert make_cache(model).fingerprint == again
    assert make_cache(tiny_model("llama", seed=1)).fingerprint != again
    assert make_cache(model, block_size=4).fingerprint != again
    assert make_cache(tiny_model("qwen2")).fingerprint != again


def test_a_pool_of_half_precision_takes_half_the_bytes_and_stays_close(model, ids):
    cache = make_cache(model, block_size=8, dtype=torch.bfloat16)
    assert (
        cache.layout.bytes_per_block * 2 == make_cache(model, block_size=8).layout.bytes_per_block
    )
    cache.generate(ids, max_new_tokens=1)
    out = cache.generate(ids, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
    assert cache.last.cached_tokens == 39
    expected = model(ids).logits[:, -1].detach()
    distance = (out.logits[0] - expected).norm() / expected.norm()
    assert 0 < float(distance) < 0.05


def test_sequences_that_part_inside_a_reused_block_keep_their_own_copy_of_it(model, ids):
    cache = make_cache(model)
    cache.generate(torch.cat([ids, ids], dim=1), max_new_tokens=1)
    parted = torch.cat([ids[:, :37], (ids[:, 37:38] + 1) % 90 + 3], dim=1)
    out = same(
        model, cache, parted, do_sample=True, num_return_sequences=3, max_new_tokens=30,
        min_new_tokens=30,
    )  # fmt: skip
    assert cache.last.cached_tokens == 37
    assert cache.stats.copied_blocks == 3
    for text in [*out, ids[0]]:
        assert check_stored(model, cache, text) >= 32
    assert [check_stored(model, cache, text) for text in out] == [64, 64, 64]


# -- a full cache --------------------------------------------------------------------------


def test_a_prompt_larger_than_the_pool_is_served_and_its_head_kept(model, ids):
    cache = make_cache(model, block_size=8, num_blocks=3)
    for reused in (0, 23):
        same(model, cache, ids)
        assert cache.last.cached_tokens == reused
    assert check_stored(model, cache, ids[0, :24]) == 23


def test_sessions_that_hold_the_whole_pool_do_not_fail_others(model, ids):
    cache = make_cache(model, block_size=8, num_blocks=5)
    cache.generate(ids, max_new_tokens=1)
    with cache.session(ids):
        assert cache.manager.num_active == 5
        other = random_ids(torch.Generator().manual_seed(6), 30)
        assert torch.equal(
            cache.generate(other, max_new_tokens=4), model.generate(other, max_new_tokens=4)
        )
        assert cache.last.stored_tokens == 0
    ops.check(cache.manager)
    assert cache.manager.num_cached >= 4


def test_the_kv_of_a_later_turn_is_kept_as_far_as_there_is_room(model, ids):
    cache = make_cache(model, block_size=8, num_blocks=7)
    cache.generate(ids, max_new_tokens=60, min_new_tokens=60)
    assert cache.last.stored_tokens == 56
    assert cache.manager.num_cached == 7
    ops.check(cache.manager)


# -- beams and return sequences ------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 16])
def test_a_prompt_is_computed_once_for_all_its_rows(model, ids, chunk):
    fed = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    padded, mask = left_padded([ids[0], ids[0, :25]])
    cache = make_cache(model, block_size=8)
    fed.clear()
    cache.generate(
        padded, attention_mask=mask, num_beams=3, max_new_tokens=2, prefill_chunk_size=chunk
    )
    handle.remove()
    prompt = [(2, 39)] if chunk is None else [(2, 16), (2, 16), (2, 7)]
    assert fed == [*prompt, (6, 1), (6, 1)]


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_a_prompt_of_one_token_has_nothing_to_reuse(model, cache, ids, mode):
    for _ in range(2):
        same(model, cache, ids[:, :1], **mode)
    assert cache.last.cached_tokens == 0

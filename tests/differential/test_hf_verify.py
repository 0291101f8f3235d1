"""Strict mode: the first reused call of each shape is compared with the model itself."""

import functools
import types

import pytest
import torch
from hf_help import left_padded, make_cache, random_ids, same, tiny_model
from hf_wrong import built, mutant
from transformers import LlamaForCausalLM

from quire import ops
from quire.errors import UnsupportedModel
from turns import few

THRESHOLD = 20


def text(num_tokens, seed=0):
    return random_ids(torch.Generator().manual_seed(seed), num_tokens)


def changed_at(model, threshold):
    """Make this very model see every input of more tokens than that otherwise, past what a probe sees."""

    @functools.wraps(model.forward)
    def forward(self, input_ids=None, **arguments):
        embeds = self.model.embed_tokens(input_ids)
        if input_ids.shape[1] > threshold:
            embeds = embeds * 0.5
        return type(self).forward(self, inputs_embeds=embeds, **arguments)

    model.forward = types.MethodType(forward, model)
    return model


@pytest.fixture
def wrong():
    return changed_at(mutant(LlamaForCausalLM), THRESHOLD)


def counted(model):
    """The number of tokens of each forward of the model, as a list that grows."""
    fed = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: fed.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return fed


def test_a_changed_model_passes_unseen_without_verify(wrong):
    cache = make_cache(wrong, block_size=4)
    cache.generate(text(17), max_new_tokens=2)
    cache.generate(text(40), max_new_tokens=2)
    assert cache.last.cached_tokens >= 16


def test_a_reused_call_that_differs_is_refused_with_the_shape_and_the_distance(wrong):
    cache = make_cache(wrong, block_size=4, verify="first")
    cache.generate(text(17), max_new_tokens=2)
    match = r"llama \(LlamaForCausalLM\).*one row.*are \S+ from.*limit 0.001; the tokens are \d+"
    with pytest.raises(UnsupportedModel, match=match):
        cache.generate(text(40), max_new_tokens=2)
    assert cache.manager.num_cached == cache.manager.num_active == 0
    ops.check(cache.manager)


def test_after_a_refusal_nothing_is_reused_any_more(wrong):
    cache = make_cache(wrong, block_size=4, verify="first")
    cache.generate(text(17), max_new_tokens=2)
    for length in (40, 17):
        with pytest.raises(UnsupportedModel, match="is dropped; call"):
            cache.generate(text(length), max_new_tokens=2)
    with pytest.raises(UnsupportedModel, match="is dropped"), cache.session(text(5)):
        pass


def test_a_session_that_differs_is_refused_and_keeps_nothing(wrong):
    cache = make_cache(wrong, block_size=4, verify="first")
    cache.generate(text(17), max_new_tokens=2)
    with (
        pytest.raises(UnsupportedModel, match="not exact with reuse"),
        cache.session(text(40)) as past,
    ):
        wrong.generate(text(40), past_key_values=past, max_new_tokens=3)
    assert cache.manager.num_cached == cache.manager.num_active == 0


def test_a_shape_is_compared_once_and_without_reuse_not_at_all():
    cache = make_cache(
        built(LlamaForCausalLM, tiny_model("llama").config), block_size=4, verify="first"
    )
    fed = counted(cache.model)
    for length, compared in ((20, []), (30, [30]), (50, [])):
        fed.clear()
        cache.generate(text(length), max_new_tokens=1)
        assert fed == [length - cache.last.cached_tokens, *compared]


SHAPES = {
    "beams": {"num_beams": 3},
    "return sequences": {"num_beams": 2, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 7},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.cases(2)
@pytest.mark.parametrize("arguments", SHAPES.values(), ids=list(SHAPES))
def test_calls_that_feed_a_model_otherwise_are_compared_and_pass(arguments):
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4, verify="first")
    for length in (24, 40):
        same(model, cache, text(length), max_new_tokens=4, **arguments)
    assert cache.last.cached_tokens >= 20
    expanded = "num_beams" in arguments
    assert ["expanded" in shape for shape in cache._calls.first._seen] == [expanded]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "family",
    few(
        ["gemma2", "gpt_oss", "qwen3_next", "deepseek_v3", "gpt2"], "gpt_oss", "qwen3_next", "gpt2"
    ),
)
def test_healthy_families_pass_in_each_shape(family):
    model = tiny_model(family)
    cache = make_cache(model, block_size=4, verify="first")
    rows = [text(n, seed=n)[0] for n in (30, 18)]
    for extra in (0, 5, 9):
        longer = [torch.cat([row, text(extra, 1)[0]]) for row in rows]
        same(model, cache, longer[0][None], max_new_tokens=2)
        ids, mask = left_padded(longer)
        same(model, cache, ids, attention_mask=mask, max_new_tokens=2)
    alike = {shape for shape in cache._calls.first._seen if "padded" not in shape}
    assert {shape[0] for shape in alike} == {"one row"}
    assert {shape[0] for shape in cache._calls.first._seen - alike} == {"several rows"}
    cache.generate(longer[0][None], num_beams=2, max_new_tokens=2)
    assert len(cache._calls.first._seen) == 3


def test_half_precision_is_compared_with_room_for_rounding():
    model = tiny_model("llama", dtype=torch.bfloat16)
    cache = make_cache(model, block_size=4, verify="first")
    for length in (20, 40):
        cache.generate(text(length), max_new_tokens=2)
    assert len(cache._calls.first._seen) == 1
    assert cache.last.cached_tokens > 0


def test_verification_leaves_out_forwards_with_positions_of_the_caller():
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4, verify="first")
    cache.generate(text(20), max_new_tokens=2)
    with cache.session(text(40)) as past, torch.no_grad():
        start = past.get_seq_length()
        embeds = model.get_input_embeddings()(text(40)[:, start:])
        cache.model(inputs_embeds=embeds, past_key_values=past, use_cache=True)
    assert not cache._calls.first._seen

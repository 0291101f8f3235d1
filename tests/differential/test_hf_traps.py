"""The traps of transformers' cache protocol, each as a test: shared/facts, reproduced on 5.23."""

import itertools

import pytest
import torch
import transformers
from hf_help import VOCAB, left_padded, make_cache, random_ids, same
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from quire import ops
from quire.engines.hf import PrefixCache
from quire.errors import ConfigError, UnsupportedModel


@pytest.fixture
def ids():
    return random_ids(torch.Generator().manual_seed(7), 48)


def test_trap_1_a_prompt_that_is_cached_whole_leaves_one_token_to_compute(model, ids):
    whole = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=whole, use_cache=True)
    plain = model.generate(ids, max_new_tokens=8)
    wrong = model.generate(ids, past_key_values=whole, max_new_tokens=8)
    assert not torch.equal(wrong, plain)

    cache = make_cache(model)
    cache.generate(ids, max_new_tokens=20, min_new_tokens=20)
    assert torch.equal(cache.generate(ids, max_new_tokens=8), plain)
    assert cache.last.cached_tokens == 47
    with cache.session(ids) as past:
        assert past.get_seq_length() == 47


def test_trap_2_full_ids_and_new_ids_with_a_full_mask_are_both_right(model, ids):
    plain = model.generate(ids, max_new_tokens=8)
    cache = make_cache(model)
    cache.generate(ids[:, :40], max_new_tokens=1)
    with cache.session(ids) as past:
        held = past.get_seq_length()
        assert held >= 32
        new = model.generate(
            ids[:, held:],
            attention_mask=torch.ones_like(ids),
            past_key_values=past,
            max_new_tokens=8,
        )
    assert torch.equal(new, plain[:, held:])
    assert torch.equal(cache.generate(ids, max_new_tokens=8), plain)


def test_trap_3_a_model_of_recurrent_layers_alone_is_refused():
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModel, match="recurrent"):
        PrefixCache(model, "1MiB")


def test_trap_3_a_crop_puts_the_cache_back_as_it_was(model, ids):
    cache = make_cache(model)
    with cache.session(ids) as past, torch.no_grad():
        assert past.is_croppable
        model(ids[:, :30], past_key_values=past)
        model(random_ids(torch.Generator(), 9), past_key_values=past)
        past.crop(-9)
        assert past.get_seq_length() == 30
        past.check()
        logits = model(ids[:, 30:], past_key_values=past).logits
    torch.testing.assert_close(logits[:, -1], model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)
    assert cache.manager.probe(ids[0].numpy(), cache.kept.identity.scope(None)).num_tokens == 47


def test_trap_3_crop_takes_negative_numbers_only(model, ids):
    with make_cache(model).session(ids) as past:
        model(ids, past_key_values=past)
        with pytest.raises(ConfigError, match=r"crop\(-3\) removes the last 3"):
            past.crop(3)


@pytest.mark.parametrize("warm", [False, True])
def test_trap_4_a_session_that_was_not_expanded_says_what_to_do(model, ids, warm):
    cache = make_cache(model)
    if warm:
        cache.generate(ids, max_new_tokens=1)
        before = ops.snapshot(cache.manager)
        with (
            pytest.raises(ConfigError, match=r"1 rows.*fed 3.*batch_repeat_interleave"),
            cache.session(ids) as past,
        ):
            model.generate(ids, past_key_values=past, num_beams=3, max_new_tokens=4)
        assert ops.snapshot(cache.manager)["groups"] == before["groups"]
    with cache.session(ids) as past:
        past.batch_repeat_interleave(3)
        out = model.generate(ids, past_key_values=past, num_beams=3, max_new_tokens=4)
    assert torch.equal(out, model.generate(ids, num_beams=3, max_new_tokens=4))


def attention_of_our_own(module, query, key, value, attention_mask, **kwargs):
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def model_with_attention(name):
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        attn_implementation=name,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def test_trap_5_an_attention_function_without_a_mask_function_is_refused():
    AttentionInterface.register("quire_test_maskless", attention_of_our_own)
    with pytest.raises(UnsupportedModel, match=r"quire_test_maskless.*AttentionMaskInterface"):
        PrefixCache(model_with_attention("quire_test_maskless"), "1MiB")


def test_trap_5_an_attention_function_with_a_mask_function_is_right():
    AttentionInterface.register("quire_test_masked", attention_of_our_own)
    AttentionMaskInterface.register("quire_test_masked", sdpa_mask)
    model = model_with_attention("quire_test_masked")
    cache = make_cache(model)
    ids, mask = left_padded([row[: 30 + 9 * i] for i, row in enumerate(random_ids(None, 40, 2))])
    for _ in range(2):
        same(model, cache, ids, attention_mask=mask)
    assert cache.last.cached_tokens > 0


def test_trap_6_new_tokens_are_written_in_place(model, ids):
    cache = make_cache(model)
    with cache.session(ids) as past, torch.no_grad():
        model(ids, past_key_values=past)
        homes = []
        for _ in range(300):
            model(ids[:, :1], past_key_values=past)
            homes.append(past.layers[0].keys.data_ptr())
    moves = sum(a != b for a, b in itertools.pairwise(homes))
    assert moves <= 4


def test_trap_6_generate_never_moves_what_it_knows_the_length_of(model, ids):
    homes = set()
    cache = make_cache(model)

    class Watch(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            homes.add(cache_layer().keys.data_ptr())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def cache_layer():
        return seen[0].layers[0]

    seen = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["past_key_values"]), with_kwargs=True
    )
    cache.generate(ids, max_new_tokens=150, min_new_tokens=150, stopping_criteria=[Watch()])
    handle.remove()
    assert len(homes) == 1


def test_trap_7_padding_is_inferred_as_generate_infers_it(model):
    ids, mask = left_padded([random_ids(None, 40)[0], random_ids(None, 21)[0]])
    cache = make_cache(model)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=6)
    for _ in range(2):
        assert torch.equal(cache.generate(ids, max_new_tokens=6), plain)
    assert torch.equal(model.generate(ids, max_new_tokens=6), plain)


def test_trap_8_the_last_new_token_has_no_kv(model, ids):
    cache = make_cache(model, block_size=1)
    out = cache.generate(ids, max_new_tokens=8, min_new_tokens=8)
    longer = torch.cat([out, ids[:, :3]], dim=1)[0].numpy()
    assert out.shape[1] == 56
    assert cache.manager.probe(longer, cache.kept.identity.scope(None)).num_tokens == 55


def test_trap_9_assisted_decoding_feeds_the_whole_prompt_to_a_cache_that_holds_its_head(model, ids):
    head = DynamicCache()
    with torch.no_grad():
        model(ids[:, :40], past_key_values=head, use_cache=True)
    drafts = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 8}
    plain = model.generate(ids, **drafts)
    assert not torch.equal(model.generate(ids, past_key_values=head, **drafts), plain)

    cache = make_cache(model)
    for _ in range(2):
        same(model, cache, ids, **drafts)
    assert cache.last.cached_tokens == 47
    with cache.session(ids) as past:
        assert torch.equal(model.generate(ids, past_key_values=past, **drafts), plain)
        past.check()

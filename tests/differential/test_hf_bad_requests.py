"""Requests and models that are refused, by name and with the reason, and leave no trace."""

import pytest
import torch
import transformers
from hf_help import (
    PAD,
    VOCAB,
    make_cache,
    random_ids,
    same,
)

from quire import ops
from quire.core import Scope
from quire.engines.hf import PrefixCache
from quire.errors import ConfigError, ScopeError, TokensError, UnsupportedModel


@pytest.fixture
def cache(model):
    return make_cache(model, block_size=8)


@pytest.fixture
def ids():
    return random_ids(torch.Generator().manual_seed(1), 40)


# -- refused -------------------------------------------------------------------------------

IDS = torch.arange(3, 23).reshape(2, 10)
RIGHT_PADDED = torch.ones_like(IDS)
RIGHT_PADDED[1, 7:] = 0
BAD_REQUESTS = {
    "no ids": ({"input_ids": None}, TokensError, "NoneType"),
    "a text": ({"input_ids": "What is a list?"}, TokensError, "return_tensors='pt'"),
    "texts": ({"input_ids": ["What", "is"]}, TokensError, "list of str"),
    "rows of different lengths": (
        {"input_ids": [[3, 4, 5], [6]]},
        TokensError,
        "1 to 3 tokens.*padding_side",
    ),
    "tensors of different lengths": (
        {"input_ids": [IDS[0], IDS[1, :4]]},
        TokensError,
        "4 to 10 tokens",
    ),
    "three dimensions": ({"input_ids": IDS[None]}, TokensError, r"\[1, 2, 10\]"),
    "an empty list": ({"input_ids": []}, TokensError, r"\[1, 0\]"),
    "a list of floats": ({"input_ids": [[3.5]]}, TokensError, "float64"),
    "truths": ({"input_ids": IDS > 4}, TokensError, "bool"),
    "a mapping without ids": (
        {"input_ids": {"attention_mask": IDS}},
        TokensError,
        "attention_mask",
    ),
    "a mask given twice": (
        {"input_ids": {"input_ids": IDS, "attention_mask": IDS}, "attention_mask": IDS},
        ConfigError,
        "attention_mask: given beside",
    ),
    "ids given twice": ({"inputs": IDS}, ConfigError, "inputs and input_ids"),
    "embeddings alone": (
        {"input_ids": None, "inputs_embeds": torch.zeros(2, 3, 32)},
        ConfigError,
        "inputs_embeds without input_ids",
    ),
    "another library's word": ({"max_tokens": 3}, ConfigError, "did you mean max_new_tokens"),
    "another spelling of ours": ({"scopes": Scope()}, ConfigError, "did you mean scope"),
    "no token": ({"input_ids": IDS[:, :0]}, TokensError, r"\[2, 0\]"),
    "no row": ({"input_ids": IDS[:0]}, TokensError, r"\[0, 10\]"),
    "floats": ({"input_ids": IDS.float()}, TokensError, "float32"),
    "a negative id": ({"input_ids": IDS - 5}, TokensError, "id -2 "),
    "an id too large": ({"input_ids": IDS + 80}, TokensError, f"vocabulary of {VOCAB}"),
    "right padding": ({"attention_mask": RIGHT_PADDED}, TokensError, "column 7 of row 1"),
    "an empty row": ({"attention_mask": torch.zeros_like(IDS)}, TokensError, "row 0 .* empty"),
    "another mask": ({"attention_mask": torch.ones(2, 9)}, TokensError, r"\[2, 9\]"),
    "a mask that is none": ({"attention_mask": "ones"}, TokensError, "str"),
    "a scope that is none": ({"scope": "tenant"}, ScopeError, "'tenant'"),
    "a scope with a model": ({"scope": Scope(model="x")}, ScopeError, "fingerprint"),
    "a cache": ({"past_key_values": transformers.DynamicCache()}, ConfigError, "session"),
    "embeddings": ({"inputs_embeds": torch.zeros(2, 3, 32)}, ConfigError, "token ids"),
    "positions": ({"position_ids": IDS}, ConfigError, "position_ids"),
    "pixels": ({"pixel_values": torch.zeros(1)}, ConfigError, "pixel_values"),
    "token types": ({"token_type_ids": IDS}, ConfigError, "token_type_ids"),
    "a typo": ({"max_new_token": 3}, ConfigError, "did you mean max_new_tokens"),
    "no cache": ({"use_cache": False}, ConfigError, "use_cache=False"),
    "a static cache": ({"cache_implementation": "static"}, ConfigError, "cache_implementation"),
    "healing": ({"token_healing": True}, ConfigError, "token_healing"),
    "a loop from elsewhere": ({"custom_generate": "a/b"}, ConfigError, "custom_generate"),
    "a priority of text": ({"priority": "high"}, ConfigError, "priority"),
    "a time below zero": ({"retain_s": -1.0}, ConfigError, "retain"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_bad_request_is_refused_and_changes_nothing(model, cache, name):
    arguments, error, words = BAD_REQUESTS[name]
    cache.generate(IDS, max_new_tokens=2)
    before, last = ops.snapshot(cache.manager), cache.last
    with pytest.raises(error, match=words):
        cache.generate(**{"input_ids": IDS, **arguments})
    assert ops.snapshot(cache.manager) == before
    assert cache.last == last
    same(model, cache, IDS)


@pytest.mark.parametrize("name", ["floats", "right padding", "a scope that is none"])
def test_a_bad_session_is_refused_and_changes_nothing(model, cache, name):
    arguments, error, words = BAD_REQUESTS[name]
    before = ops.snapshot(cache.manager)
    with pytest.raises(error, match=words), cache.session(**{"input_ids": IDS, **arguments}):
        pytest.fail("the block ran")
    assert ops.snapshot(cache.manager) == before


@pytest.mark.cases(3)
@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"capacity": "12 parsecs"}, ConfigError, "parsecs"),
        ({"capacity": 0}, ConfigError, "0 bytes"),
        ({"capacity": 100}, ConfigError, "holds no block: one block of 16 tokens takes 4096"),
        ({"block_size": 0}, ConfigError, "block_size must be from 1 to [0-9]+, got 0"),
        ({"block_size": 2.5}, ConfigError, "block_size must be an integer, got 2.5"),
        ({"capacity": "4TiB"}, ConfigError, "no room"),
        ({"policy": "best"}, ConfigError, "best"),
        ({"dtype": torch.int8}, ConfigError, "int8"),
        (
            {"capcity": "1MiB"},
            ConfigError,
            "PrefixCache has no setting 'capcity'; did you mean capacity",
        ),
        ({"something": 1}, ConfigError, "PrefixCache has no setting 'something'$"),
    ],
)
def test_settings_that_cannot_work_are_refused(model, settings, error, words):
    with pytest.raises(error, match=words):
        PrefixCache(model, **{"capacity": "1MiB", **settings})


def test_a_model_in_training_is_refused(model, cache, ids):
    config = model.config
    fresh = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ConfigError, match=r"model\.eval\(\)"):
        PrefixCache(fresh.train(), "1MiB")
    ours = PrefixCache(fresh.eval(), "1MiB")
    fresh.train()
    with pytest.raises(ConfigError, match=r"model\.eval\(\)"):
        ours.generate(ids)


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_a_model_that_looks_ahead_is_found_out_by_running_it(model_type):
    config = transformers.CONFIG_MAPPING[model_type](
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
    )
    config.is_decoder = False
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModel, match="not causal"):
        PrefixCache(model, "1MiB")


def test_a_model_without_a_head_is_refused(model):
    with pytest.raises(UnsupportedModel, match="AutoModelForCausalLM"):
        PrefixCache(model.model, "1MiB")


# -- errors on the way ---------------------------------------------------------------------


class Broken(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise KeyError(len(input_ids))


def test_an_exception_in_generate_leaves_the_cache_usable(model, cache, ids):
    cache.generate(ids[:, :20], max_new_tokens=2)
    with pytest.raises(KeyError):
        cache.generate(ids, stopping_criteria=[Broken()], max_new_tokens=3)
    assert cache.manager.num_active == 0
    ops.check(cache.manager)
    same(model, cache, ids)


def test_arguments_that_generate_refuses_raise_its_error_and_hold_no_block(model, cache, ids):
    with pytest.raises(ValueError, match="num_return_sequences"):
        cache.generate(ids, num_return_sequences=3, do_sample=False)
    assert cache.manager.num_active == 0


def test_a_pad_id_in_a_prompt_without_a_mask_is_told_apart_from_padding(model):
    cache = make_cache(model)
    ids = torch.tensor([[5, 6, PAD, 7, 8]])
    with pytest.raises(TokensError, match=r"column 2 of row 0 holds 0.*ones_like\(input_ids\)"):
        cache.generate(ids, pad_token_id=PAD, max_new_tokens=3)
    same(model, cache, ids, attention_mask=torch.ones_like(ids), pad_token_id=PAD)

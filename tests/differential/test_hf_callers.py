"""Calls and arguments that users of transformers use: they work as with the model."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
import transformers
from hf_help import (
    TRAINED,
    check_stored,
    make_cache,
    own,
    random_ids,
    same,
    tiny_model,
    trained_model,
)
from hypothesis import strategies as st

from quire.engines.hf import PrefixCache, SlotPrefixCache
from quire.errors import ConfigError
from turns import drawn

TEXT = "A list holds values in order, and a tuple does as well. "


@pytest.fixture(scope="module")
def tokenizer():
    tokenizer = transformers.AutoTokenizer.from_pretrained(TRAINED, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer


# -- forms of ids -----------------------------------------------------------------------------

FORMS = {
    "int64": lambda ids: ids,
    "int32": lambda ids: ids.int(),
    "not contiguous": lambda ids: ids.t().contiguous().t(),
    "array of int64": lambda ids: ids.numpy(),
    "array of int32": lambda ids: ids.numpy().astype(np.int32),
    "read-only array": lambda ids: np.frombuffer(ids.numpy().tobytes(), np.int64).reshape(
        ids.shape
    ),
    "lists": lambda ids: ids.tolist(),
    "tuples": lambda ids: tuple(map(tuple, ids.tolist())),
    "list of arrays": lambda ids: list(ids.numpy()),
    "list of tensors": list,
    "flat": lambda ids: ids[0].tolist(),
    "flat array": lambda ids: ids[0].numpy(),
    "flat tensor": lambda ids: ids[0],
    "encoding": lambda ids: transformers.BatchEncoding({"input_ids": ids}),
    "encoding of lists": lambda ids: {"input_ids": ids.tolist()},
}
MASKS = {
    "none": lambda mask: None,
    "tensor": lambda mask: mask,
    "truths": lambda mask: mask.bool(),
    "array": lambda mask: mask.numpy(),
    "lists": lambda mask: mask.tolist(),
}


@drawn(
    12,
    300,
    form=st.sampled_from(sorted(FORMS)),
    mask_form=st.sampled_from(sorted(MASKS)),
    pads=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    call=st.sampled_from(["generate", "session", "explain"]),
    in_mapping=st.booleans(),
)
def test_ids_and_masks_of_every_form_are_the_same_request(form, mask_form, pads, call, in_mapping):
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4)
    if form.startswith("flat") or call == "explain":
        pads = pads[:1]
    ids = random_ids(torch.Generator().manual_seed(len(pads)), 24, rows=len(pads))
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad], mask[row, :pad] = 0, 0
    given_ids, given_mask = FORMS[form](ids), MASKS[mask_form](mask)
    if in_mapping and "encoding" in form:
        given_ids, given_mask = {**given_ids, "attention_mask": given_mask}, None
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=4)
    cache.generate(ids[:1], attention_mask=mask[:1], max_new_tokens=1)
    if call == "explain":
        hit = cache.explain(given_ids, attention_mask=given_mask).hit.num_tokens
        assert hit == cache.explain(ids, attention_mask=mask).hit.num_tokens > 0
    elif call == "session":
        with cache.session(given_ids, attention_mask=given_mask) as past:
            out = cache.model.generate(
                ids, attention_mask=mask, past_key_values=past, max_new_tokens=4
            )
        assert torch.equal(out, plain)
    else:
        out = cache.generate(given_ids, attention_mask=given_mask, max_new_tokens=4)
        assert torch.equal(out, plain)
        assert out.dtype == torch.int64
    for row, pad in enumerate(pads):
        check_stored(model, cache, plain[row, pad:])


def test_a_batch_encoding_is_accepted_as_one_argument(tokenizer):
    model = trained_model()
    cache = make_cache(model)
    batch = tokenizer([TEXT * 2, TEXT], padding=True, return_tensors="pt")
    plain = model.generate(**batch, max_new_tokens=6)
    assert torch.equal(cache.generate(batch, max_new_tokens=6), plain)
    assert torch.equal(cache.generate(batch, max_new_tokens=6), plain)
    assert cache.last.cached_tokens
    assert set(batch) == {"input_ids", "attention_mask"}
    chat = [{"role": "user", "content": TEXT}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    plain = model.generate(**inputs, max_new_tokens=6)
    assert torch.equal(cache.generate(inputs, max_new_tokens=6), plain)
    assert cache.explain(inputs).hit.num_tokens == inputs["input_ids"].shape[1] - 1
    assert cache.prefetch(inputs) == []
    with pytest.raises(ConfigError, match=r"pixels: a session takes ids"):
        cache.session({**inputs, "pixels": 1}).__enter__()


# -- ways of calling ----------------------------------------------------------------------------


def test_a_pipeline_runs_over_a_cache(tokenizer):
    model = trained_model()
    cache = make_cache(model)
    plain, ours = (
        transformers.pipeline("text-generation", model=each, tokenizer=tokenizer)
        for each in (model, cache)
    )
    chat = [{"role": "system", "content": TEXT * 3}, {"role": "user", "content": "What is a list?"}]
    arguments = {"max_new_tokens": 6, "do_sample": False}
    for asked, extra in (
        (TEXT * 3, {}),
        (chat, {"return_full_text": False}),
        ([TEXT, TEXT * 2], {"batch_size": 2}),
        ([chat, chat], {"generation_config": transformers.GenerationConfig(max_new_tokens=4)}),
    ):
        expected = plain(asked, **{**arguments, **extra})
        for _ in range(2):
            assert ours(asked, **{**arguments, **extra}) == expected
    assert cache.last.cached_tokens
    assert "PrefixCache" in repr(ours)
    assert transformers.pipeline("text-generation", model=cache, tokenizer=tokenizer, device="cpu")


@pytest.mark.cases(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_calls_under_every_mode_share(model, cache, ids, mode):
    for _ in range(2):
        with mode():
            out = cache.generate(ids, max_new_tokens=4)
    assert cache.last.cached_tokens == 40
    assert torch.equal(out, model.generate(ids, max_new_tokens=4))
    with torch.inference_mode(), cache.session(ids) as past:
        cache.model(ids[:, past.get_seq_length() :], past_key_values=past)
    same(model, cache, ids)
    check_stored(model, cache, out[0])


def test_stop_strings_and_streamers(tokenizer):
    model = trained_model()
    cache = make_cache(model)
    inputs = tokenizer(TEXT, return_tensors="pt")
    arguments = {"max_new_tokens": 12, "stop_strings": ["e"], "tokenizer": tokenizer}
    plain = model.generate(**inputs, **arguments)
    for _ in range(2):
        assert torch.equal(cache.generate(inputs, **arguments), plain)
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(
        target=cache.generate, args=(inputs,), kwargs={**arguments, "streamer": streamer}
    )
    thread.start()
    streamed = "".join(streamer)
    repr(cache), cache.stats
    thread.join()
    assert streamed == tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :])
    assert cache.last.cached_tokens


SETTINGS = [None, "static", "hybrid", "dynamic", "offloaded", "quantized", "sliding_window"]


@pytest.mark.cases(2)
@pytest.mark.parametrize("where", ["the model's", "the call's"])
@pytest.mark.parametrize("kind", SETTINGS)
def test_settings_of_another_cache_change_nothing(ids, kind, where):
    model = own("llama")
    plain = model.generate(ids, max_new_tokens=5)
    cache, arguments = make_cache(model, block_size=4), {"max_new_tokens": 5}
    if where == "the model's":
        model.generation_config.cache_implementation = kind
    else:
        config = copy.deepcopy(model.generation_config)
        config.cache_implementation, config.max_new_tokens = kind, 5
        arguments = {"generation_config": config}
    for _ in range(2):
        assert torch.equal(cache.generate(ids, **arguments), plain)
    assert cache.last.cached_tokens == 40
    slots = SlotPrefixCache(model, 2, 64)
    assert torch.equal(slots.generate(ids, **arguments), plain)


def test_positional_arguments_of_a_forward_in_a_session(model, cache, ids):
    positions = torch.arange(41)[None]
    with cache.session(ids) as past, torch.no_grad():
        cache.model(ids[:, :20], None, positions[:, :20], past)
        cache.model(ids[:, 20:], None, positions[:, 20:], past)
        with pytest.raises(TypeError, match="multiple values"):
            cache.model(ids, input_ids=ids, past_key_values=past)
        past.check()
    assert check_stored(model, cache, ids[0]) == 40
    same(model, cache, ids)


def test_a_whole_prompt_fed_again_by_position_is_cut(model, cache, ids):
    cache.generate(ids, max_new_tokens=1)
    with cache.session(ids) as past, torch.no_grad():
        logits = cache.model(ids, None, torch.arange(41)[None], past).logits
    assert past.get_seq_length() == 41
    torch.testing.assert_close(logits[:, -1], model(ids).logits[:, -1], atol=1e-4, rtol=1e-4)


def test_a_copy_of_a_lent_cache_goes_on_alone(model, cache, ids):
    cache.generate(ids, max_new_tokens=1)
    with cache.session(ids) as past:
        for _ in range(2):
            twin = copy.deepcopy(past)
            out = cache.model.generate(ids, past_key_values=twin, max_new_tokens=4)
            assert torch.equal(out, model.generate(ids, max_new_tokens=4))
        assert past.get_seq_length() == 40
    same(model, cache, ids)


# -- refused, and why ---------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_cache_is_not_copied(model, cache, ids, copied):
    with pytest.raises(ConfigError, match=r"PrefixCache .* not pickled or copied.*save\(\)"):
        copied(cache)
    with pytest.raises(ConfigError, match="SlotPrefixCache"):
        copied(SlotPrefixCache(model, 1, 64))
    same(model, cache, ids)


def test_a_cache_is_not_called(model, cache, ids):
    with pytest.raises(ConfigError, match=r"cache\.generate.*cache\.session"):
        cache(ids)
    same(model, cache, ids)


def test_a_cache_stays_where_it_is(model, cache, ids):
    assert cache.to("cpu") is cache
    with pytest.raises(ConfigError, match="on cpu, and do not move to meta"):
        cache.to("meta")
    same(model, cache, ids)


@pytest.mark.parametrize("kind", [PrefixCache, SlotPrefixCache])
def test_a_cache_of_something_else_than_a_model_is_refused_with_advice(kind, tokenizer, tmp_path):
    pipe = transformers.pipeline("text-generation", model=trained_model(), tokenizer=tokenizer)
    for thing, words in (
        (
            "some/model",
            r"'some/model', a name; .*AutoModelForCausalLM\.from_pretrained\('some/model'\)",
        ),
        (tmp_path, "a name"),
        (pipe, rf"TextGenerationPipeline; pass its model: {kind.__name__}\(it\.model\)"),
        (tokenizer, "model is a .*; pass a model of transformers"),
        (None, "NoneType"),
    ):
        with pytest.raises(ConfigError, match=words):
            kind(thing, 1, 16)


def test_models_that_accelerate_keeps_elsewhere_are_refused(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model("llama")
    for offload in (
        accelerate.cpu_offload,
        lambda it: accelerate.disk_offload(it, tmp_path),
        lambda it: accelerate.dispatch_model(
            it, {"model": "cpu", "lm_head": "disk"}, offload_dir=tmp_path
        ),
    ):
        with pytest.raises(ConfigError, match=r"'[\w.]+'\) are not in memory.*offload"):
            PrefixCache(offload(copy.deepcopy(model)), "1MiB")
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(model.config).eval()
    with pytest.raises(ConfigError, match="never loaded"):
        PrefixCache(empty, "1MiB")


def test_a_model_with_hooks_of_accelerate_on_one_device_works(ids):
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.dispatch_model(own("llama"), {"": "cpu"}, force_hooks=True)
    assert model.hf_device_map
    cache = make_cache(model, block_size=4)
    for _ in range(2):
        same(model, cache, ids)
    assert cache.last.cached_tokens == 40

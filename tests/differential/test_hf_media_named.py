"""Media by name, in sessions and explanations, and what is refused about media."""

import hashlib

import pytest
import torch
import transformers
from hf_help import make_cache, tiny_model
from hf_media_help import (
    IMAGE,
    batch,
    equal,
    film,
    follow_up,
    media_model,
    picture,
    request,
    words,
)

from quire import MediaItem, ops
from quire.engines.hf import PrefixCache
from quire.engines.hf.modalities import MODALITIES
from quire.errors import ConfigError, MediaError, TokensError, UnsupportedModel
from quire.tensors.kinds import MEDIA_MODELS, check_cacheable

CAT, DOG = (hashlib.sha256(name).digest() for name in (b"cat", b"dog"))


@pytest.fixture
def model():
    return media_model("llava")


@pytest.fixture
def inputs():
    return request("llava", words(0, 6), picture("llava", 1), words(1, 10))


# -- by name -------------------------------------------------------------------------------


def test_a_name_of_the_callers_takes_the_place_of_a_hash(model, cache, inputs):
    def ask(digest):
        cache.generate(**inputs, media=[MediaItem(digest, 6, 4)], max_new_tokens=2)
        return cache.last.cached_tokens

    assert [ask(CAT), ask(DOG), ask(CAT)] == [0, 6, 19]
    cache.generate(**inputs, max_new_tokens=2)
    assert cache.last.cached_tokens == 6


def test_names_for_several_rows(model, cache):
    one, two = picture("llava", 1), picture("llava", 2)
    inputs = batch("llava", [(words(0, 6), one, words(1, 9)), (two, words(2, 12))])
    names = [[MediaItem(CAT, 6, 4)], [MediaItem(DOG, 0, 4)]]
    plain = model.generate(**inputs, max_new_tokens=5)
    for _ in range(2):
        assert torch.equal(cache.generate(**inputs, media=names, max_new_tokens=5), plain)
    assert cache.last.cached_tokens > 20


@pytest.mark.cases(4)
@pytest.mark.parametrize(
    ("media", "words"),
    [
        ([MediaItem(CAT, 5, 4)], r"\(0, 5, 4\).*\(0, 6, 4\)"),
        ([MediaItem(CAT, 6, 3)], "differ"),
        ([], "differ"),
        ([MediaItem(CAT, 6, 4), MediaItem(DOG, 8, 4)], "differ"),
        ([MediaItem(CAT, 90, 4)], "differ"),
        ([CAT], "list of quire.MediaItem"),
        (CAT, "pass a list of quire.MediaItem"),
        ([[MediaItem(CAT, 6, 4)], []], "list of such lists"),
    ],
)
def test_names_that_do_not_match_the_content_are_refused(cache, inputs, media, words):
    refused(cache, MediaError, words, **inputs, media=media)


def refused(cache, error, words, **arguments):
    """Demand the error, and that nothing has changed."""
    before, last = ops.snapshot(cache.manager), cache.last
    with pytest.raises(error, match=words):
        cache.generate(**arguments)
    assert ops.snapshot(cache.manager) == before
    assert cache.last == last


# -- explanations --------------------------------------------------------------------------


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "qwen2_audio"])
def test_an_explanation_knows_the_image(name):
    model = media_model(name)
    cache = make_cache(model, block_size=4)
    image = picture(name, 1)
    inputs = request(name, words(0, 6), image, words(1, 10))
    cache.generate(**inputs, max_new_tokens=2)
    before = ops.snapshot(cache.manager)
    assert cache.explain(**inputs).hit.num_tokens == 15 + image.num_tokens
    other = request(name, words(0, 6), picture(name, 2), words(1, 10))
    assert cache.explain(**other).hit.num_tokens == 6
    assert cache.explain(words(0, 6)).hit.num_tokens == 5
    assert ops.snapshot(cache.manager) == before


def test_an_explanation_by_name(cache, inputs):
    media = [MediaItem(CAT, 6, 4)]
    cache.generate(**inputs, media=media, max_new_tokens=2)
    assert cache.explain(inputs["input_ids"], media=media).hit.num_tokens == 19
    with pytest.raises(MediaError, match="token 6 of row 0 is a placeholder"):
        cache.explain(inputs["input_ids"])
    with pytest.raises(ConfigError, match="image_grid_thw"):
        cache.explain(**inputs, image_grid_thw=None)
    with pytest.raises(TokensError, match="2 rows"):
        cache.explain(words(0, 6).reshape(2, 3))


# -- sessions ------------------------------------------------------------------------------


def test_a_session_with_images_is_fed_what_is_left(model, cache, inputs):
    ids, media = inputs["input_ids"], [MediaItem(CAT, 6, 4)]
    with torch.no_grad():
        plain = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[:, -1]
    for reused in (0, 19):
        with cache.session(ids, media=media) as past, torch.no_grad():
            assert past.get_seq_length() == reused
            content = {} if reused else {"pixel_values": inputs["pixel_values"]}
            rest = ids[:, reused:]
            logits = model(input_ids=rest, past_key_values=past, use_cache=True, **content).logits
        torch.testing.assert_close(logits[:, -1], plain, atol=1e-4, rtol=1e-4)
    with cache.session(ids, media=[MediaItem(DOG, 6, 4)]) as past:
        assert past.get_seq_length() == 6
    assert cache.manager.num_active == 0


def test_kv_behind_an_image_without_a_name_is_not_kept(model, cache, inputs):
    text, image = words(5, 8)[None], picture("llava", 3)
    more = torch.cat([torch.full((1, 4), IMAGE), words(6, 8)[None]], dim=1)
    with cache.session(text) as past, torch.no_grad():
        model(input_ids=text, past_key_values=past, use_cache=True)
        model(input_ids=more, past_key_values=past, use_cache=True, **image.arguments)
    assert cache.manager.num_cached == 2
    ops.check(cache.manager)


def test_another_text_in_a_session_takes_along_only_the_images_it_shares(model, cache):
    one, two = picture("llava", 1), picture("llava", 2)
    inputs = request("llava", words(0, 4), one, words(1, 8), two, words(2, 4))
    ids, pixels = inputs["input_ids"], inputs["pixel_values"]
    other = torch.cat([ids[:, :12], words(9, 8)[None]], dim=1)
    media = [MediaItem(CAT, 4, 4), MediaItem(DOG, 16, 4)]
    with cache.session(ids, media=media) as past, torch.no_grad():
        model(input_ids=other, past_key_values=past, use_cache=True, pixel_values=pixels[:1])
    assert cache.explain(other, media=[MediaItem(CAT, 4, 4)]).hit.num_tokens == 19
    assert cache.explain(other, media=[MediaItem(DOG, 4, 4)]).hit.num_tokens == 4


def test_a_session_needs_a_name_for_each_image(cache, inputs):
    for media, reason in (
        ((), "is a placeholder"),
        ([MediaItem(CAT, 6, 3)], "is a placeholder"),
        ([MediaItem(CAT, 6, 400)], "end by the prompt's 20"),
    ):
        session = cache.session(inputs["input_ids"], media=media)
        with pytest.raises(MediaError, match=reason), session:
            pytest.fail("the block ran")
    assert cache.manager.num_active == 0


def test_a_session_of_a_model_that_keeps_positions_is_refused():
    cache = make_cache(media_model("qwen2_vl"), block_size=4)
    session = cache.session(words(0, 6)[None])
    with pytest.raises(ConfigError, match=r"positions.*cache\.generate"), session:
        pytest.fail("the block ran")


# -- refused -------------------------------------------------------------------------------

ONE, TWO = picture("llava", 1), picture("llava", 2)
PIXELS = torch.cat([ONE.arguments["pixel_values"], TWO.arguments["pixel_values"]])
GAP = request("llava", words(0, 3), ONE, words(1, 3), TWO, words(2, 5))
BAD_MEDIA = {
    "pixels without placeholders": (
        {"input_ids": words(0, 9)[None], "attention_mask": None},
        r"no image placeholder \(id 90\)",
    ),
    "placeholders without pixels": (
        {"pixel_values": None},
        r"8 image placeholders \(id 90\) from token 3 of row 0",
    ),
    "fewer images than placeholders": (
        {"pixel_values": PIXELS[:1]},
        "image 0 has 8 tokens.*no run of so many",
    ),
    "a number that does not divide": (
        {"pixel_values": torch.cat([PIXELS, PIXELS[:1]])},
        "3 items of .* 6 in all, but the prompt has 8",
    ),
    "pixels that are no tensor": ({"pixel_values": [1, 2]}, "return_tensors='pt'"),
    "no pixels": ({"pixel_values": PIXELS[:0]}, r"Tensor \[0, 3, 8, 8\]"),
}


@pytest.mark.cases(3)
@pytest.mark.parametrize("name", BAD_MEDIA)
def test_images_that_do_not_match_the_prompt_are_refused(cache, name):
    cache.generate(**GAP, max_new_tokens=2)
    arguments, words = BAD_MEDIA[name]
    refused(cache, MediaError, words, **{**GAP, **arguments})


GRID = request("qwen2_vl", words(0, 3), picture("qwen2_vl", 1), words(1, 6))
BAD_GRIDS = {
    "no grid": ({"image_grid_thw": None}, "image_grid_thw is None"),
    "a grid of another shape": ({"image_grid_thw": torch.ones(2, 2)}, r"\[items, 3\]"),
    "a grid of more patches": ({"image_grid_thw": torch.tensor([[1, 4, 8]])}, "32 patches"),
    "a grid alone": ({"pixel_values": None, "input_ids": words(0, 9)[None], "attention_mask": None},
                     "no pixel_values, but image_grid_thw given"),
    "more placeholders": ({"pixel_values": torch.randn(32, 12),
                           "image_grid_thw": torch.tensor([[1, 4, 8]])},
                          r"1 items of \[8\] tokens, 8 in all, but the prompt has 4"),
    "no type ids": ({"mm_token_type_ids": None}, "are missing"),
    "other type ids": ({"mm_token_type_ids": torch.zeros_like(GRID["input_ids"])}, "do not match"),
}  # fmt: skip


@pytest.mark.cases(4)
@pytest.mark.parametrize("name", BAD_GRIDS)
def test_grids_that_do_not_match_are_refused(name):
    cache = make_cache(media_model("qwen2_vl"), block_size=4)
    cache.generate(**GRID, max_new_tokens=2)
    arguments, words = BAD_GRIDS[name]
    refused(cache, MediaError, words, **{**GRID, **arguments})


def test_a_video_takes_one_speed():
    cache = make_cache(media_model("qwen2_5_vl"), block_size=4)
    clip = film("qwen2_5_vl", 1, second_per_grid_ts=torch.tensor([1.0, 2.0]))
    inputs = request("qwen2_5_vl", words(0, 3), clip, words(1, 4))
    refused(cache, MediaError, "second_per_grid_ts has 2 entries for 1", **inputs)


def test_runs_of_audio_and_recordings_are_counted():
    cache = make_cache(media_model("qwen2_audio"), block_size=4)
    inputs = request("qwen2_audio", words(0, 3), picture("qwen2_audio", 1), words(1, 4))
    for name in ("input_features", "feature_attention_mask"):
        inputs[name] = inputs[name].repeat(2, *[1] * (inputs[name].ndim - 1))
    refused(cache, MediaError, "2 items, but the prompt has 1 runs of audio", **inputs)


def test_a_prompt_that_ends_in_an_image_cannot_have_beams(cache):
    inputs = request("llava", words(0, 3), ONE)
    refused(cache, ConfigError, "let a token of text follow", **inputs, num_beams=2)


def test_media_for_a_model_without_any_are_refused():
    model = tiny_model("llama")
    cache = make_cache(model, block_size=4)
    ids = words(0, 9)[None]
    refused(cache, MediaError, "differ", input_ids=ids, media=[MediaItem(CAT, 2, 3)])


@pytest.mark.parametrize("num_images", [1, 2])
def test_a_call_that_the_model_refuses_leaves_the_cache_usable(model, cache, inputs, num_images):
    """The model alone knows the number of a picture's features: here 4, for 8 placeholders."""
    ids = torch.cat([words(0, 3), torch.full((8,), IMAGE), words(1, 5)])[None]
    pixels = PIXELS[:1] if num_images == 1 else PIXELS.repeat(2, 1, 1, 1)
    with pytest.raises(ValueError, match="do not match"):
        cache.generate(ids, pixel_values=pixels, max_new_tokens=2)
    assert cache.manager.num_active == cache.manager.num_cached == 0
    equal(model, cache, inputs)


def test_a_placeholder_that_the_model_makes_names_nothing(cache, inputs):
    output = cache.generate(
        **inputs, max_new_tokens=12, prefix_allowed_tokens_fn=lambda _row, _ids: [IMAGE]
    )
    assert (output[:, 20:] == IMAGE).all()
    assert cache.manager.num_cached == 5
    ops.check(cache.manager)
    follow = follow_up(inputs, output, words(3, 3), name="llava")
    refused(cache, MediaError, "image 0 has 16 tokens", **follow)


# -- models --------------------------------------------------------------------------------


def test_each_model_with_media_is_one_that_can_be_cached():
    assert set(MODALITIES) == MEDIA_MODELS


REFUSED = {
    "mllama": "cross-attention layers keep K and V of images",
    "paligemma": "its prompt is not causal",
    "blip-2": "",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_composite_models_are_refused_by_name_with_the_reason(model_type):
    with pytest.raises(
        UnsupportedModel, match=f"{model_type} is a composite.*{REFUSED[model_type]}"
    ):
        check_cacheable(transformers.CONFIG_MAPPING[model_type]())


def test_a_model_that_was_used_before_is_probed_the_same():
    model = media_model("qwen2_vl")
    inputs = request("qwen2_vl", picture("qwen2_vl", 1, (16, 16)), words(0, 4))
    model.generate(**inputs, max_new_tokens=2)
    assert int(model.model.rope_deltas) != 0
    PrefixCache(model, "1MiB")

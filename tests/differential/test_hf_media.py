"""Images, video and audio through `PrefixCache`: what is the same is reused, nothing else is."""

import zlib

import pytest
import torch
from hf_help import make_cache
from hf_media_help import (
    batch,
    equal,
    film,
    first_logits,
    follow_up,
    media_model,
    picture,
    request,
    words,
)
from hf_media_models import MODELS, QWEN, WINDOWED

from quire import ops
from turns import few


def pytest_generate_tests(metafunc):
    """Some of the models, which take turns from test to test; the long run has all of them in each."""
    given = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "name" in metafunc.fixturenames and "name" not in given:
        turn = zlib.crc32(metafunc.function.__name__.encode()) % 8
        metafunc.parametrize("name", few(MODELS, *MODELS[turn::8]))


@pytest.fixture
def model(name):
    return media_model(name)


def reused(cache):
    return cache.last.cached_tokens


# -- what shares and what does not ---------------------------------------------------------


@pytest.mark.cases(2)
def test_the_same_image_and_text_are_reused(name, model, cache):
    inputs = request(name, words(0, 9), picture(name, 1), words(1, 12))
    equal(model, cache, inputs)
    assert reused(cache) == 0
    equal(model, cache, inputs)
    assert reused(cache) >= inputs["input_ids"].shape[1] - 4


@pytest.mark.cases(2)
def test_another_image_behind_equal_placeholders_is_not_reused(name, model, cache):
    before, after = words(2, 10), words(22, 12)
    requests = [request(name, before, picture(name, seed), after) for seed in (1, 2)]
    for inputs in requests:
        equal(model, cache, inputs)
    assert reused(cache) == before.numel()
    one, two = (first_logits(model, inputs) for inputs in requests)
    assert (one - two).abs().max() > 0.05  # a mistake would show


@pytest.mark.cases(2)
def test_the_same_image_with_another_question_is_reused(name, model, cache):
    image = picture(name, 1)
    equal(model, cache, request(name, words(0, 9), image, words(1, 12)))
    equal(model, cache, request(name, words(0, 9), image, words(2, 12)))
    assert reused(cache) == 9 + image.num_tokens


@pytest.mark.cases(1)
def test_images_in_the_history_of_a_conversation(name, model, cache):
    inputs = request(name, words(0, 5), picture(name, 1), words(1, 11))
    done = 0
    for turn in range(3):
        output = equal(model, cache, inputs)
        assert reused(cache) >= done - 5
        done = output.shape[1]
        inputs = follow_up(inputs, output, words(5 + turn, 6), name=name)


@pytest.mark.cases(2)
def test_an_image_in_the_second_turn_only(name, model, cache):
    inputs = request(name, words(0, 21))
    output = equal(model, cache, inputs)
    inputs = follow_up(inputs, output, words(2, 3), picture(name, 1), words(3, 7), name=name)
    equal(model, cache, inputs)
    assert reused(cache) >= 21
    equal(model, cache, inputs)
    assert reused(cache) >= inputs["input_ids"].shape[1] - 4


@pytest.mark.cases(1)
def test_two_images_of_which_the_second_differs(name, model, cache):
    one, two, three = (picture(name, seed) for seed in (1, 2, 3))
    gap = words(1, 6)
    equal(model, cache, request(name, words(0, 5), one, gap, two, words(2, 9)))
    equal(model, cache, request(name, words(0, 5), one, gap, three, words(2, 9)))
    assert reused(cache) == 5 + one.num_tokens + 6
    equal(model, cache, request(name, words(0, 5), two, gap, one, words(2, 9)))
    assert reused(cache) == 5
    equal(model, cache, request(name, words(0, 5), one, gap, two, words(4, 9)))
    assert reused(cache) >= 5 + one.num_tokens + 6 + two.num_tokens


@pytest.mark.cases(1)
def test_text_without_media_is_reused_beside_media(name, model, cache):
    first = request(name, words(0, 30))
    equal(model, cache, request(name, words(3, 4), picture(name, 1), words(4, 4)))
    equal(model, cache, first)
    equal(model, cache, first)
    assert reused(cache) == 29


# -- what is fed, and where ----------------------------------------------------------------


@pytest.mark.cases(2)
def test_media_in_the_reused_prefix_are_not_encoded_again(name, model, cache):
    encoded = []
    tower = model.base_model
    tower = next(
        getattr(tower, part)
        for part in ("visual", "vision_tower", "vision_model", "audio_tower")
        if hasattr(tower, part)
    )

    def note(_module, args, kwargs):
        encoded.append(len((*args, *kwargs.values())[0]))

    hook = tower.register_forward_pre_hook(note, with_kwargs=True)
    try:
        one, two = picture(name, 1), picture(name, 2)
        first = request(name, words(0, 5), one, words(1, 9))
        output = cache.generate(**first, max_new_tokens=2)
        second = follow_up(first, output, two, words(2, 4), name=name)
        cache.generate(**second, max_new_tokens=2)
        cache.generate(**second, max_new_tokens=2)
    finally:
        hook.remove()
    assert encoded == [encoded[0]] * 2, "one picture each: a tower may read one in several pieces"


@pytest.mark.cases(1)
def test_reuse_is_cut_back_to_where_an_image_begins(name, model):
    cache = make_cache(model, num_blocks=40, block_size=4)
    inputs = request(name, words(0, 5), picture(name, 1), words(1, 7))
    equal(model, cache, inputs, max_new_tokens=1)
    assert cache.manager.num_cached >= 4
    ops.reclaim(cache.manager, cache.manager.num_cached - 2)
    assert cache.manager.num_cached == 2
    equal(model, cache, inputs)
    assert reused(cache) == 5
    equal(model, cache, inputs)
    assert reused(cache) >= inputs["input_ids"].shape[1] - 4


def test_a_pool_too_small_for_the_image(name, model):
    cache = make_cache(model, num_blocks=2, block_size=4)
    inputs = request(name, words(0, 5), picture(name, 1), words(1, 7))
    # A window needs a block more than it sees, into which it grows.
    for cached in (0, 3 if name in WINDOWED else 5):
        equal(model, cache, inputs)
        assert reused(cache) == cached


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", QWEN)
def test_the_same_patches_in_another_grid_are_another_image(name, model, cache):
    wide, high = picture(name, 1, (4, 8)), picture(name, 1, (8, 4))
    assert torch.equal(wide.arguments["pixel_values"], high.arguments["pixel_values"])
    for image in (wide, high):
        equal(model, cache, request(name, words(0, 6), image, words(1, 9)))
    assert reused(cache) == 6


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", QWEN)
def test_positions_behind_an_image_are_those_of_the_whole_prompt(name, model, cache):
    """A large image: text behind it stands at other positions than its columns."""
    large = picture(name, 1, (16, 16))
    inputs = request(name, words(0, 5), large, words(1, 9))
    output = equal(model, cache, inputs)
    equal(model, cache, request(name, words(5, 30)))  # leaves another offset in the model
    follow = follow_up(inputs, output, words(2, 6), picture(name, 2), words(3, 4), name=name)
    equal(model, cache, request(name, words(0, 5), picture(name, 3), words(4, 4)))
    equal(model, cache, follow)
    assert reused(cache) >= output.shape[1] - 4


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", QWEN)
def test_videos_and_images_together(name, model, cache):
    clip, image = film(name, 1), picture(name, 1)
    parts = (words(0, 5), clip, words(1, 3), image, words(2, 6))
    equal(model, cache, request(name, *parts))
    equal(model, cache, request(name, *parts[:4], words(3, 9)))
    assert reused(cache) == 8 + clip.num_tokens + image.num_tokens
    equal(model, cache, request(name, words(0, 5), film(name, 2), *parts[2:]))
    assert reused(cache) == 5


def test_the_speed_of_a_video_is_part_of_its_name():
    name = "qwen2_5_vl"
    model = media_model(name)
    cache = make_cache(model, block_size=4)
    for seconds in (1.0, 3.0, 1.0):
        clip = film(name, 1, second_per_grid_ts=torch.tensor([seconds]))
        inputs = request(name, words(0, 5), clip, words(1, 6))
        equal(model, cache, inputs)
    assert reused(cache) >= inputs["input_ids"].shape[1] - 4
    assert len(cache.manager.kernel.tree.media) == 2


@pytest.mark.cases(2)
def test_an_image_at_the_very_start_and_at_the_very_end(name, model, cache):
    one, two = picture(name, 1), picture(name, 2)
    inputs = request(name, one, words(0, 7), two)
    equal(model, cache, inputs)
    equal(model, cache, inputs)
    assert reused(cache) == one.num_tokens + 7


@pytest.mark.cases(1)
def test_a_batch_with_images_in_some_rows(name, model, cache):
    one, two = picture(name, 1), picture(name, 2)
    rows = [
        (words(0, 5), one, words(1, 9)),
        (words(2, 17),),
        (words(3, 2), two, words(4, 3), one, words(5, 5)),
    ]
    inputs = batch(name, rows)
    equal(model, cache, inputs)
    equal(model, cache, inputs)
    assert reused(cache) > 0
    longer = [(*row, words(6, 3 + index)) for index, row in enumerate(rows)]
    equal(model, cache, batch(name, longer))
    assert reused(cache) > 0
    equal(model, cache, batch(name, rows[:1]))
    assert reused(cache) >= 5 + one.num_tokens + 4


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "arguments",
    [
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 3},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=["return sequences", "beams", "prompt lookup"],
)
def test_media_are_reused_with_every_way_of_generating(name, model, cache, arguments):
    image = picture(name, 1)
    inputs = request(name, words(0, 5), image, words(1, 9))
    for _ in range(2):
        made = []
        for generate in (model.generate, cache.generate):
            torch.manual_seed(3)
            made.append(generate(**inputs, **arguments, suppress_tokens=[90, 91], max_new_tokens=6))
        assert torch.equal(*made)
    ops.check(cache.manager)
    equal(model, cache, inputs)
    assert reused(cache) >= inputs["input_ids"].shape[1] - 4

"""Every class of models with media: layouts of a conversation, tiers, and boundaries inside an image."""

import itertools

import numpy as np
import pytest
import torch
from hf_help import make_cache
from hf_media_help import (
    batch,
    equal,
    film,
    follow_up,
    picture,
    request,
    sizes_of,
    words,
)
from hf_media_models import IMAGE, MODELS, SIZED, TILED, media_model

from quire import MediaItem
from quire.core import Watcher
from quire.errors import ConfigError, MediaError
from quire.tiers.disk import Disk
from quire.tiers.host import Host
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack
from turns import few

NAMED = ("smolvlm", "gemma3", "llava_next", "mistral3", "qwen3_vl", "llama4")
OPEN = StackSettings(gate=False)


@pytest.fixture
def model(name):
    return media_model(name)


halves = itertools.cycle([NAMED[::2], NAMED[1::2]])


def every(*names):
    """The classes that share a test: by default half of those whose images enter in ways of their own, by turns."""
    return pytest.mark.parametrize("name", few(MODELS, *(names or next(halves))))


def reused(cache):
    return cache.last.cached_tokens


@pytest.mark.cases(2)
@every(*MODELS[::2])
def test_layouts_of_images_and_text(name, model):
    """Prompts share nothing behind a difference, and equal ones are hits."""
    cache = make_cache(model, num_blocks=300, block_size=4)
    head, middle, tail = words(0, 7), words(1, 3), words(2, 6)
    one, two = picture(name, 1), picture(name, 2)
    assert torch.equal(one.tokens, two.tokens)
    equal(model, cache, request(name, head, tail))
    equal(model, cache, request(name, head, one, tail))
    assert 4 <= reused(cache) <= 7, "text before an image"
    equal(model, cache, request(name, head, two, tail))
    assert 4 <= reused(cache) <= 7, "another image behind equal placeholders"
    equal(model, cache, request(name, head, two, middle, one, tail))
    assert 7 <= reused(cache) <= 7 + two.num_tokens
    equal(model, cache, request(name, head, one, middle, one, tail))
    assert 7 <= reused(cache) <= 7 + one.num_tokens, "the same image twice"
    inputs = request(name, head, one, middle, one, tail)
    output = equal(model, cache, inputs)
    assert reused(cache) >= inputs["input_ids"].shape[1] - 4
    inputs = follow_up(inputs, output, words(3, 5), two, words(4, 4), name=name)
    equal(model, cache, inputs)
    assert reused(cache) >= output.shape[1] - 5, "the second turn"


@pytest.mark.cases(1)
@every()
def test_images_of_different_sizes_in_one_request(name, model):
    cache = make_cache(model, num_blocks=300, block_size=4)
    pieces = [words(0, 5)]
    for seed, size in enumerate(sizes_of(name)):
        pieces += [picture(name, seed, size), words(40 + seed, 4)]
    for _ in range(2):
        for count in range(len(pieces), 1, -2):
            equal(model, cache, request(name, *pieces[:count]))
    assert reused(cache) >= 5
    equal(model, cache, request(name, *pieces[2:]))
    assert reused(cache) == 0


@pytest.mark.cases(1)
@every()
def test_rows_with_and_without_images(name, model):
    """Rows of a batch go on together, where none of them is inside an image."""
    cache = make_cache(model, num_blocks=300, block_size=4)
    one, two = picture(name, 1), picture(name, 2, sizes_of(name)[-1])
    rows = [
        (words(0, 6), one, words(1, 9)),
        (words(2, 27),),
        (words(3, 2), two, words(4, 3), one, words(5, 5)),
    ]
    for alone in rows[::2]:
        equal(model, cache, batch(name, [alone]))
    equal(model, cache, batch(name, rows))
    equal(model, cache, batch(name, rows))
    assert reused(cache) > 0
    longer = [(*row, words(6, 3 + index)) for index, row in enumerate(rows)]
    equal(model, cache, batch(name, [*longer, (words(9, 11), two)]))


@pytest.mark.cases(1)
@pytest.mark.parametrize("step", few([1, 4], 4))
@every("gemma3", "llava+window", "smolvlm")
def test_a_hit_ends_at_no_boundary_inside_an_image(name, model, step):
    """As many tokens are stored as the boundary says: those of an image that is not whole are computed again."""
    image = picture(name, 1)
    inputs = request(name, words(0, 5), image, words(1, 8))
    places = image.tokens == IMAGE
    last = 5 + image.num_tokens + 1
    for stored in sorted({*range(4, last, step), 5, 6, last - 2, last - 1, last}):
        cache = make_cache(model, num_blocks=100, block_size=1)
        equal(model, cache, inputs, store_until=stored, max_new_tokens=1)
        equal(model, cache, inputs, max_new_tokens=2)
        at = stored - 5
        inside = 0 < at < image.num_tokens and places[at - 1] and places[at]
        assert reused(cache) == stored if not inside else 5 <= reused(cache) < stored
        assert cache.explain(**inputs).hit.num_tokens == inputs["input_ids"].shape[1] - 1


@pytest.mark.cases(1)
@every()
def test_images_come_back_from_tiers_and_after_a_restart(name, model, tmp_path):
    one, two = picture(name, 1), picture(name, 2)
    asked = [request(name, words(1, 21), image, words(2, 20)) for image in (one, two)]
    with TierStack([Host("16MiB"), Disk(tmp_path, "16MiB")], OPEN) as tiers:
        for inputs in asked:
            equal(model, make_cache(model, block_size=4, tiers=tiers), inputs)
        again = make_cache(model, block_size=4, tiers=tiers)
        for inputs in (*asked, *reversed(asked)):
            equal(model, again, inputs)
        assert reused(again) >= 21 + one.num_tokens
    with TierStack([Disk(tmp_path, "16MiB")], OPEN) as tiers:
        again = make_cache(model, block_size=4, tiers=tiers)
        for inputs in asked:
            equal(model, again, inputs)
            assert reused(again) >= 21 + one.num_tokens
            assert sum(again.last.tier_tokens.values()) > 0
        equal(model, again, request(name, words(1, 21), picture(name, 3), words(2, 20)))
        assert reused(again) <= 21


# -- content at the time of the call -------------------------------------------------------


@pytest.mark.cases(1)
@every()
def test_an_image_that_changed_in_place_is_another_image(name, model):
    cache = make_cache(model, block_size=4)
    inputs = request(name, words(0, 9), picture(name, 1), words(1, 9))
    equal(model, cache, inputs)
    inputs["pixel_values"][-1].mul_(-2.0)
    equal(model, cache, inputs)
    assert reused(cache) <= 9
    equal(model, cache, inputs)
    assert reused(cache) > 9


@pytest.mark.cases(2)
@every()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_images_in_half_precision(name, model, dtype):
    cache = make_cache(model, block_size=4)
    inputs = request(name, words(0, 9), picture(name, 1), words(1, 9))
    inputs["pixel_values"] = inputs["pixel_values"].to(dtype)
    try:
        model.generate(**inputs, max_new_tokens=1)
    except RuntimeError:
        pytest.skip(f"{name} itself takes images of its own dtype only")
    equal(model, cache, inputs)
    equal(model, cache, inputs)
    assert reused(cache) > 9


@pytest.mark.cases(2)
@every("llava_next", *SIZED)
def test_an_image_is_the_same_whatever_stands_beside_it(name, model):
    """The padding to the largest image of a request is no part of an image."""
    cache = make_cache(model, num_blocks=300, block_size=4)
    small, large = picture(name, 1, sizes_of(name)[1]), picture(name, 2, sizes_of(name)[2])
    equal(model, cache, request(name, small, words(1, 9)))
    equal(model, cache, request(name, small, words(1, 9), large, words(2, 5)))
    assert reused(cache) >= small.num_tokens + 8


@pytest.mark.cases(2)
@every(*TILED)
def test_tiles_of_zeros_are_padding(name, model):
    cache = make_cache(model, block_size=4)
    inputs = request(name, words(0, 5), picture(name, 1), words(1, 9))
    padded = dict(inputs)
    for argument in ("pixel_values", "pixel_attention_mask"):
        padded[argument] = torch.cat([inputs[argument], torch.zeros_like(inputs[argument])], dim=1)
    equal(model, cache, inputs)
    equal(model, cache, padded)
    assert reused(cache) >= inputs["input_ids"].shape[1] - 4


@pytest.mark.cases(1)
@every("qwen3_vl", "qwen3_vl_moe")
def test_the_frames_of_a_video_are_one_item(name, model):
    cache = make_cache(model, block_size=4)
    for seed in (1, 2, 1):
        clip = film(name, seed, (3, 4, 4))
        inputs = request(name, words(0, 5), clip, words(1, 6), picture(name, 1), words(2, 4))
        equal(model, cache, inputs)
        equal(model, cache, request(name, words(0, 5), clip, words(1, 6)))
    assert reused(cache) >= 5 + clip.num_tokens
    one_frame_differs = film(name, 1, (3, 4, 4))
    one_frame_differs.arguments["pixel_values_videos"][-1] += 1.0
    equal(model, cache, request(name, words(0, 5), one_frame_differs, words(1, 6)))
    assert reused(cache) == 5


# -- images whose tokens see each other ----------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3"])
def test_images_that_touch_are_one_item(name, model):
    """Without text between them each sees the other: the first is another one beside another second."""
    cache = make_cache(model, num_blocks=300, block_size=1)
    one, two, three = (picture(name, seed) for seed in (1, 2, 3))
    equal(model, cache, request(name, words(0, 5), one, two, words(1, 4)))
    equal(model, cache, request(name, words(0, 5), one, three, words(1, 4)))
    assert reused(cache) == 5
    equal(model, cache, request(name, words(0, 5), one, words(1, 4)))
    assert reused(cache) == 5
    equal(model, cache, request(name, words(0, 5), one, two, words(2, 4)))
    assert reused(cache) == 5 + 2 * one.num_tokens


@pytest.mark.parametrize("name", ["gemma3"])
def test_type_ids_say_where_images_are(name, model):
    cache = make_cache(model, block_size=4)
    inputs = request(name, words(0, 5), picture(name, 1), words(1, 9))
    for wrong in (None, torch.zeros_like(inputs["input_ids"])):
        with pytest.raises(MediaError, match=r"token_type_ids (are missing|do not match).*image 1"):
            cache.generate(**{**inputs, "token_type_ids": wrong}, max_new_tokens=2)
    text = {"input_ids": words(0, 9)[None], "token_type_ids": torch.zeros(1, 9, dtype=torch.long)}
    equal(model, cache, text)
    equal(model, cache, {"input_ids": text["input_ids"]})
    assert reused(cache) == 8


@pytest.mark.parametrize("name", ["gemma3"])
def test_a_chunk_of_prefill_that_ends_inside_an_image_is_refused(name, model):
    cache = make_cache(model, block_size=4)
    inputs = request(name, words(0, 5), picture(name, 1), words(1, 9))
    with pytest.raises(ConfigError, match="prefill_chunk_size=4 with images: gemma3"):
        cache.generate(**inputs, max_new_tokens=2, prefill_chunk_size=4)
    media = [MediaItem(b"\1" * 32, 5, picture(name, 1).num_tokens)]
    with (
        pytest.raises(ConfigError, match="a session with images: gemma3"),
        cache.session(inputs["input_ids"], media=media),
    ):
        pytest.fail("the block ran")
    with cache.session(words(0, 9)[None]) as past, torch.no_grad():
        ones = torch.ones(1, 9, dtype=torch.long)
        model(words(0, 9)[None], past_key_values=past, use_cache=True, token_type_ids=ones)
    assert cache.manager.num_cached == 0
    assert "token_type_ids" in cache.last.unknown_reason
    equal(model, cache, inputs)


class Keys(Watcher):
    """The token ids, and numbers of media, of all that was stored."""

    def __init__(self):
        self.stored_ids = set()

    def stored(self, seq, node, num_blocks):
        self.stored_ids |= set(np.frombuffer(bytes(node.key), np.int32).tolist())


@pytest.mark.parametrize("name", ["llava+window"])
@pytest.mark.parametrize("num_blocks", [4, 5])
def test_no_placeholder_is_stored_without_its_content(name, model, num_blocks):
    """A window makes room behind the longest head that the pool holds, where images have no names."""
    keys = Keys()
    cache = make_cache(model, num_blocks=num_blocks, block_size=4, watchers=[keys])
    inputs = request(name, words(0, 14), picture(name, 1), words(1, 9))
    for _ in range(2):
        equal(model, cache, inputs)
    assert keys.stored_ids
    assert IMAGE not in keys.stored_ids
    assert reused(cache) >= 11

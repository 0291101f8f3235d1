"""Conversations with images, drawn: class, layout, where prompts part, block size, pool, rows."""

import pytest
from hf_help import make_cache
from hf_media_help import Content, batch, equal, picture, sizes_of, words
from hf_media_models import MODELS, media_model
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from quire import ops
from turns import drawn

TALKS = settings(deadline=None, suppress_health_check=list(HealthCheck))
LONG = ("gemma3", "llava+window", "qwen2_vl+window", "llama4")
"""Classes whose hits must not end inside an image, drawn as often as all others together."""


@st.composite
def pieces(draw, name, earlier):
    """A prompt: the head of an earlier one, cut at any place outside an image, then text and images."""
    kept = []
    if earlier and draw(st.booleans()):
        kept = list(draw(st.sampled_from(earlier)))
        kept = kept[: draw(st.integers(1, len(kept)))]
        if not isinstance(kept[-1], Content):
            kept[-1] = kept[-1][: draw(st.integers(1, len(kept[-1])))]
    for _ in range(draw(st.integers(0, 2))):
        size = draw(st.sampled_from(sizes_of(name)))
        if not kept or isinstance(kept[-1], Content) or draw(st.booleans()):
            kept.append(words(draw(st.integers(0, 2)), draw(st.integers(1, 6))))
        kept.append(picture(name, draw(st.integers(1, 2)), size))
    kept.append(words(draw(st.integers(0, 2)), draw(st.integers(1, 12))))
    return kept


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", LONG)
def test_rows_that_end_apart_before_their_images_are_brought_to_one_column(name):
    """Only what of a row's content lies before that column is fed to it alone."""
    model = media_model(name)
    cache = make_cache(model, num_blocks=60, block_size=1)
    equal(model, cache, batch(name, [[words(0, 3)]]), max_new_tokens=2)
    first, second = picture(name, 1), picture(name, 2)
    rows = [
        [words(0, 3), first, words(1, 2)],
        [words(0, 3), words(1, 4), second, words(2, 1), first, words(1, 1)],
    ]
    equal(model, cache, batch(name, rows), max_new_tokens=2)
    ops.check(cache.manager)


@pytest.mark.ci
@drawn(
    8,
    300,
    data=st.data(),
    name=st.sampled_from(MODELS) | st.sampled_from(LONG),
    block_size=st.sampled_from([1, 2, 3, 4, 5, 7, 16]),
    num_blocks=st.sampled_from([6, 15, 60, 400]),
    within=TALKS,
)
def test_drawn_conversations_with_images_have_the_models_tokens(data, name, block_size, num_blocks):
    model = media_model(name)
    cache = make_cache(model, num_blocks=num_blocks, block_size=block_size)
    talks = []
    for _ in range(data.draw(st.integers(2, 4), "requests")):
        rows = [
            data.draw(pieces(name, talks)) for _ in range(data.draw(st.sampled_from([1, 1, 2])))
        ]
        stored = data.draw(st.none() | st.integers(0, 40), "stored at most")
        equal(model, cache, batch(name, rows), store_until=stored, max_new_tokens=2)
        talks += rows
    ops.check(cache.manager)

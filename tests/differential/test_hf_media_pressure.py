"""Random conversations over images in a pool that is too small for them all."""

import random

import pytest
from hf_help import make_cache
from hf_media_help import (
    Content,
    equal,
    media_model,
    picture,
    request,
    words,
)

from quire import ops
from turns import by_turns, few


def cut(pieces, rng):
    """A head of a conversation: it ends after a piece, or inside a text."""
    head = pieces[: rng.randint(1, len(pieces))]
    if not isinstance(head[-1], Content):
        head[-1] = head[-1][: rng.randint(1, len(head[-1]))]
    return head


@pytest.mark.cases(1)
@pytest.mark.parametrize("num_steps", few([15, 30], 15))
@pytest.mark.parametrize(("name", "num_blocks"), by_turns(["llava", "qwen2_vl"], [12, 40]))
def test_turns_branches_and_truncations_under_pressure(name, num_blocks, num_steps):
    model = media_model(name)
    cache = make_cache(model, num_blocks=num_blocks, block_size=4)
    rng = random.Random(num_blocks)
    talks = [[words(0, 9)]]
    reused = 0
    for step in range(num_steps):
        pieces = cut(list(rng.choice(talks)), rng) if rng.random() < 0.7 else [words(step, 7)]
        if rng.random() < 0.5:
            pieces += [words(4, 2), picture(name, rng.randint(1, 3))]  # images never touch
        pieces.append(words(rng.randint(0, 3), rng.randint(2, 12)))
        talks = [*talks[-5:], pieces]
        equal(model, cache, request(name, *pieces), max_new_tokens=4)
        reused += cache.last.cached_tokens
    assert reused > 0
    assert cache.stats.evicted_blocks > 0
    ops.check(cache.manager)

"""Sub-block reuse below a node with many children, while children come and go."""

import random

import pytest
from core_help import serve

from quire import ops
from quire.core import CacheManager
from quire.ops import check
from turns import by_turns

SIZE = 8
TURNS, LONG = 300, 1500
"""So many prompts come by default, and in the long run."""


def shared(one, other):
    """Return how many leading tokens of a list another one, no longer, has too."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(other))


@pytest.mark.cases(1)
@pytest.mark.parametrize(("spread", "head"), by_turns([2, 3, 40], [[], [1] * SIZE]))
@pytest.mark.parametrize("turns", [TURNS, pytest.param(LONG, marks=pytest.mark.long)])
def test_the_child_that_shares_most_is_found_whatever_has_gone(head, spread, turns):
    """`spread` is how many values a token has: few make long shared heads."""
    draw = random.Random(spread)
    manager = CacheManager(600, SIZE)
    stored = []
    for turn in range(turns):
        tail = [draw.randrange(spread) for _ in range(SIZE)]
        most = max((shared(each, tail[:-1]) for each in stored), default=0)
        assert manager.probe(head + tail).num_tokens == (len(head) + most if stored else 0)
        serve(manager, head + tail)
        if tail not in stored:
            stored.append(tail)
        while len(stored) > 40 or (turn % 50 == 49 and len(stored) > 1):
            ops.invalidate(manager, head + stored.pop(draw.randrange(len(stored))))
        check(manager)

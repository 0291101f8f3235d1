"""Which of many parameters the default run has; the long run has them all."""

from itertools import product

import pytest


def by_turns(first, *others, default=None):
    """All combinations for `parametrize`: by default each of the first with one of every other, which take turns.

    `default`: those of the first that the default run has; None: all

        by_turns("abcd", [1, 2], [True, False])  # a 1 True, b 2 True, c 1 False, d 2 False; the long run has all
    """
    values = [list(first), *map(list, others)]
    chosen = []
    for at, value in enumerate(values[0]):
        if default is None or value in default:
            turn, places = len(chosen), [at]
            for other in values[1:]:
                turn, place = divmod(turn, len(other))
                places.append(place)
            chosen.append(tuple(places))
    return [
        pytest.param(
            *(of[at] for of, at in zip(values, places, strict=True)),
            marks=[] if places in chosen else pytest.mark.long,
        )
        for places in product(*(range(len(each)) for each in values))
    ]


def few(values, *chosen):
    """All values for `parametrize`: by default those that are chosen."""
    assert {*chosen} <= {*values}, chosen
    return by_turns(values, default=chosen)

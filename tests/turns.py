"""The parameters and examples of the default run, out of many; the long run has them all."""

import functools
import inspect
from itertools import product

import pytest
from hypothesis import given, settings


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


def few_rows(rows, *chosen):
    """All rows for `parametrize` with several names: by default those that are chosen."""
    assert {*chosen} <= {*rows}, chosen
    return [pytest.param(*row, marks=[] if row in chosen else pytest.mark.long) for row in rows]


def drawn(default, long, *strategies, within=None, **named):
    """`given` with so many examples: by default `default`; the long run has `long`.

    `within`: other settings
    """

    def of(holds):
        given_some = {
            number: settings(within, max_examples=number)(given(*strategies, **named)(holds))
            for number in (default, long)
        }
        fixtures = inspect.signature(given_some[default]).parameters.values()

        @functools.wraps(holds)
        def test(**lent):
            given_some[lent.pop("examples")](**lent)

        examples = inspect.Parameter("examples", inspect.Parameter.KEYWORD_ONLY)
        kept = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in fixtures]
        test.__signature__ = inspect.Signature([*kept, examples])
        del test.__wrapped__
        vars(test).pop("hypothesis_explicit_examples", None)  # both of `given_some` have them
        return pytest.mark.parametrize("examples", few([default, long], default))(test)

    return of


def lived(machine, default, long, **within):
    """Tests of a state machine: one of the default run, one of the long run, with so many examples; `within`: other settings."""
    few, many = (
        type(
            machine.__name__,
            (machine.TestCase,),
            {"settings": settings(max_examples=each, **within)},
        )
        for each in (default, long)
    )
    return few, pytest.mark.long(many)

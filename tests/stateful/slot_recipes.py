"""Prompts for the random slot tests: mostly an earlier text, cut and continued."""

import random

from hypothesis import strategies as st

from quire.core import MediaItem, Scope

SCOPES = (None, Scope(salt="x"), Scope(lora="x"))
PICTURES = ((b"a" * 32, 2), (b"b" * 32, 3))


def recipe_of(number):
    """A recipe: which earlier text (None: a new one) and how much of its end to leave out, what
    follows, which picture where, and the scope (0: that of the earlier text).

    Drawn evenly: Hypothesis prefers small and empty values, which rarely meet each other.
    """
    draw = random.Random(number)
    tail = [(draw.randrange(3), draw.randint(1, 5)) for _ in range(draw.randint(1, 2))]
    earlier = draw.choice([None, *range(8)])
    cut = draw.choice([0, 0, *range(10)])
    return (
        earlier,
        cut,
        tail,
        draw.choice([0, 0, 0, 1, 2]),
        draw.randrange(8),
        draw.choice([0, 0, 0, 0, 1, 2]),
    )


prompts = st.integers(0, 2**32 - 1).map(recipe_of)


def build(recipe, history, longest):
    """Return tokens, scope and media of a recipe; `history` are earlier texts as such triples."""
    earlier, cut, tail, picture, place, scope = recipe
    tokens, media = [], ()
    if earlier is not None and history:
        tokens, where, media = history[-1 - earlier % min(len(history), 8)]
        cut = len(tokens) - min(cut, len(tokens))
        tokens = list(tokens[:cut])
        media = tuple(item for item in media if item.start + item.length <= cut)
        scope = where if scope == 0 else SCOPES[scope]
    else:
        scope = SCOPES[scope]
    tokens = (tokens + [s for s, length in tail for _ in range(length)])[:longest] or [0]
    media = tuple(item for item in media if item.start + item.length <= len(tokens))
    if picture:
        digest, length = PICTURES[picture - 1]
        begin = max((item.start + item.length for item in media), default=0) + place
        if begin + length <= len(tokens):
            media += (MediaItem(digest, begin, length),)
            tokens[begin : begin + length] = [0] * length  # placeholders, always the same
    return tokens, scope, media

"""A task that shows what a moved passage loses: facts that update each other and run over borders.

A passage says facts of subjects, `subj n3 k1 v7 k4 v2`: n3's k1 is v7. A later passage may say
another value, which then holds, and may begin with facts of the subject that the passage before it
ended with. So what a question answers depends on the order of the passages, which is free, and:

`local`     is said in one passage, with its subject: right wherever that passage stands
`update`    was said with another value in an earlier passage: needs right positions
`boundary`  stands at a passage's head, its subject in an earlier one: needs attention across passages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

Category = Literal["local", "update", "boundary"]
Passage = tuple[int, ...]

CATEGORIES: tuple[Category, ...] = get_args(Category)

NUM_NAMES, NUM_KEYS, NUM_VALUES = 16, 8, 16
PAD, BOS, SUBJECT, QUESTION = range(4)
FIRST_NAME = 4
FIRST_KEY = FIRST_NAME + NUM_NAMES
FIRST_VALUE = FIRST_KEY + NUM_KEYS
VOCABULARY: tuple[str, ...] = (
    *("<pad>", "<bos>", "subj", "ask"),
    *(f"n{i}" for i in range(NUM_NAMES)),
    *(f"k{i}" for i in range(NUM_KEYS)),
    *(f"v{i}" for i in range(NUM_VALUES)),
)
"""What each token id stands for."""

NAMES_OF_A_PROMPT = 8
"""So few subjects that passages update each other often."""


class FactQuestion(NamedTuple):
    """A question `ask name key` about passages in an order, and its answer there."""

    name: int
    key: int
    value: int
    category: Category

    @property
    def tokens(self) -> Passage:
        """The question behind the passages; the next token is the value."""
        return (QUESTION, self.name, self.key)


def questions(passages: Sequence[Passage]) -> list[FactQuestion]:
    """Return a question for each fact that holds behind these passages in this order."""
    held: dict[tuple[int, int], FactQuestion] = {}
    subject: int | None = None
    for passage in passages:
        before = dict(held)
        is_headed = False
        for at, token in enumerate(passage):
            if token == SUBJECT:
                subject, is_headed = passage[at + 1], True
            elif token >= FIRST_VALUE and subject is not None:
                fact = subject, passage[at - 1]
                earlier = before.get(fact)
                category: Category = "local" if is_headed else "boundary"
                if is_headed and earlier is not None:
                    category = "update" if earlier.value != token else earlier.category
                held[fact] = FactQuestion(*fact, token, category)
    return list(held.values())


def make_passages(rng: np.random.Generator, num_passages: int) -> list[Passage]:
    """Return passages of 20 to 30 tokens, for one prompt in any order."""
    names = FIRST_NAME + rng.permutation(NUM_NAMES)[:NAMES_OF_A_PROMPT]
    return [_passage(rng, names) for _ in range(num_passages)]


def some(rng: np.random.Generator, asked: Sequence[FactQuestion], count: int) -> list[FactQuestion]:
    """Return so many questions, of each category alike as far as there are."""
    order: list[int] = rng.permutation(len(asked)).tolist()
    seen = dict.fromkeys(CATEGORIES, 0)
    ranks: list[tuple[int, int]] = []
    for at in order:
        ranks.append((seen[asked[at].category], at))
        seen[asked[at].category] += 1
    chosen = [asked[at] for _, at in sorted(ranks, key=lambda rank: rank[0])[:count]]
    return [chosen[int(at)] for at in rng.permutation(len(chosen))]


def _passage(rng: np.random.Generator, names: np.ndarray) -> Passage:
    num_head = int(rng.integers(0, 4))
    sizes = rng.integers(1, 4, size=int(rng.integers(3, 5)))
    tokens = _facts(rng, num_head)
    for name, size in zip(rng.permutation(names), sizes, strict=False):
        tokens += [SUBJECT, int(name), *_facts(rng, int(size))]
    return tuple(tokens)


def _facts(rng: np.random.Generator, count: int) -> list[int]:
    keys = FIRST_KEY + rng.permutation(NUM_KEYS)[:count]
    values = FIRST_VALUE + rng.integers(0, NUM_VALUES, size=count)
    return [int(token) for fact in zip(keys, values, strict=True) for token in fact]

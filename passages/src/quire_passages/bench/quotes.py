"""Real text in passages, and questions that quote it: what comes next stands in a passage.

Texts are cut where a text splitter cuts, after so many tokens, wherever that is. Passages that follow each
other in a text may follow each other in a prompt, in which case a quote may run over their border.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

Category = Literal["inside", "border"]
Passage = tuple[int, ...]
Run = list[Passage]

CATEGORIES: tuple[Category, ...] = get_args(Category)

PAD, BOS, QUOTE = range(3)
"""The special tokens of quire-quotes."""

LONGEST_RUN = 3


class Quote(NamedTuple):
    """Tokens as they stand in the passages, and the one that follows there.

    `border`: the next one is the first of another passage; `inside`: all are of one passage.
    """

    tokens: Passage
    following: int
    category: Category


def cut_runs(
    rng: np.random.Generator, texts: Sequence[Sequence[int]], num_passages: int, size: int
) -> list[Run]:
    """Return runs of one to three passages that follow each other in a text: so many passages in all.

    texts  as token ids, one at least of `size` tokens
    size   tokens of a passage
    """
    runs: list[Run] = []
    left = num_passages
    while left:
        chosen = texts[int(rng.integers(len(texts)))]
        count = min(int(rng.integers(1, LONGEST_RUN + 1)), left, len(chosen) // size)
        if not count:
            continue
        start = int(rng.integers(0, len(chosen) - count * size + 1))
        cuts = range(start, start + count * size, size)
        runs.append([tuple(int(token) for token in chosen[at : at + size]) for at in cuts])
        left -= count
    return runs


def quote(rng: np.random.Generator, runs: Sequence[Run], category: Category, length: int) -> Quote:
    """Return a quote of so many tokens from runs of which one, for `border`, has two passages."""
    if category == "inside":
        run = runs[int(rng.integers(len(runs)))]
        passage = run[int(rng.integers(len(run)))]
        start = int(rng.integers(0, len(passage) - length))
        return Quote(passage[start : start + length], passage[start + length], category)
    longer = [run for run in runs if len(run) > 1]
    run = longer[int(rng.integers(len(longer)))]
    at = int(rng.integers(1, len(run)))
    return Quote(run[at - 1][-length:], run[at][0], category)

"""Joints of prompts and answers: texts that go on alike, with other tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quire.core.tokens import IntArray
from quire_sim.caches.radix import RadixTree

NEAR = 8
"""Tokens around the joint of a prompt and its answer within which tokens merge."""

MAX_TOKENS = 16 << 20
"""Tokens of prompts and answers that are kept; beyond them all are forgotten."""


class _Answered(NamedTuple):
    """The last tokens of a prompt and its answer; `begin` is the place of the first one, `joint` of the answer."""

    tokens: IntArray
    begin: int
    joint: int


class AnswerJoints:
    """Prompts with their answers, and how later prompts go on from them.

    A tokenizer may merge the end of a prompt with the begin of its answer when both come back in one text. `text`
    returns tokens as text.
    """

    def __init__(self, text: Callable[[IntArray], str]) -> None:
        self._text = text
        self._tree = RadixTree()
        self._answered: list[_Answered] = []
        self._size = 0

    def merged(self, tokens: IntArray) -> tuple[int, int]:
        """Return where a prompt parts from an earlier answer, and its tokens behind it whose text both have."""
        found = self._tree.match(tokens.tobytes())
        at = sum(equal for _, equal in found)
        if not at:
            return 0, 0
        answered = self._answered[int(found[-1][0].used)]
        place = at - answered.begin
        if abs(at - answered.joint) > NEAR or not 0 < place < len(answered.tokens):
            return at, 0
        old, new = answered.tokens[place - 1 :], tokens[at - 1 :]
        both = _common(self._text(old), self._text(new[: 2 * len(old)]))
        low, high = (
            1,
            min(len(new), 2 * len(old)) + 1,
        )  # tokens of the prompt within the text that both have
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if len(self._text(new[:middle])) <= both else (low, middle)
        return at, low - 1

    def add(self, tokens: IntArray, answer: IntArray) -> None:
        """Keep a prompt with its answer."""
        if self._size > MAX_TOKENS:
            self._tree, self._answered, self._size = RadixTree(), [], 0
        begin = max(len(tokens) - NEAR - 1, 0)
        key = np.concatenate((tokens, answer[:-1]))
        node, new = self._tree.insert(key.tobytes(), len(self._answered))
        for each in node.path():
            each.used = len(self._answered)
        self._answered.append(_Answered(key[begin:].copy(), begin, len(tokens)))
        self._size += new + len(key) - begin


def _common(old: str, new: str) -> int:
    """Return the characters that two texts begin with in common."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((n for n, pair in pairs if pair[0] != pair[1]), min(len(old), len(new)))

"""The text of the demo: a long system prompt, and the questions of six people, in `talks.toml`."""

import re
import tomllib
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

_TEXT = tomllib.loads(Path(__file__).with_name("talks.toml").read_text("utf-8"))

RULES: str = _TEXT["rules"]
NOTES: str = _TEXT["notes"]
QUESTIONS: tuple[tuple[str, ...], ...] = tuple(map(tuple, _TEXT["questions"]))
SAMPLED_QUESTION: str = _TEXT["sampled"]

MAX_CONVERSATIONS = len(QUESTIONS)
MAX_TURNS = len(QUESTIONS[0])


def system_text(num_tokens: int, count: Callable[[str], int]) -> str:
    """Return a system prompt of at least `num_tokens` tokens, whole sentences of the notes.

    `count` returns the tokens of a text. Beyond their end, the notes start again.
    """
    text = RULES + "\n\n"
    for sentence in cycle(re.findall(r"[^.]+\.\s+", NOTES + "\n")):
        if count(text) >= num_tokens:
            break
        text += sentence
    return text.rstrip()

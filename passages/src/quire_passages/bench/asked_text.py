"""Prompts of public text for a real model: passages of a pool in changing orders, and questions across them.

The text is the prose that every CPython carries (`prose`). A passage ends in a note, so that questions can ask for one
passage by another: its neighbour, its number, or the later of two notes that update each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.engines.segments import Segments
from quire.errors import ConfigError
from quire_passages.bench.prose import joined, read_library

_HEAD = "You are given some passages. Answer the question from them.\n\n"
_NAMES = [
    "Ada",
    "Bela",
    "Cleo",
    "Dora",
    "Egon",
    "Faye",
    "Gita",
    "Hugo",
    "Ines",
    "Jona",
    "Kira",
    "Lars",
    "Mona",
    "Nils",
    "Olga",
    "Pia",
    "Rolf",
    "Sina",
    "Timo",
    "Ute",
]
_PLACES = [
    "attic",
    "bridge",
    "cellar",
    "depot",
    "engine",
    "forge",
    "garden",
    "harbour",
    "island",
    "jetty",
    "kiosk",
    "lodge",
    "mill",
    "nave",
    "oasis",
]


@dataclass(frozen=True, slots=True)
class TextSizes:
    """Sizes of prompts.

    pool      passages that prompts draw from
    passages  of a prompt: least and most
    tokens    of a passage: least and most
    """

    pool: int = 60
    passages: tuple[int, int] = (4, 8)
    tokens: tuple[int, int] = (150, 400)


@dataclass(frozen=True, slots=True)
class _Passage:
    ids: list[int]
    topic: str
    keeper: str
    place: str


def text_prompts(
    tokenizer: Any, sizes: TextSizes, *, seed: int = 50, texts: Sequence[str] | None = None
) -> Iterator[Segments]:
    """Yield prompts without end, always the same ones: a head, passages of a pool, a question.

    texts  in place of Python's documentation

    Raises `ConfigError` for texts that are too short.
    """
    rng = np.random.default_rng(seed)

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    pool = _pool(rng, encode, tokenizer, sizes, texts)
    chat = getattr(tokenizer, "chat_template", None)
    opening, closing = _around(tokenizer) if chat else ("", "\nAnswer:")
    first = [] if chat or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    head = [*first, *encode(opening + _HEAD)]
    while True:
        count = int(rng.integers(sizes.passages[0], sizes.passages[1] + 1))
        chosen = [pool[int(at)] for at in rng.permutation(len(pool))[:count]]
        asked = encode("Question: " + _question(rng, chosen) + closing)
        yield Segments.of([head, *(each.ids for each in chosen), asked])


def _pool(
    rng: np.random.Generator,
    encode: Callable[[str], list[int]],
    tokenizer: Any,
    sizes: TextSizes,
    texts: Sequence[str] | None,
) -> list[_Passage]:
    given = joined(read_library()) if texts is None else texts
    least = 8 * sizes.tokens[1]
    long_enough = [text for text in given if len(text) > least]
    if not long_enough:
        raise ConfigError(
            f"the longest text has {max(map(len, given), default=0):,} characters; passages of up to {sizes.tokens[1]} "
            f"tokens are cut from texts of more than {least:,}: give longer files, or shorter passages"
        )
    pool: list[_Passage] = []
    while len(pool) < sizes.pool:
        text = long_enough[int(rng.integers(len(long_enough)))]
        start = text.find(". ", int(rng.integers(0, len(text) - 6 * sizes.tokens[1]))) + 2
        size = int(rng.integers(sizes.tokens[0], sizes.tokens[1] + 1))
        said = tokenizer.decode(encode(text[start : start + 8 * size])[: size - 24])
        topic = " ".join(said.split()[:4]).rstrip(",.;:")
        keeper, place = (str(names[int(rng.integers(len(names)))]) for names in (_NAMES, _PLACES))
        note = f"\nNote: this passage is kept by {keeper}, who works at the {place}.\n\n"
        pool.append(_Passage(encode(said + note), topic, keeper, place))
    return pool


def _question(rng: np.random.Generator, chosen: Sequence[_Passage]) -> str:
    """Return a question about passages in an order: across two of them, or about their order."""
    one = int(rng.integers(1, len(chosen)))
    two = int(rng.integers(len(chosen) - 1))
    two += two >= one
    first, second = chosen[one], chosen[two]
    kinds = [
        f"Who keeps the passage right after the one that begins with '{chosen[one - 1].topic}'?",
        f"What does the passage above the one that begins with '{first.topic}' say?",
        f"Which passage stands first, the one of {first.keeper} or the one of {second.keeper}, and what does it say?",
        f"Where does {first.keeper} work, by the last note about {first.keeper}?",
        f"What do the passages that begin with '{first.topic}' and '{second.topic}' have in common?",
        f"Continue the passage kept by whoever works at the {second.place}.",
        f"Sum up the passages number {one + 1} and {two + 1}.",
    ]
    return kinds[int(rng.integers(len(kinds)))]


def _around(tokenizer: Any) -> tuple[str, str]:
    """Return what a chat template puts before and behind a user's message."""
    mark = "\ue000"
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = said.partition(mark)
    return before, after

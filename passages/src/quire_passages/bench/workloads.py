"""Benchmark prompts of a head, passages and a question, by workload, with their model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from quire.assets import demo_model
from quire.bench.hf_rows import random_llama
from quire_passages.assets import facts_model, quotes_model
from quire_passages.bench import facts, quotes
from quire_passages.bench.prose import is_held_out, is_sampled, joined, read_library

Ids = tuple[int, ...]

NUM_PASSAGES = 6
NUM_EARLIER = 3
"""Prompts that came before, with some of the same passages: where contextual captures are from."""


@dataclass(frozen=True, slots=True)
class CaseQuestion:
    """A question, behind what all questions of its prompt begin with; `answer` is the token that is right."""

    tokens: Ids
    answer: int
    category: str


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt of which several questions are asked.

    opening  what every question begins with
    asked    the questions, all of one length
    earlier  passages of prompts that came before
    """

    head: Ids
    passages: list[Ids]
    opening: Ids
    asked: list[CaseQuestion]
    earlier: list[list[Ids]]


@dataclass(frozen=True, slots=True)
class PassageWorkload:
    """Cases for one model.

    load       the model in float32, in eval mode, and its tokenizer
    cases      makes so many cases, with that tokenizer, fewer of them where prompts are long; always the same
    is_judged  whether answers mean anything; else time alone is measured
    """

    name: str
    load: Callable[[], tuple[Any, Any]]
    cases: Callable[[Any, int], list[Case]]
    is_judged: bool = True


def fact_cases(_: Any, count: int) -> list[Case]:
    """Return prompts of facts, with nine questions each, three of a category where there are."""
    rng = np.random.default_rng(41)
    cases: list[Case] = []
    for _number in range(count):
        passages = facts.make_passages(rng, NUM_PASSAGES)
        chosen = facts.some(rng, facts.questions(passages), 9)
        asked = [CaseQuestion(each.tokens[1:], each.value, each.category) for each in chosen]
        earlier = _earlier(rng, passages, facts.make_passages(rng, 2))
        cases.append(Case((facts.BOS,), passages, (facts.QUESTION,), asked, earlier))
    return cases


def quote_cases(tokenizer: Any, count: int, *, held_out: bool) -> list[Case]:
    """Return prompts of real text cut every 64 tokens, with eight quotes each, half of them over a border."""
    rng = np.random.default_rng(42)
    texts = _texts(tokenizer, held_out=held_out)
    cases: list[Case] = []
    while len(cases) < count:
        runs = quotes.cut_runs(rng, texts, NUM_PASSAGES, 64)
        if any(len(run) > 1 for run in runs):
            others = [passage for run in quotes.cut_runs(rng, texts, 2, 64) for passage in run]
            passages = [passage for run in runs for passage in run]
            asked = quoted(rng, runs, 8, int(rng.integers(8, 17)))
            earlier = _earlier(rng, passages, others)
            cases.append(Case((quotes.BOS,), passages, (quotes.QUOTE,), asked, earlier))
    return cases


def quoted(
    rng: np.random.Generator, runs: Sequence[quotes.Run], count: int, length: int
) -> list[CaseQuestion]:
    """Return so many quotes as questions, by turns inside a passage and over a border."""
    kinds = quotes.CATEGORIES
    found = [quotes.quote(rng, runs, kinds[at % len(kinds)], length) for at in range(count)]
    return [CaseQuestion(each.tokens, each.following, each.category) for each in found]


def continued_cases(tokenizer: Any, count: int, *, held_out: bool) -> list[Case]:
    """Return prompts of real text cut every 256 bytes, in any order; questions are of the text that follows."""
    rng = np.random.default_rng(43)
    size, length = 256, 24
    texts = [text for text in _texts(tokenizer, held_out=held_out) if len(text) > 8 * size]
    cases: list[Case] = []
    for _number in range(-(-count // 4)):
        text = texts[int(rng.integers(len(texts)))]
        start = int(rng.integers(0, len(text) - 8 * size))
        cuts = [text[start + at * size :][:size] for at in range(NUM_PASSAGES)]
        after = text[start + NUM_PASSAGES * size :]
        asked = [
            CaseQuestion(after[at : at + length], after[at + length], "continued")
            for at in range(0, 8 * length, length)
        ]
        passages = [cuts[int(at)] for at in rng.permutation(NUM_PASSAGES)]
        earlier = _earlier(rng, passages, [texts[0][:size], texts[-1][:size]])
        line_end = tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])
        cases.append(Case((tokenizer.bos_token_id,), passages, line_end, asked, earlier))
    return cases


def timed_cases(_: Any, count: int) -> list[Case]:
    """Return prompts of 2,048 tokens by chance, in sixteen passages; no answer to their questions is right."""
    rng = np.random.default_rng(44)
    cases: list[Case] = []
    for _number in range(-(-count // 10)):
        passages = [tuple(ids.tolist()) for ids in rng.integers(2, 4096, (16, 128))]
        asked = [CaseQuestion(passages[0][:8], 0, "timed")]
        earlier = [[passages[int(at)] for at in rng.permutation(16)]]
        cases.append(Case((1,), passages, passages[0][:1], asked, earlier))
    return cases


def _texts(tokenizer: Any, *, held_out: bool) -> list[Ids]:
    """Return texts as token ids: those that no model was trained on, or as many that all were."""
    texts = _library(held_out=held_out)
    every = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return [ids for ids in every if len(ids) > 200]


@cache
def _library(*, held_out: bool) -> list[str]:
    return joined(read_library(is_held_out if held_out else is_sampled))


def _earlier(
    rng: np.random.Generator, passages: Sequence[Ids], others: Sequence[Ids]
) -> list[list[Ids]]:
    every = [*passages, *others]
    return [[every[int(at)] for at in rng.permutation(len(every))] for _ in range(NUM_EARLIER)]


def _loaded(folder: Callable[[], Path]) -> tuple[Any, Any]:
    models: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer
    place = folder()
    model = models.from_pretrained(place, dtype=torch.float32).eval()
    return model, tokenizers.from_pretrained(place)


_FACTS, _QUOTES, _TINY = (
    partial(_loaded, folder) for folder in (facts_model, quotes_model, demo_model)
)

WORKLOADS: tuple[PassageWorkload, ...] = (
    PassageWorkload("facts", _FACTS, fact_cases),
    PassageWorkload("quotes", _QUOTES, partial(quote_cases, held_out=False)),
    PassageWorkload("quotes-new", _QUOTES, partial(quote_cases, held_out=True)),
    PassageWorkload("tiny", _TINY, partial(continued_cases, held_out=False)),
    PassageWorkload("tiny-new", _TINY, partial(continued_cases, held_out=True)),
    PassageWorkload("time", lambda: (random_llama(512, 12), None), timed_cases, is_judged=False),
)
"""In the order of the table.

facts           facts that update each other and run over borders, asked of quire-facts
quotes          text that quire-quotes was trained on, quoted over borders and inside passages; `-new`: text that it was not
tiny            text that quire-tiny was trained on, and goes on with; `-new`: text that it was not
time            2,048 tokens on a Llama of random weights, 12 layers of 512
"""

"""The kinds of made-up traffic: every distribution and every default, and one session of each.

Lengths are in tokens and lognormal; sessions begin as a Poisson process; turns are geometric;
thinking and tools take lognormal times. The defaults are round numbers of the order of what
published traces show, and no trace is fitted: change them to what you know of your traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import msgspec
from numpy.random import Generator

from quire.errors import ConfigError
from quire_sim.distributions import Lognormal, Zipf, check_positive, draw_count
from quire_sim.workload.prompts import Library, Text

MAX_COUNT = 1_000_000
"""No more shared texts of a kind; no longer a text on average, in tokens."""

MAX_FOUND = 100
"""No more documents in a prompt."""

MAX_DRAWS = 10_000
"""A prompt has fewer documents where so many draws give no more different ones."""


class SessionTurn(msgspec.Struct, frozen=True):
    """A request: its prompt ends with `text`, and the one before it came `after_s` earlier."""

    after_s: float
    text: Text
    output_tokens: int


Session: TypeAlias = Iterator[SessionTurn]


class Texts:
    """The texts of one part of a workload: its shared ones, and the generator all are drawn from."""

    def __init__(self, name: str, library: Library, rng: Generator) -> None:
        self.rng = rng
        self.library = library
        self.name = name
        self._popular: Zipf | None = None
        self._lengths: list[int] = []

    def own(self, length: Lognormal, before: Text | None = None) -> Text:
        """Return a new, unique text behind another."""
        return self.library.add(length.draw_tokens(self.rng), before)

    def popular(self, count: int, skew: float, length: Lognormal) -> tuple[int, int]:
        """Return the rank of one of `count` shared texts, and how long that one is."""
        if self._popular is None:
            self._lengths = [length.draw_tokens(self.rng) for _ in range(count)]
            self._popular = Zipf(count, skew)
        rank = self._popular.draw(self.rng)
        return rank, self._lengths[rank]

    def opening(self, count: int, skew: float, length: Lognormal) -> Text:
        """Return one of `count` shared texts that prompts begin with."""
        rank, tokens = self.popular(count, skew, length)
        return self.library.share((self.name, rank), tokens)


class TrafficKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers that are above 0; those that count are from 1 to `MAX_COUNT`."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int) and not 1 <= value <= MAX_COUNT:
                raise ConfigError(f"{name} is from 1 to {MAX_COUNT:,}, got {value}")
            if isinstance(value, float):
                check_positive(name, value)
            if isinstance(value, Lognormal) and value.mean > MAX_COUNT:
                raise ConfigError(f"{name} has a mean of up to {MAX_COUNT:,}, got {value.mean:g}")

    @property
    def requests_per_session(self) -> float:
        """Expected requests of a session."""
        return 1.0

    def session(self, texts: Texts) -> Session:
        """Begin a session and yield its turns."""
        raise NotImplementedError


class Chat(TrafficKind, frozen=True, forbid_unknown_fields=True):
    """People who talk with a model in turns. A prompt: system prompt, then all said so far.

    `turns`        mean requests per session, geometric
    `systems`      different system prompts; which one is Zipf of exponent `skew`
    `think_s`      from the end of an answer to the next request; an answer takes
                   1 / `tokens_per_s` per token
    """

    turns: float = 4.0
    systems: int = 20
    skew: float = 1.0
    system: Lognormal = Lognormal(800.0, 0.6)
    question: Lognormal = Lognormal(120.0, 1.0)
    answer: Lognormal = Lognormal(300.0, 0.8)
    think_s: Lognormal = Lognormal(40.0, 1.0)
    tokens_per_s: float = 50.0

    @property
    def requests_per_session(self) -> float:
        return self.turns

    def session(self, texts: Texts) -> Session:
        text, wait = texts.opening(self.systems, self.skew, self.system), 0.0
        for _ in range(draw_count(texts.rng, self.turns)):
            text = texts.own(self.question, text)
            answer = self.answer.draw_tokens(texts.rng)
            yield SessionTurn(wait, text, answer)
            text = texts.library.add(answer, text)
            wait = answer / self.tokens_per_s + self.think_s.draw(texts.rng)


class Agent(TrafficKind, frozen=True, forbid_unknown_fields=True):
    """Agents with tools. A prompt: instructions and tools, the task, then calls and results.

    `steps`    mean requests per task, geometric; `tool_s` is how long a tool takes
    `agents`   different sets of instructions and tools; which one is Zipf of exponent `skew`
    """

    steps: float = 15.0
    agents: int = 8
    skew: float = 1.0
    tools: Lognormal = Lognormal(6000.0, 0.4)
    task: Lognormal = Lognormal(400.0, 1.0)
    call: Lognormal = Lognormal(150.0, 0.8)
    result: Lognormal = Lognormal(900.0, 1.2)
    tool_s: Lognormal = Lognormal(3.0, 1.2)
    tokens_per_s: float = 50.0

    @property
    def requests_per_session(self) -> float:
        return self.steps

    def session(self, texts: Texts) -> Session:
        text, wait = texts.opening(self.agents, self.skew, self.tools), 0.0
        text = texts.own(self.task, text)
        for _ in range(draw_count(texts.rng, self.steps)):
            call = self.call.draw_tokens(texts.rng)
            yield SessionTurn(wait, text, call)
            text = texts.library.add(call + self.result.draw_tokens(texts.rng), text)
            wait = call / self.tokens_per_s + self.tool_s.draw(texts.rng)


class Rag(TrafficKind, frozen=True, forbid_unknown_fields=True):
    """Questions about documents. A prompt: instructions, the documents found, the question.

    `documents` there are; each of the `found` ones of a request is drawn by Zipf of exponent `skew`,
    no two the same, and they stand in the order drawn: a prefix is shared only as far
    as the same documents stand in the same order.
    """

    documents: int = 2000
    found: int = 3
    skew: float = 1.0
    instructions: int = 200
    document: Lognormal = Lognormal(1000.0, 0.5)
    question: Lognormal = Lognormal(40.0, 0.6)
    answer: Lognormal = Lognormal(200.0, 0.6)

    def __post_init__(self) -> None:
        super().__post_init__()
        most = min(MAX_FOUND, self.documents)
        if self.found > most:
            raise ConfigError(f"a prompt has at most {most} documents, got found={self.found}")

    def session(self, texts: Texts) -> Session:
        text = texts.library.share(texts.name, self.instructions)
        found: dict[int, int] = {}
        for _ in range(MAX_DRAWS):
            document, tokens = texts.popular(self.documents, self.skew, self.document)
            found[document] = tokens
            if len(found) == self.found:
                break
        for document, tokens in found.items():
            text = texts.library.share(document, tokens, text)
        text = texts.own(self.question, text)
        yield SessionTurn(0.0, text, self.answer.draw_tokens(texts.rng))


class FewShot(TrafficKind, frozen=True, forbid_unknown_fields=True):
    """The same examples before every input. A prompt: the examples of a task, the input.

    `tasks` there are; which one is Zipf of exponent `skew`.
    """

    tasks: int = 50
    skew: float = 1.0
    examples: Lognormal = Lognormal(2500.0, 0.5)
    input: Lognormal = Lognormal(150.0, 0.8)
    answer: Lognormal = Lognormal(20.0, 0.6)

    def session(self, texts: Texts) -> Session:
        text = texts.opening(self.tasks, self.skew, self.examples)
        text = texts.own(self.input, text)
        yield SessionTurn(0.0, text, self.answer.draw_tokens(texts.rng))


class Scan(TrafficKind, frozen=True, forbid_unknown_fields=True):
    """Long texts that come once: nothing is shared, and everything passes through the cache."""

    text: Lognormal = Lognormal(6000.0, 0.8)
    answer: Lognormal = Lognormal(150.0, 0.6)

    def session(self, texts: Texts) -> Session:
        text = texts.own(self.text)
        yield SessionTurn(0.0, text, self.answer.draw_tokens(texts.rng))


KINDS: dict[str, type[TrafficKind]] = {
    "chat": Chat,
    "agent": Agent,
    "rag": Rag,
    "few-shot": FewShot,
    "scan": Scan,
}

MIX: dict[str, float] = {"chat": 0.40, "agent": 0.25, "rag": 0.20, "few-shot": 0.10, "scan": 0.05}
"""Expected shares of the requests of a mix, by kind."""

REQUESTS_PER_S = 2.0
"""Expected requests per second, all sessions together, once the first ones have ended."""

BLOCK_SIZE = 16
"""Tokens per block."""

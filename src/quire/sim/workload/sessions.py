"""One session of each kind of traffic: its requests, with the times between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import msgspec
from numpy.random import Generator

from quire.sim.distributions import Lognormal, Zipf, draw_count
from quire.sim.workload.prompts import Library, Text
from quire.sim.workload.settings import Agent, Chat, FewShot, Kind, Rag, Scan

MAX_DRAWS = 10_000
"""A prompt has fewer documents where so many draws give no more different ones."""


class SessionTurn(msgspec.Struct, frozen=True):
    """A request: its prompt ends with `text`, and the one before it came `after_s` earlier."""

    after_s: float
    text: Text
    output_tokens: int


Sessions: TypeAlias = Callable[[], Iterator[SessionTurn]]
"""Begins a session and yields its turns."""


def sessions_of(kind: Kind, name: str, library: Library, rng: Generator) -> Sessions:
    """Return the maker of sessions of a kind, all drawn from one generator."""
    match kind:
        case Chat():
            return _chats(kind, name, library, rng)
        case Agent():
            return _agents(kind, name, library, rng)
        case Rag():
            return _questions(kind, name, library, rng)
        case FewShot():
            return _tasks(kind, name, library, rng)
        case Scan():
            return _scans(kind, library, rng)


def turns_per_session(kind: Kind) -> float:
    """Return the expected requests of a session."""
    match kind:
        case Chat():
            return kind.turns
        case Agent():
            return kind.steps
        case _:
            return 1.0


def _chats(kind: Chat, name: str, library: Library, rng: Generator) -> Sessions:
    opening = _openings(name, kind.system, Zipf(kind.systems, kind.skew), library, rng)

    def begin() -> Iterator[SessionTurn]:
        text = opening()
        wait = 0.0
        for _ in range(draw_count(rng, kind.turns)):
            text = library.add(kind.question.draw_tokens(rng), text)
            answer = kind.answer.draw_tokens(rng)
            yield SessionTurn(wait, text, answer)
            text = library.add(answer, text)
            wait = answer / kind.tokens_per_s + kind.think_s.draw(rng)

    return begin


def _agents(kind: Agent, name: str, library: Library, rng: Generator) -> Sessions:
    opening = _openings(name, kind.tools, Zipf(kind.agents, kind.skew), library, rng)

    def begin() -> Iterator[SessionTurn]:
        text = opening()
        text = library.add(kind.task.draw_tokens(rng), text)
        wait = 0.0
        for _ in range(draw_count(rng, kind.steps)):
            call = kind.call.draw_tokens(rng)
            yield SessionTurn(wait, text, call)
            text = library.add(call + kind.result.draw_tokens(rng), text)
            wait = call / kind.tokens_per_s + kind.tool_s.draw(rng)

    return begin


def _questions(kind: Rag, name: str, library: Library, rng: Generator) -> Sessions:
    lengths = [kind.document.draw_tokens(rng) for _ in range(kind.documents)]
    popular = Zipf(kind.documents, kind.skew)

    def begin() -> Iterator[SessionTurn]:
        text = library.share(name, kind.instructions)
        found: dict[int, None] = {}
        for _ in range(MAX_DRAWS):
            found[popular.draw(rng)] = None
            if len(found) == kind.found:
                break
        for document in found:
            text = library.share(document, lengths[document], text)
        text = library.add(kind.question.draw_tokens(rng), text)
        yield SessionTurn(0.0, text, kind.answer.draw_tokens(rng))

    return begin


def _tasks(kind: FewShot, name: str, library: Library, rng: Generator) -> Sessions:
    opening = _openings(name, kind.examples, Zipf(kind.tasks, kind.skew), library, rng)

    def begin() -> Iterator[SessionTurn]:
        text = opening()
        text = library.add(kind.input.draw_tokens(rng), text)
        yield SessionTurn(0.0, text, kind.answer.draw_tokens(rng))

    return begin


def _scans(kind: Scan, library: Library, rng: Generator) -> Sessions:
    def begin() -> Iterator[SessionTurn]:
        text = library.add(kind.text.draw_tokens(rng))
        yield SessionTurn(0.0, text, kind.answer.draw_tokens(rng))

    return begin


def _openings(
    name: str, length: Lognormal, popular: Zipf, library: Library, rng: Generator
) -> Callable[[], Text]:
    """Return a drawer of shared first texts, one of each rank."""
    lengths = [length.draw_tokens(rng) for _ in range(popular.count)]

    def draw() -> Text:
        rank = popular.draw(rng)
        return library.share((name, rank), lengths[rank])

    return draw

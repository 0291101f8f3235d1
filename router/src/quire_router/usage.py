"""The tokens of an answer, read from the usage that its server tells."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import msgspec

BYTES_PER_TOKEN = 4
"""Bytes of a prompt, or of an answer's text, that count as a token where a server tells no usage."""

_TOLD = re.compile(rb'"(?:usage|timings|meta_info)"\s*:\s*\{')
_DATA = b"data:"


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """OpenAI's fields of completions and of responses, and Anthropic's."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Timings(msgspec.Struct):
    """llama-server's counts, on all its paths: cached and computed tokens of a prompt, and tokens of its answer."""

    cache_n: int | None = None
    prompt_n: int | None = None
    predicted_n: int | None = None


class _Meta(msgspec.Struct):
    """SGLang's counts on `/generate`."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class _Choice(msgspec.Struct):
    index: int | None = None


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(_Inner):
    """An answer or an event: its usage stands in itself, in the `response` of OpenAI's, or in the `message` of Anthropic's.

    llama-server and SGLang count each prompt or choice by itself, and name it by an index.
    """

    response: _Inner | None = None
    message: _Inner | None = None
    timings: _Timings | None = None
    meta_info: _Meta | None = None
    index: int | None = None
    choices: list[_Choice] | None = None


class _Tokens(msgspec.Struct):
    prompt: int | None = None
    cached: int | None = None
    completion: int | None = None


class AnswerUsage:
    """Tokens of a request and its answer, as far as its server has told them.

    `num_events`  events of a stream that have passed
    `num_bytes`   bytes of an answer

    Counts of several prompts or choices are added up, where a server gives each of them its own.
    """

    def __init__(self) -> None:
        self.num_events = self.num_bytes = 0
        self._parts: dict[int | None, _Tokens] = {}  # by index; None: of the whole answer
        self._latest: int | None = None

    @property
    def prompt(self) -> int | None:
        """Tokens of the prompt; None: not told."""
        return self._sum("prompt")

    @property
    def cached(self) -> int | None:
        """Of these, tokens that were cached; None: not told."""
        return self._sum("cached")

    @property
    def completion(self) -> int | None:
        """Tokens of the answer; None: not told."""
        return self._sum("completion")

    def tokens(self, num_bytes: int) -> int:
        """Return all tokens of a request whose body has `num_bytes`: 0 without an answer, and estimated where not told."""
        if not self.num_bytes:
            return 0
        if (prompt := self.prompt) is not None:
            return prompt + (self.completion or 0)  # embeddings and scores generate none
        estimated = self.num_events or self.num_bytes // BYTES_PER_TOKEN
        return num_bytes // BYTES_PER_TOKEN + estimated

    def read(self, body: bytes) -> None:
        """Read a whole answer, or whole lines of a stream."""
        self.num_bytes += len(body)
        is_document = body.lstrip().startswith((b"{", b"["))
        if not is_document:
            self.num_events += body.count(_DATA)
        if _TOLD.search(body) is None:
            return
        for line in [_DATA + body] if is_document else body.splitlines():
            if line.startswith(_DATA):
                self._note(line[len(_DATA) :])

    async def reading(self, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
        """Yield the pieces of a stream, which end with a line each, once they are read."""
        async with aclosing(pieces):
            async for piece in pieces:
                self.read(piece)
                yield piece

    def _note(self, document: bytes) -> None:
        """Note what a document tells: an answer or an event, or a list with an answer for each prompt."""
        with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
            said = msgspec.json.decode(document, type=_Answer | list[_Answer])
            if isinstance(said, _Answer):
                self._note_answer(said, said.index or 0)
                return
            for at, each in enumerate(said):
                self._note_answer(each, at)

    def _note_answer(self, said: _Answer, index: int) -> None:
        own = _usage_of(said)
        if own is not None:
            if said.choices:
                index = said.choices[0].index or 0
            elif said.choices is not None:  # the last event of a choice does not name it
                index = -1 - len(self._parts) if self._latest is None else self._latest
            self._latest = index if said.choices else None
            self._add(said.usage or own, index)
            return
        for each in (said, said.response, said.message):
            if each is not None and each.usage is not None:
                self._add(each.usage, None)

    def _add(self, usage: _Usage, index: int | None) -> None:
        """Note a usage: later ones of a stream replace what they repeat."""
        written = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        prompt = usage.prompt_tokens
        if prompt is None and usage.input_tokens is not None:
            prompt = usage.input_tokens + written  # Anthropic's count leaves cached tokens out
        details = usage.prompt_tokens_details or usage.input_tokens_details
        cached = usage.cache_read_input_tokens if details is None else details.cached_tokens
        completion = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens  # fmt: skip
        part = self._parts.setdefault(index, _Tokens())
        part.prompt = part.prompt if prompt is None else prompt
        part.cached = part.cached if cached is None else cached
        part.completion = part.completion if completion is None else completion

    def _sum(self, name: str) -> int | None:
        told = [getattr(each, name) for each in self._parts.values()]
        counts = [each for each in told if each is not None]
        return sum(counts) if counts else None


def _usage_of(said: _Answer) -> _Usage | None:
    """Return the counts that an answer gives of one prompt or choice; None: those it gives are of all, or it has none."""
    if (meta := said.meta_info) is not None:
        return _Usage(meta.prompt_tokens, meta.completion_tokens, _Details(meta.cached_tokens))
    timings = said.timings
    if timings is None or timings.cache_n is None or timings.prompt_n is None:
        return None
    prompt, details = timings.cache_n + timings.prompt_n, _Details(timings.cache_n)
    return _Usage(prompt, timings.predicted_n, details)

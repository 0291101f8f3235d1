"""The tokens of an answer, read from the usage that its server tells."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import msgspec

BYTES_PER_TOKEN = 4
"""Bytes of a prompt, or of an answer's text, that count as a token where a server tells no usage."""

_TOLD = re.compile(rb'"(?:usage|timings)"\s*:\s*\{')
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


class _Inner(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(_Inner):
    """An answer or an event: its usage stands in itself, in the `response` of OpenAI's, or in the `message` of Anthropic's."""

    response: _Inner | None = None
    message: _Inner | None = None
    timings: _Timings | None = None


class AnswerUsage:
    """Tokens of a request and its answer, as far as its server has told them; None: not told.

    `prompt`, `cached`, `completion`  tokens
    `num_events`  events of a stream that have passed
    `num_bytes`   bytes of an answer
    """

    def __init__(self) -> None:
        self.prompt: int | None = None
        self.cached: int | None = None
        self.completion: int | None = None
        self.num_events = self.num_bytes = 0

    def tokens(self, num_bytes: int) -> int:
        """Return all tokens of a request whose body has `num_bytes`: 0 without an answer, and estimated where not told."""
        if not self.num_bytes:
            return 0
        prompt = num_bytes // BYTES_PER_TOKEN if self.prompt is None else self.prompt
        estimated = self.num_events or self.num_bytes // BYTES_PER_TOKEN
        return prompt + (estimated if self.completion is None else self.completion)

    def read(self, body: bytes) -> None:
        """Read a whole answer, or whole lines of a stream."""
        self.num_bytes += len(body)
        is_document = body.lstrip().startswith(b"{")
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
        with suppress(msgspec.MsgspecError, UnicodeError, RecursionError):
            said = msgspec.json.decode(document, type=_Answer)
            told = [each.usage for each in (said, said.response, said.message) if each is not None]
            for usage in told if any(told) else [_usage_of(said.timings)]:
                if usage is not None:
                    self._add(usage)

    def _add(self, usage: _Usage) -> None:
        """Note a usage: later ones of a stream replace what they repeat."""
        written = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        prompt = usage.prompt_tokens
        if prompt is None and usage.input_tokens is not None:
            prompt = usage.input_tokens + written  # Anthropic's count leaves cached tokens out
        details = usage.prompt_tokens_details or usage.input_tokens_details
        cached = usage.cache_read_input_tokens if details is None else details.cached_tokens
        completion = usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens  # fmt: skip
        self.prompt = self.prompt if prompt is None else prompt
        self.cached = self.cached if cached is None else cached
        self.completion = self.completion if completion is None else completion


def _usage_of(timings: _Timings | None) -> _Usage | None:
    """Return timings as a usage; None if they lack a count."""
    if timings is None or timings.cache_n is None or timings.prompt_n is None:
        return None
    prompt, details = timings.cache_n + timings.prompt_n, _Details(timings.cache_n)
    return _Usage(prompt, timings.predicted_n, details)

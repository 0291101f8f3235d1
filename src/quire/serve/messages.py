"""Answers in Anthropic's shape: messages of content blocks, and their streams."""

import uuid
from typing import Any

import msgspec

from quire.serve.message_requests import MessageChat
from quire.serve.replies import TEXT_ALONE, AnswerMarks, News, Reply, ReplyChoice
from quire.web.clients import sse
from quire.web.errors import MESSAGES, ApiError, error_document

UNSIGNED = "unsigned"
"""The signature of thinking: the server gives a client's thinking to the template as it is."""


class MessageReply(Reply):
    """An answer of `/v1/messages`, from an engine with blocks of `block_size` tokens.

    In a stream, at most one content block is open: the thinking or the text. Each call of a tool comes whole.
    """

    def __init__(
        self,
        asked: MessageChat,
        model: str,
        tokenizer: Any,
        num_prompts: int = 1,
        marks: AnswerMarks = TEXT_ALONE,
        *,
        block_size: int,
    ) -> None:
        super().__init__(asked, model, tokenizer, num_prompts, marks)
        self._asked, self._block_size = asked, block_size
        self._num_blocks, self._open, self._is_broken = 0, "", False
        name = f"msg_{uuid.uuid4().hex[:24]}"
        self._head = {"id": name, "type": "message", "role": "assistant", "model": model}

    def whole(self) -> dict[str, Any]:
        (choice,) = self.choices
        news = self._news(choice)
        content: list[dict[str, Any]] = [{"type": "text", "text": news.text}] if news.text else []
        if news.reasoning:
            thought = {"type": "thinking", "thinking": news.reasoning, "signature": UNSIGNED}
            content.insert(0, thought)
        for block, arguments in self._calls(news):
            content.append(block | {"input": msgspec.json.decode(arguments)})
        told = self._usage() | self.timings()
        return self._head | {"content": content} | self._end(choice, news) | told

    def opening(self) -> list[bytes]:
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return [_event("message_start", message=self._head | nothing | self._usage())]

    def chunk(self, choice: ReplyChoice) -> bytes:
        news = self._news(choice)
        events = list[bytes]()
        for kind, said in (("thinking", news.reasoning), ("text", news.text)):
            if said and self._open != kind:
                more = {"signature": ""} if kind == "thinking" else {}
                events += [*self._stop(), self._start({"type": kind, kind: ""} | more)]
                self._open = kind
            if said:
                events.append(self._delta({"type": f"{kind}_delta", kind: said}))
        for block, arguments in self._calls(news):
            events += self._stop()
            events.append(self._start(block | {"input": {}}))
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
            self._open = "tool_use"
        if news.finish_reason is not None:
            events += self._stop()
            told = self._usage() | self.timings()
            events.append(_event("message_delta", delta=self._end(choice, news), **told))
        return b"".join(events)

    def broken(self, error: ApiError) -> bytes:
        self._is_broken = True
        return _event(**error_document(MESSAGES, error))

    def closing(self) -> list[bytes]:
        return [] if self._is_broken else [_event("message_stop")]

    @property
    def completion_tokens(self) -> int:
        return 0 if self._asked.is_silent else super().completion_tokens

    def _news(self, choice: ReplyChoice) -> News:
        news = choice.news(None)
        if not self._asked.is_silent:
            return news
        return News("", "", [], [], news.finish_reason and "length")

    def _start(self, block: dict[str, Any]) -> bytes:
        self._num_blocks += 1
        return _event("content_block_start", index=self._num_blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks - 1, delta=delta)

    def _stop(self) -> list[bytes]:
        """Return the end of the block that is open, if there is one."""
        was_open, self._open = self._open, ""
        signed = self._delta({"type": "signature_delta", "signature": UNSIGNED})
        ends = [signed] if was_open == "thinking" else []
        stop = _event("content_block_stop", index=self._num_blocks - 1)
        return [*ends, stop] if was_open else []

    def _calls(self, news: News) -> list[tuple[dict[str, Any], str]]:
        """Return new calls as blocks without their inputs, each with those as JSON text."""
        most = None if self._asked.is_parallel else 1
        return [
            ({"type": "tool_use", "id": call.id or f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name}, call.arguments)
            for call in news.calls[:most]
        ]  # fmt: skip

    def _end(self, choice: ReplyChoice, news: News) -> dict[str, Any]:
        """Return why an answer ended."""
        most, stopped = self._asked.max_tokens, choice.stop_string
        match news.finish_reason:
            case "length" if self._asked.is_silent:
                reason, stopped = "max_tokens", None
            case "tool_calls":
                reason, stopped = "tool_use", None
            case "length" if most is not None and self.completion_tokens < most:
                reason = "model_context_window_exceeded"
            case "length":
                reason = "max_tokens"
            case _:
                reason = "end_turn" if stopped is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped}

    def _usage(self) -> dict[str, Any]:
        """Return the tokens: of the prompt those found, those stored as whole blocks, and the rest."""
        size, cached = self._block_size, self.cached_tokens
        stored = max(self.prompt_tokens // size * size - cached, 0)
        told = {
            "input_tokens": self.prompt_tokens - cached - stored,
            "cache_creation_input_tokens": stored,
            "cache_read_input_tokens": cached,
            "output_tokens": self.completion_tokens,
        }
        return {"usage": told}


def _event(type: str, **more: Any) -> bytes:  # noqa: A002 - as it is called in events
    """Return an event of a stream, by its type."""
    return f"event: {type}\n".encode() + sse({"type": type} | more)

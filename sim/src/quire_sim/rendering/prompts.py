"""Requests as the prompts that a server of a model computes: its chat template, then its tokenizer."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from quire.chat.conversation import ANY_ID, ChatMessage, Conversation, Function, Tool
from quire.errors import ConfigError, QuireError
from quire.serve.message_requests import MessagePrompt
from quire.serve.protocol import ChatRequest, CompletionRequest
from quire.serve.responses import ResponseRequest
from quire.web.bodies import read
from quire.web.errors import ApiError
from quire_sim.logs import LoggedRequest
from quire_sim.rendering.pieces import PieceTokenizer

_KINDS: dict[str, Any] = {
    "chat": ChatRequest,
    "completions": CompletionRequest,
    "text": CompletionRequest,
    "responses": ResponseRequest,
    "messages": MessagePrompt,
}

_NO_TOOL: tuple[Any, ...] = ("none", {"type": "none"})


class PromptRenderer:
    """Prompts of requests by a tokenizer of transformers and its chat template, as `quire serve` maps bodies to them.

    With `has_unused_tools`, prompts have tools that `tool_choice: none` forbids, as those of vLLM have.
    """

    def __init__(self, tokenizer: Any, *, has_unused_tools: bool = False) -> None:
        self.tokenizer, self._has_unused_tools = tokenizer, has_unused_tools
        self._pieces = PieceTokenizer(tokenizer)
        self._special = tokenizer.num_special_tokens_to_add()
        self._last: tuple[LoggedRequest, list[str]] | None = None
        marks = (
            "\n",
            "\u010a",
            "<0x0A>",
        )  # as it is, of byte-level tokenizers, of a fallback to bytes
        self.line_ends = "".join(
            sorted(
                chr(number)
                for token, number in tokenizer.get_vocab().items()
                if any(mark in token for mark in marks)
            )
        )

    def segments(self, request: LoggedRequest) -> list[str]:
        """Return the prompt in segments of tokens, each token a character (`PieceTokenizer`).

        Raises `ConfigError` with the reason for a request that the server would refuse, or that has several prompts.
        """
        if self._last is None or self._last[0] is not request:
            self._last = request, self._segments(request)
        return self._last[1]

    def _segments(self, request: LoggedRequest) -> list[str]:
        if self._has_unused_tools and request.body.get("tool_choice") in _NO_TOOL:
            body = {name: request.body[name] for name in request.body if name != "tool_choice"}
            request = msgspec.structs.replace(request, body=body)
        asked = asked_of(request)
        prompts = asked.prompts()
        if len(prompts) > 1:
            raise ConfigError(f"prompt has {len(prompts)} prompts; log one a request")
        (prompt,) = prompts
        if isinstance(prompt, list):
            return ["".join(map(chr, cast("list[int]", prompt)))]
        if isinstance(prompt, Conversation):
            if prompt.chat_template or prompt.documents:
                raise ConfigError("chat_template and documents of a request are not rendered")
            return self._pieces.segments(prompt.text(self.tokenizer))
        if asked.add_special_tokens and self._special:
            return [self._pieces.whole(prompt, add_special_tokens=True)]
        return self._pieces.segments(prompt)

    def answered(self, request: LoggedRequest) -> list[str]:
        """Return the prompt, the answer with its calls and what follows these, in segments. Raises `ConfigError`."""
        (prompt,) = asked_of(request).prompts()
        if not isinstance(prompt, Conversation):
            raise ConfigError("a completion has no calls")
        calls = [
            Tool(Function(name, arguments=text or "{}"), "function", number or ANY_ID)
            for name, text, number in request.calls
        ]
        answer = ChatMessage(role="assistant", content=request.answer or None, tool_calls=calls)
        return self._pieces.segments(prompt.followed_by(answer).text(self.tokenizer))

    def ids(self, request: LoggedRequest) -> list[int]:
        """Return the prompt as token ids. Raises `ConfigError`."""
        return [ord(token) for part in self.segments(request) for token in part]

    def count(self, text: str) -> int:
        """Return the tokens of a text alone."""
        return sum(map(len, self._pieces.segments(text)))

    def text(self, tokens: str) -> str:
        """Return tokens as text."""
        return self.tokenizer.decode([ord(token) for token in tokens])


def asked_of(request: LoggedRequest) -> Any:
    """Return the body of a request as the server reads it, a chat for responses and messages. Raises `ConfigError`."""
    if not request.body:
        raise ConfigError("the log has no body")
    try:
        asked: Any = read(_KINDS[request.api], msgspec.json.encode(request.body))
        if isinstance(asked, ResponseRequest):
            if asked.previous_response_id is not None:
                raise ConfigError("previous_response_id: what it goes on from is not in the body")
            return asked.chat(asked.items)
        return asked.chat() if isinstance(asked, MessagePrompt) else asked
    except (ApiError, QuireError) as error:
        raise ConfigError(str(error)) from error

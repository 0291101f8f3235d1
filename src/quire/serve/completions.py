"""Answers in OpenAI's two shapes: completions and chats."""

import time
import uuid
from typing import Any

from quire._version import __version__
from quire.chat.tokens import token_name
from quire.serve.protocol import ChatRequest, CompletionRequest
from quire.serve.replies import News, Reply, ReplyChoice
from quire.web.clients import DONE, sse
from quire.web.errors import ApiError

FINGERPRINT = f"quire-{__version__}"


class CompletionReply(Reply):
    """An answer of `/v1/completions` or of `/v1/chat/completions`.

    A stream that includes the usage ends with it; its other events have none, and say so.
    """

    def __init__(
        self,
        asked: ChatRequest | CompletionRequest,
        model: str,
        tokenizer: Any,
        num_prompts: int = 1,
        tools: str | None = None,
    ) -> None:
        super().__init__(asked, model, tokenizer, num_prompts, tools)
        self._chat, self._top = isinstance(asked, ChatRequest), asked.num_logprobs
        self._usage = asked.stream_options is not None and asked.stream_options.include_usage
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        own = {"created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}
        self._head = {"id": name, **own}

    def whole(self) -> dict[str, Any]:
        choices = [self._shape(each, each.news(self._top), "message") for each in self.choices]
        kind = "chat.completion" if self._chat else "text_completion"
        own = {"object": kind, "choices": choices, "usage": self._counts()}
        return self._head | own | self._told()

    def opening(self) -> list[bytes]:
        """Return the first event of a stream: of a chat, the role."""
        said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        shapes = [{"index": each.index, **said, "finish_reason": None} for each in self.choices]
        return [self._chunk([each]) for each in shapes] if self._chat else []

    def chunk(self, choice: ReplyChoice) -> bytes:
        news = choice.news(self._top)
        told = self._told() if news.finish_reason else {}
        return self._chunk([self._shape(choice, news, "delta")], **told) if any(news) else b""

    def broken(self, error: ApiError) -> bytes:
        return sse(error.document())

    def closing(self) -> list[bytes]:
        return [self._chunk([], usage=self._counts()), DONE] if self._usage else [DONE]

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        end = {"usage": None} | more if self._usage else more
        return sse({**self._head, "object": kind, "choices": choices, **end})

    def _told(self) -> dict[str, Any]:
        return {"passages": self.passages} if self.passages else {}

    def _counts(self) -> dict[str, Any]:
        """Return the tokens of all prompts, of them those found in the cache, and of all choices."""
        made = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _shape(self, choice: ReplyChoice, news: News, place: str) -> dict[str, Any]:
        """Return news of a choice in the shape of chats, as a "message" or a "delta", or of completions."""
        said: dict[str, Any] = {place: _said(news, place)} if self._chat else {"text": news.text}
        logprobs = None
        if news.entries and self._chat:
            logprobs = {"content": news.entries}
        elif news.entries:
            logprobs = _columns(news.entries, choice)
        end = {"logprobs": logprobs, "finish_reason": news.finish_reason}
        return {"index": choice.index} | said | end


def _said(news: News, place: str) -> dict[str, Any]:
    """Return news as a chat's message, or as a delta of one, which has nothing that is not new."""
    said: dict[str, Any] = {"content": news.text} if news.text else {}
    if place == "message":
        said = {"role": "assistant", "content": news.text or (None if news.calls else "")}
    for at, call in enumerate(news.calls):
        made = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        index = {"index": at} if place == "delta" else {}
        said.setdefault("tool_calls", []).append(index | made | {"function": call._asdict()})
    return said


def _columns(entries: list[dict[str, Any]], choice: ReplyChoice) -> dict[str, Any]:
    """Return log-probabilities as completions have them, of a choice whose text goes on by these tokens."""
    tops = [(*entry["top_logprobs"], entry) for entry in entries]
    return {
        "tokens": [token_name(entry["bytes"]) for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{token_name(e["bytes"]): e["logprob"] for e in top} for top in tops],
        "text_offset": [choice.offsets.take(entry["bytes"]) for entry in entries],
    }

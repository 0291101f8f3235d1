"""An engine's outputs as OpenAI's answers: whole, or as chunks of a stream."""

import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from quire._version import __version__
from quire.chat.tokens import TextOffsets, token_bytes, token_name
from quire.chat.tools import ToolCall, held_from, parse_tools
from quire.serve.protocol import ChatRequest, CompletionRequest
from quire.web.clients import DONE, sse

FINGERPRINT = f"quire-{__version__}"


class News(NamedTuple):
    """The unsent part of a choice: text, tool calls, tokens with log-probabilities, reason of its end."""

    text: str
    calls: list[ToolCall]
    entries: list[dict[str, Any]]
    finish_reason: str | None


class ReplyChoice:
    """One choice of an answer: its sent text, and the text held back as a possible tool call.

    After every call: sent text + held text == the choice's text, up to a tool call.
    `num_tokens`  that were generated so far
    """

    def __init__(self, index: int, tokenizer: Any, tools: str | None) -> None:
        self.index, self.num_tokens = index, 0
        self._tokenizer, self._tools = tokenizer, tools
        self._num_chars = self._num_entries = 0
        self.offsets = TextOffsets()
        self._latest: Any = None

    def take(self, output: Any) -> bool:
        """Take the choice as it is now, a `CompletionOutput`; return whether it had not ended before."""
        was_open = self._latest is None or self._latest.finish_reason is None
        self._latest, self.num_tokens = output, output.num_tokens
        return was_open

    def news(self, top: int | None) -> News:
        """Return what can be told now; of each token `top` of the likeliest, None for no log-probabilities."""
        text, reason, calls = self._latest.text, self._latest.finish_reason, list[ToolCall]()
        if self._tools is not None and reason is None:
            text = text[: held_from(text, self._tools)]
        elif self._tools is not None:
            text, calls = parse_tools(text, self._tools)
            reason = "tool_calls" if calls and reason == "stop" else reason
        fresh, self._num_chars = text[self._num_chars :], max(self._num_chars, len(text))
        return News(fresh, calls, [] if top is None else self._entries(top), reason)

    def _entries(self, top: int) -> list[dict[str, Any]]:
        logprobs: list[dict[int, Any]] = self._latest.logprobs or []
        since, self._num_entries = self._num_entries, len(logprobs)
        told = zip(self._latest.token_ids[since : len(logprobs)], logprobs[since:], strict=True)
        entries: list[dict[str, Any]] = []
        for token, around in told:
            values = {each: float(getattr(of, "logprob", of)) for each, of in around.items()}
            likeliest = sorted(values, key=lambda each: -values[each])[:top]
            tops = [self._entry(each, values[each]) for each in likeliest]
            entries.append(self._entry(token, values[token]) | {"top_logprobs": tops})
        return entries

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(self._tokenizer, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class Reply:
    """An answer to one request, with all its choices, in either of OpenAI's two shapes.

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
        self.choices = [ReplyChoice(at, tokenizer, tools) for at in range(num_prompts * asked.n)]
        self.prompt_tokens = self.cached_tokens = 0
        self._chat, self._n, self._top = isinstance(asked, ChatRequest), asked.n, asked.num_logprobs
        self._usage = asked.stream_options is not None and asked.stream_options.include_usage
        self._begun, self._passages = set[int](), dict[str, list[Any]]()
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        own = {"created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}
        self._head = {"id": name, **own}

    def take(self, place: int, output: Any) -> Iterator[ReplyChoice]:
        """Yield the choices of which the engine says more, a `RequestOutput` for the prompt at this place."""
        if place not in self._begun:
            self._begun.add(place)
            self.prompt_tokens += len(output.prompt_token_ids)
            self.cached_tokens += output.num_cached_tokens
            if output.passages is not None:
                self._passages.setdefault("passages", []).append(output.passages)
        for made in output.outputs:
            choice = self.choices[place * self._n + int(made.index)]
            if choice.take(made):
                yield choice

    def whole(self) -> dict[str, Any]:
        """Return the answer of a request that is not streamed."""
        choices = [self._shape(each, each.news(self._top), "message") for each in self.choices]
        kind = "chat.completion" if self._chat else "text_completion"
        own = {"object": kind, "choices": choices, "usage": self._counts()}
        return self._head | own | self._passages

    def opening(self) -> list[bytes]:
        """Return the first event of a stream: of a chat, the role."""
        said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        shapes = [{"index": each.index, **said, "finish_reason": None} for each in self.choices]
        return [self._chunk([each]) for each in shapes] if self._chat else []

    def chunk(self, choice: ReplyChoice) -> bytes:
        """Return the new part of a choice as an event; nothing if there is none."""
        news = choice.news(self._top)
        told = self._passages if news.finish_reason else {}
        return self._chunk([self._shape(choice, news, "delta")], **told) if any(news) else b""

    def closing(self) -> list[bytes]:
        """Return the last events of a stream."""
        return [self._chunk([], usage=self._counts()), DONE] if self._usage else [DONE]

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        end = {"usage": None} | more if self._usage else more
        return sse({**self._head, "object": kind, "choices": choices, **end})

    def _counts(self) -> dict[str, Any]:
        """Return the tokens of all prompts, of them those found in the cache, and of all choices."""
        made = sum(choice.num_tokens for choice in self.choices)
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

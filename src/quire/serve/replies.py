"""An engine's outputs as OpenAI's answers: whole, or as chunks of a stream."""

import time
import uuid
from collections.abc import Iterable
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

from quire._version import __version__
from quire.serve.chat import ToolCall, ToolFormat, held_from, parse_tools
from quire.web.clients import DONE, sse

FINGERPRINT = f"quire-{__version__}"

_BYTES: dict[str, int] = {letter: byte for byte, letter in bytes_to_unicode().items()}
"""The letters of byte-level BPE, each with its byte."""


class ReplyChoice:
    """One choice of an answer: what of it was sent, and what is held back since it may be a tool call.

    After every call: sent text + held text == the choice's text, up to a tool call.
    """

    def __init__(self, index: int, tokenizer: Any, *, tools: ToolFormat | None = None) -> None:
        self.index = index
        self._tokenizer = tokenizer
        self._tools: ToolFormat | None = tools
        self._sent, self._sent_tokens = 0, 0
        self._latest: Any = None

    @property
    def num_tokens(self) -> int:
        """Tokens that were generated so far."""
        return self._latest.num_tokens if self._latest is not None else 0

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, None before: "tool_calls" where it ends with such."""
        reason = self._latest.finish_reason if self._latest is not None else None
        return "tool_calls" if reason == "stop" and self._whole()[1] else reason

    def take(self, output: Any) -> None:
        """Take the choice as it is now, a `CompletionOutput` that grew."""
        self._latest = output

    def news(self) -> tuple[str, list[ToolCall], list[Any]]:
        """Return what can be sent now: text, tool calls (at the end), and log-probabilities of tokens (see `entries`)."""
        text, calls = self._latest.text, list[ToolCall]()
        if self._latest.finish_reason is not None:
            text, calls = self._whole()
        elif self._tools is not None:
            text = text[: held_from(text, self._tools)]
        fresh, self._sent = text[self._sent :], max(self._sent, len(text))
        return fresh, calls, self._entries()

    def _whole(self) -> tuple[str, list[ToolCall]]:
        if self._tools is None:
            return self._latest.text, []
        return parse_tools(self._latest.text, self._tools)

    def _entries(self) -> list[dict[str, Any]]:
        """Return the tokens that were not told of yet, each with its log-probability and the likeliest others."""
        logprobs = self._latest.logprobs
        if logprobs is None:
            return []
        since, self._sent_tokens = self._sent_tokens, len(logprobs)
        ids = self._latest.token_ids[since : len(logprobs)]
        entries: list[dict[str, Any]] = []
        for token, around in zip(ids, logprobs[since:], strict=True):
            each = {int(other): _number(value) for other, value in around.items()}
            top = sorted(each.items(), key=lambda pair: -pair[1])
            entries.append(self._entry(int(token), each[int(token)]) | {
                "top_logprobs": [self._entry(*pair) for pair in top]})  # fmt: skip
        return entries

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(self._tokenizer, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class Reply:
    """An answer of one request, with as many choices as it asked for, in either of OpenAI's two shapes.

    `n`      choices of each prompt
    `chat`   chat completions, else completions
    `top`    log-probabilities of so many of the likeliest tokens are shown; None for none at all
    `usage`  a stream ends with the usage; its other events have none, and say so
    """

    def __init__(
        self,
        model: str,
        choices: Iterable[ReplyChoice],
        *,
        n: int = 1,
        chat: bool,
        top: int | None,
        usage: bool = False,
    ) -> None:
        self.choices, self.n = list(choices), n
        self._chat, self._top, self._usage = chat, top, usage
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.prompt_tokens = self.cached_tokens = 0
        self._head = {"id": self.id, "created": int(time.time()), "model": model}
        self._offsets = dict.fromkeys((choice.index for choice in self.choices), 0)

    def usage(self) -> dict[str, Any]:
        """Return the tokens of all prompts, of them those found in the cache, and of all choices."""
        made = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def whole(self) -> dict[str, Any]:
        """Return the answer of a request that is not streamed."""
        choices = [self._choice(choice, "message") for choice in self.choices]
        kind = "chat.completion" if self._chat else "text_completion"
        return self._document(kind, choices) | {"usage": self.usage()}

    def opening(self) -> list[bytes]:
        """Return what a stream begins with: of a chat, who speaks."""
        if not self._chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([self._shape(c, "delta", delta, [], None)]) for c in self.choices]

    def chunk(self, choice: ReplyChoice) -> bytes:
        """Return what is new of a choice as an event; nothing where nothing is."""
        made = self._choice(choice, "delta")
        said = made.get("delta") or made.get("text")
        return self._chunk([made]) if said or made["finish_reason"] or made["logprobs"] else b""

    def closing(self) -> list[bytes]:
        """Return what a stream ends with."""
        last = self._document(self._chunk_kind(), []) | {"usage": self.usage()}
        return [*([sse(last)] if self._usage else []), DONE]

    def _choice(self, choice: ReplyChoice, place: str) -> dict[str, Any]:
        text, calls, entries = choice.news()
        said: dict[str, Any] = {}
        if place == "message":
            said = {"role": "assistant", "content": text if text or not calls else None}
        elif text:
            said = {"content": text}
        if calls:
            said["tool_calls"] = [
                {
                    **({"index": at} if place == "delta" else {}),
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for at, call in enumerate(calls)
            ]
        if not self._chat:
            said = {"text": text}
        return self._shape(choice, place, said, entries, choice.finish_reason)

    def _shape(
        self,
        choice: ReplyChoice,
        place: str,
        said: dict[str, Any],
        entries: list[Any],
        ended: str | None,
    ) -> dict[str, Any]:
        shown = None
        if self._top is not None and entries:
            for entry in entries:
                del entry["top_logprobs"][self._top :]
            shown = {"content": entries} if self._chat else self._legacy(choice, entries)
        body = {place: said} if self._chat else said
        return {"index": choice.index, **body, "logprobs": shown, "finish_reason": ended}

    def _legacy(self, choice: ReplyChoice, entries: list[dict[str, Any]]) -> dict[str, Any]:
        """Return log-probabilities as completions have them."""
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offsets[choice.index])
            self._offsets[choice.index] += len(entry["token"])
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [
                {top["token"]: top["logprob"] for top in (*entry["top_logprobs"], entry)}
                for entry in entries
            ],
            "text_offset": offsets,
        }

    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        none = {"usage": None} if self._usage else {}
        return sse(self._document(self._chunk_kind(), choices) | none)

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **self._head,
            "object": kind,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Return the bytes of a token, also of one that is part of a character."""
    text: str = tokenizer.decode([token])
    name: Any = tokenizer.convert_ids_to_tokens(token)
    if "\ufffd" in text and isinstance(name, str):
        if name.startswith("<0x") and len(name) == 6:
            return bytes([int(name[3:5], 16)])
        if all(each in _BYTES for each in name):
            return bytes(_BYTES[each] for each in name)
    return text.encode("utf-8", "replace")


def _number(value: Any) -> float:
    return float(getattr(value, "logprob", value))

"""Answers in OpenAI's two shapes: completions and chats."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from quire._version import __version__
from quire.chat.tokens import token_name
from quire.serve.protocol import ChatRequest, CompletionRequest
from quire.serve.replies import TEXT_ALONE, AnswerMarks, News, Reply, ReplyChoice, finite
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
        marks: AnswerMarks = TEXT_ALONE,
    ) -> None:
        super().__init__(asked, model, tokenizer, num_prompts, marks)
        self._asked, self._tokenizer, self._marks = asked, tokenizer, marks
        self._hidden = {*tokenizer.all_special_tokens} if asked.skip_special_tokens else set[str]()
        if asked.return_tokens_as_token_ids and self._hidden:
            self._hidden = {f"token_id:{token}" for token in tokenizer.all_special_ids}
        for choice in self.choices:
            choice.tells_ids = asked.return_token_ids
            choice.names_ids = asked.return_tokens_as_token_ids
        self._prompts: dict[int, list[int]] = {}  # token ids to be told, by choice
        self._scores: list[Any] = [None] * num_prompts
        self._chat, self._top = isinstance(asked, ChatRequest), asked.num_logprobs
        self._usage = asked.stream_options is not None and asked.stream_options.include_usage
        name = f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}"
        own = {"created": int(time.time()), "model": model, "system_fingerprint": FINGERPRINT}
        self._head = {"id": name, **own}

    def begin(self, place: int, output: Any) -> None:
        super().begin(place, output)
        asked, ids, scores = self._asked, output.prompt_token_ids, output.prompt_logprobs
        if asked.return_token_ids:
            first = place * self.num_choices
            for index in range(first, first + self.num_choices):
                self._prompts[index] = ids
        if isinstance(asked, CompletionRequest) and asked.echo:
            text = asked.prompts()[place]
            if not isinstance(text, str) or asked.truncate_prompt_tokens:
                how = {"skip_special_tokens": asked.skip_special_tokens}
                text = self._tokenizer.decode(ids, **how, clean_up_tokenization_spaces=False)
            for choice in self.choices[place * self.num_choices :][: self.num_choices]:
                choice.echo = text, ids, scores or []
        if (top := asked.prompt_logprobs) is not None:
            self._scores[place] = [
                told and self._score(token, told, top)
                for token, told in zip(ids, scores, strict=True)
            ]

    def _score(self, own: int, told: Mapping[int, Any], top: int) -> dict[str, Any]:
        """Return what is told of a prompt's token in vLLM's shape: itself, then the likeliest ones."""
        return {
            str(token): {
                "logprob": finite(of.logprob),
                "rank": of.rank,
                "decoded_token": self._tokenizer.decode([token]),
            }
            for token, of in told.items()
            if token == own or of.rank <= top
        }

    def whole(self) -> dict[str, Any]:
        choices = [self._shape(each, each.news(self._top), "message") for each in self.choices]
        if self._asked.prompt_logprobs is not None and not self._chat:
            for choice in choices:
                choice["prompt_logprobs"] = self._scores[choice["index"] // self.num_choices]
        kind = "chat.completion" if self._chat else "text_completion"
        own = {"object": kind, "choices": choices, "usage": self._counts()}
        return self._head | own | self._prompt_ids(0) | self._told() | self.timings()

    def opening(self) -> list[bytes]:
        """Return the first event of a stream: of a chat, the role."""
        said = {
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        choices = self.choices if self._chat else []
        return [
            self._chunk([{"index": each.index, **said}], **self._prompt_ids(each.index))
            for each in choices
        ]

    def chunk(self, choice: ReplyChoice) -> bytes:
        """Return the events of a choice's news.

        The end of a chat's choice is an event of its own: clients end a tool call by it.
        """
        parts = [choice.news(self._top)]
        if self._chat and (reason := parts[0].finish_reason):
            parts = [parts[0]._replace(finish_reason=None), News("", "", [], [], reason)]
        return b"".join(self._news_event(choice, each) for each in parts if any(each))

    def _news_event(self, choice: ReplyChoice, news: News) -> bytes:
        told = self._told() if news.finish_reason else {}
        told |= {} if self._usage or not news.finish_reason else self.timings()
        return self._chunk([self._shape(choice, news, "delta")], **told)

    def broken(self, error: ApiError) -> bytes:
        return sse(error.document())

    def closing(self) -> list[bytes]:
        last = {"usage": self._counts()} | self.timings()
        return [self._chunk([], **last), DONE] if self._usage else [DONE]

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        end = {"usage": None} | more if self._usage else more
        return sse({**self._head, "object": kind, "choices": choices, **end})

    def _told(self) -> dict[str, Any]:
        told: dict[str, Any] = {"passages": self.passages} if self.passages else {}
        if self._chat and self._asked.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._scores[0]
        return told

    def _counts(self) -> dict[str, Any]:
        """Return the tokens of all prompts, of them those found in the cache, and of all choices."""
        made = self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": made,
            "total_tokens": self.prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        } | self._reasoning_counts()

    def _reasoning_counts(self) -> dict[str, Any]:
        if self._marks.reasoning is None:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}

    def _shape(self, choice: ReplyChoice, news: News, place: str) -> dict[str, Any]:
        """Return news of a choice in the shape of chats, as a "message" or a "delta", or of completions."""
        said: dict[str, Any] = {"text": news.text}
        reason = news.finish_reason
        if isinstance(self._asked, ChatRequest):
            said = {place: _said(news, place, is_old=bool(self._asked.functions))}
            if self._asked.functions and reason == "tool_calls":
                reason = "function_call"
        logprobs = None
        if news.entries and self._chat:
            logprobs = {"content": news.entries}
        elif news.entries:
            logprobs = _columns(news.entries, choice, self._hidden)
        end = {"logprobs": logprobs, "finish_reason": reason}
        ids: dict[str, Any] = {"token_ids": [*news.ids]} if choice.tells_ids else {}
        if not self._chat:
            ids |= self._prompt_ids(choice.index)
        return {"index": choice.index} | said | end | ids

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        """Return the token ids of the prompt of a choice, once: of a chat once for all of them."""
        ids = self._prompts.pop(index, None)
        if self._chat:
            self._prompts.clear()
        return {} if ids is None else {"prompt_token_ids": ids}


def _said(news: News, place: str, *, is_old: bool) -> dict[str, Any]:
    """Return news as a chat's message, or as a delta of one, which has nothing that is not new.

    `is_old`  whether calls have the form in which a message has one only
    """
    said: dict[str, Any] = {"content": news.text} if news.text else {}
    if place == "message":
        is_none = news.calls or news.reasoning
        said = {"role": "assistant", "content": news.text or (None if is_none else "")}
    if news.reasoning:
        said |= {"reasoning_content": news.reasoning, "reasoning": news.reasoning}
    for at, call in enumerate(news.calls):
        made = {"id": call.id or f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
        index = {"index": at} if place == "delta" else {}
        function = {"name": call.name, "arguments": call.arguments}
        if is_old:
            return said | {"function_call": function}
        said.setdefault("tool_calls", []).append(index | made | {"function": function})
    return said


def _columns(
    entries: list[dict[str, Any]], choice: ReplyChoice, hidden: set[str]
) -> dict[str, Any]:
    """Return log-probabilities as completions have them, of a choice whose text goes on by these tokens.

    hidden  tokens that its text does not show
    """
    tops = [
        None if entry["top_logprobs"] is None else (*entry["top_logprobs"], entry)
        for entry in entries
    ]

    def name(entry: dict[str, Any]) -> str:
        return entry["token"] if choice.names_ids else token_name(entry["bytes"])

    return {
        "tokens": [name(entry) for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [top and {name(e): e["logprob"] for e in top} for top in tops],
        "text_offset": [
            choice.offsets.take(b"" if entry["token"] in hidden else entry["bytes"])
            for entry in entries
        ],
    }

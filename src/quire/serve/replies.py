"""An engine's outputs as an answer: whole, or as chunks of a stream."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from quire.chat.conversation import ChatMessage, answer_message
from quire.chat.reasoning import ReasoningFormat
from quire.chat.tokens import TextOffsets, token_bytes
from quire.chat.tools import ToolCall, held_from, parse_tools, without_cut_call
from quire.engines.loop import RequestMetrics
from quire.serve.protocol import ChatRequest, CompletionRequest
from quire.web.errors import ApiError

SINCE_S = time.time() - time.monotonic()
"""The time since 1970 at which the clock of engines was 0."""


ENGINE = uuid.uuid4().hex[:8]
"""The name of this process's engine, whose steps are counted."""


class AnswerMarks(NamedTuple):
    """Formats of an answer's parts; None for a part that it does not have.

    `tools`            name of the format of tool calls
    `tells_reasoning`  whether the reasoning is told
    `has_short_ids`    whether ids of calls have nine letters
    """

    tools: str | None = None
    reasoning: ReasoningFormat | None = None
    tells_reasoning: bool = True
    has_short_ids: bool = False


TEXT_ALONE = AnswerMarks()


class News(NamedTuple):
    """The unsent part of a choice: reasoning, text, tool calls, tokens with log-probabilities, reason of its end.

    `ids`  token ids, if they are told
    """

    reasoning: str
    text: str
    calls: list[ToolCall]
    entries: list[dict[str, Any]]
    finish_reason: str | None
    ids: Sequence[int] = ()


class ReplyChoice:
    """One choice of an answer, with the text held back as a possible tag or tool call.

    After every call: sent text + held text == the choice's content, up to a tool call.
    `num_tokens`  that were generated so far
    `tells_ids`   whether its news have token ids
    `names_ids`   whether tokens with log-probabilities are named by their ids
    `echo`        prompt that its news begin with: text, token ids, and what was told of these
    """

    def __init__(self, index: int, tokenizer: Any, marks: AnswerMarks) -> None:
        self.index, self.num_tokens = index, 0
        self._tokenizer, self._tools, self._reasoning = tokenizer, marks.tools, marks.reasoning
        self._tells_reasoning, self._has_short_ids = marks.tells_reasoning, marks.has_short_ids
        self._num_reasoned = self._num_chars = self._num_entries = self._num_ids = 0
        self.tells_ids = self.names_ids = False
        self.offsets = TextOffsets()
        self._latest: Any = None
        self.echo: tuple[str, list[int], list[Any]] | None = None

    def take(self, output: Any) -> bool:
        """Take the choice as it is now, a `CompletionOutput`; return whether it had not ended before."""
        was_open = self._latest is None or self._latest.finish_reason is None
        self._latest, self.num_tokens = output, output.num_tokens
        return was_open

    @property
    def token_ids(self) -> list[int]:
        """The tokens that were generated so far."""
        return self._latest.token_ids

    def message(self) -> ChatMessage:
        """Return it as the message that the next prompt has of it, once it has ended."""
        thought, text, calls = "", self._latest.text, list[ToolCall]()
        if self._reasoning is not None:
            thought, text = self._reasoning.split(text, is_whole=True)
        if self._tools is not None:
            text, calls = parse_tools(text, self._tools)
        return answer_message(thought, text, calls)

    @property
    def stop_string(self) -> str | None:
        """The text of `stop` that ended it."""
        ended_by = self._latest.stop_reason
        return ended_by if isinstance(ended_by, str) else None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of its reasoning so far."""
        latest, reasoning = self._latest, self._reasoning
        if latest is None or reasoning is None:
            return 0
        return reasoning.num_tokens(self._tokenizer, latest.token_ids)

    def news(self, top: int | None) -> News:
        """Return what can be told now; of each token `top` of the likeliest, None for no log-probabilities."""
        text, reason, calls = self._latest.text, self._latest.finish_reason, list[ToolCall]()
        thought = ""
        if self._reasoning is not None:
            thought, text = self._reasoning.split(text, is_whole=reason is not None)
        new_thought = thought[self._num_reasoned :] if self._tells_reasoning else ""
        self._num_reasoned = len(thought)
        if self._tools is not None and reason is None:
            text = text[: held_from(text, self._tools)]
        elif self._tools is not None:
            text, calls = parse_tools(text, self._tools)
            if self._has_short_ids:
                calls = [each._replace(id=each.id or uuid.uuid4().hex[:9]) for each in calls]
            if reason == "length" and not calls:
                text = without_cut_call(text, self._tools)
            reason = "tool_calls" if calls and reason == "stop" else reason
        fresh, self._num_chars = text[self._num_chars :], max(self._num_chars, len(text))
        entries = [] if top is None else self._fresh_entries(top)
        if self.echo is not None:
            said, ids, told = self.echo
            fresh, self.echo = said + fresh, None
            entries = entries if top is None else self._entries(ids, told, top) + entries
        since, self._num_ids = self._num_ids, self.num_tokens
        ids = self._latest.token_ids[since : self.num_tokens] if self.tells_ids else ()
        return News(new_thought, fresh, calls, entries, reason, ids)

    def _fresh_entries(self, top: int) -> list[dict[str, Any]]:
        logprobs: list[Any] = self._latest.logprobs or []
        since, self._num_entries = self._num_entries, len(logprobs)
        ids = self._latest.token_ids[since : len(logprobs)]
        return self._entries(ids, logprobs[since:], top)

    def _entries(self, ids: list[int], logprobs: list[Any], top: int) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = []
        for token, around in zip(ids, logprobs, strict=True):
            if around is None:  # the first of a prompt
                entries.append(self._entry(token, None) | {"top_logprobs": None})
                continue
            values = {each: finite(getattr(of, "logprob", of)) for each, of in around.items()}
            likeliest = sorted(values, key=lambda each: -values[each])[:top]
            tops = [self._entry(each, values[each]) for each in likeliest]
            entries.append(self._entry(token, values[token]) | {"top_logprobs": tops})
        return entries

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = token_bytes(self._tokenizer, token)
        name = f"token_id:{token}" if self.names_ids else raw.decode("utf-8", "replace")
        return {"token": name, "logprob": logprob, "bytes": list(raw)}


def finite(logprob: float) -> float:
    """Return a log-probability as JSON has it: of a token that cannot be, vLLM's number."""
    return max(float(logprob), -9999.0)


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def timings_of(told: RequestMetrics, cached: int, prompt: int, made: int) -> dict[str, Any]:
    """Return the times of a request that has ended by llama-server's names, and the engine's steps.

    Counted in tokens: those found of the prompt, all of it, and the answer's.
    """
    start, end = told.scheduled_ts or told.arrival_time, told.last_token_ts or told.arrival_time
    first = told.first_token_ts or end
    return {
        "cache_n": cached,
        "prompt_n": prompt - cached,
        "prompt_ms": _ms(first - start),
        "predicted_n": made,
        "predicted_ms": _ms(end - first),
        "queue_ms": _ms(start - told.arrival_time),
        "arrived_at": round(SINCE_S + told.arrival_time, 6),
        "arrived_step": told.arrival_step,
        "prompt_steps": told.prompt_steps,
        "last_step": told.last_step,
        "engine": ENGINE,
    }


class Reply(ABC):
    """An answer to one request, with all its choices; each API has its shape.

    `prompt_tokens`  tokens of all prompts
    `cached_tokens`  those of them that were found in the cache
    `passages`       what was reused as passages, of the prompts that have some
    `num_choices`    choices of each prompt
    """

    def __init__(
        self,
        asked: ChatRequest | CompletionRequest,
        model: str,
        tokenizer: Any,
        num_prompts: int = 1,
        marks: AnswerMarks = TEXT_ALONE,
    ) -> None:
        self.choices = [ReplyChoice(at, tokenizer, marks) for at in range(num_prompts * asked.n)]
        self.prompt_tokens = self.cached_tokens = 0
        self.passages = list[Any]()
        self.num_choices, self._begun = asked.n, set[int]()
        self._is_one, self._metrics = num_prompts * asked.n == 1, RequestMetrics(0.0)

    def take(self, place: int, output: Any) -> Iterator[ReplyChoice]:
        """Yield the choices of which the engine says more, a `RequestOutput` for the prompt at this place."""
        if place not in self._begun:
            self._begun.add(place)
            self.begin(place, output)
        self._metrics = output.metrics
        for made in output.outputs:
            choice = self.choices[place * self.num_choices + int(made.index)]
            if choice.take(made):
                yield choice

    def begin(self, place: int, output: Any) -> None:
        """Take what is told of the prompt at a place, with the first output for it."""
        self.prompt_tokens += len(output.prompt_token_ids)
        self.cached_tokens += output.num_cached_tokens
        if output.passages is not None:
            self.passages.append(output.passages)

    @property
    def completion_tokens(self) -> int:
        """The tokens of all choices so far."""
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def reasoning_tokens(self) -> int:
        """The tokens of the reasoning of all choices so far."""
        return sum(choice.reasoning_tokens for choice in self.choices)

    def timings(self) -> dict[str, Any]:
        """Return what the answer tells of its computation: nothing before the end, or of several prompts or answers."""
        if not self._is_one or self._metrics.last_token_ts is None:
            return {}
        counts = self.cached_tokens, self.prompt_tokens, self.completion_tokens
        return {"timings": timings_of(self._metrics, *counts)}

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """Return the answer of a request that is not streamed."""

    @abstractmethod
    def opening(self) -> list[bytes]:
        """Return the first events of a stream."""

    @abstractmethod
    def chunk(self, choice: ReplyChoice) -> bytes:
        """Return the new part of a choice as events; nothing if there is none."""

    @abstractmethod
    def broken(self, error: ApiError) -> bytes:
        """Return the event of a stream that has begun and ends with an error."""

    @abstractmethod
    def closing(self) -> list[bytes]:
        """Return the last events of a stream."""

"""Requests while they run: their answers, and when each of these ends."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from quire.core.tokens import INT32, IntArray
from quire.engines.loop.outputs import CompletionOutput, FinishReason, RequestOutput
from quire.engines.loop.params import SamplingParams
from quire.engines.loop.text import TextStream
from quire.errors import QuireError
from quire.scheduling import Job

NO_TOKEN = -1


class EngineRequest:
    """What somebody asked for, and its answers.

    max_tokens  new tokens of each answer at most
    own_stops   ids of the model's tokens that end an answer; `stops`: these and those that were asked for
    """

    def __init__(
        self,
        request_id: str,
        prompt: tuple[str | None, list[int]],
        params: SamplingParams,
        max_tokens: int,
        own_stops: Sequence[int],
    ) -> None:
        self.request_id = request_id
        self.prompt, self.prompt_ids = prompt
        self.params = params
        self.max_tokens = max_tokens
        self.own_stops = own_stops
        self.stops = sorted({*own_stops, *(params.stop_token_ids or ())})
        self.answers: list[Answer] = []
        self.error: QuireError | None = None

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason is not None for answer in self.answers)

    def output(self) -> RequestOutput:
        """Return all that is there of it."""
        first = self.answers[0].job
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            first.num_cached if first is not None else 0,
            self._told(),
            self.finished,
            self.error,
        )

    def _told(self) -> list[CompletionOutput]:
        """Return its answers: of those among which the best are chosen, none before all have ended."""
        num_told = self.params.n
        if len(self.answers) == num_told:
            return [answer.output() for answer in self.answers]
        if not self.finished:
            return []
        best = sorted(self.answers, key=lambda answer: -answer.likeliness)[:num_told]
        told = [replace(answer.output(), index=index) for index, answer in enumerate(best)]
        return [replace(e, logprobs=None) for e in told] if self.params.logprobs is None else told


class Answer:
    """One of the n answers to a request; it is the key under which its tokens are sampled.

    job         computes it; until the first token is sampled, all answers but the first one have none
    num_tokens  tokens that were looked at, up to the one that ends it
    """

    def __init__(self, request: EngineRequest, index: int, stream: TextStream) -> None:
        self.request = request
        self.index = index
        self.job: Job | None = None
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._logprobs: list[Any] | None = None if request.params.num_logprobs is None else []
        self._stream = stream
        self._num_read = 0
        self._text = ""

    @property
    def num_left(self) -> int:
        """Tokens that it may still have."""
        return self.request.max_tokens - (self.job.num_generated if self.job is not None else 0)

    @property
    def likeliness(self) -> float:
        """The mean log-probability of its tokens; -inf without any."""
        told = (self._logprobs or [])[: self.num_tokens]
        values = [next(iter(each.values())).logprob for each in told]  # its own stands first
        return sum(values) / len(values) if values else -inf

    def told(self, logprobs: Sequence[Any]) -> None:
        """Take what is told of its next tokens."""
        if self._logprobs is not None:
            self._logprobs.extend(logprobs)

    def ends(self) -> bool:
        """Look at the tokens that are new; set the reasons at the first one that ends it, and return whether one does."""
        request, params = self.request, self.request.params
        for token in self._generated(self.num_tokens):
            self.num_tokens += 1
            if token in request.stops and self.num_tokens > params.min_tokens:
                self._read(self.num_tokens - (not params.include_stop_str_in_output))
                self.end("stop", None if token in request.own_stops else token)
            elif params.stop and self._read(self.num_tokens) is not None:
                self.end("stop", self._stream.stopped)
            elif self.num_tokens == request.max_tokens:
                self._read(self.num_tokens)
                self.end("length")
            if self.finish_reason is not None:
                return True
        return False

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Set why it ended, unless it has ended before."""
        if self.finish_reason is None:
            if reason in ("abort", "error"):
                self.num_tokens = self._num_generated
                self._read(self.num_tokens)
            self.finish_reason, self.stop_reason = reason, stop_reason
            self._text += self._stream.finish()

    def output(self) -> CompletionOutput:
        """Return all of it."""
        num_tokens, job = self.num_tokens, self.job
        if self.finish_reason is None:
            num_tokens = self._num_generated
            self._read(num_tokens)
        told = None if self._logprobs is None else self._logprobs[:num_tokens]
        start, known = (0, array("i")) if job is None else (job.prompt_len, job.tokens)
        why = self.finish_reason, self.stop_reason
        return CompletionOutput(self.index, self._text, num_tokens, told, *why, start, known)

    @property
    def _num_generated(self) -> int:
        return 0 if self.job is None else self.job.num_generated

    def _read(self, stop: int) -> str | None:
        """Bring the text up to so many tokens, and return the text that ends it, if one was found."""
        self._text += self._stream.feed(self._generated(self._num_read, stop))
        self._num_read = stop
        return self._stream.stopped

    def _generated(self, start: int, stop: int | None = None) -> list[int]:
        """Return the generated tokens [start, stop)."""
        if self.job is None:
            return []
        first = self.job.prompt_len
        end = None if stop is None else first + stop
        return self.job.tokens[first + start : end].tolist()


class AnswerBatch:
    """The answers that a step samples; kept while steps repeat.

    answers      one for each sample of the step
    siblings     (first, other): answers that begin with this step, beside the first one of their request
    speculating  answers that want tokens guessed ahead
    requests     all of theirs, by id
    """

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = answers
        self.siblings = [
            (answer, other)
            for answer in answers
            if len(answer.request.answers) > 1
            for other in answer.request.answers
            if other.job is None
        ]
        self.speculating = [answer for answer in answers if answer.request.params.speculation]
        self.requests = {answer.request.request_id: answer.request for answer in answers}
        stops = [answer.request.stops for answer in answers]
        self._stops = np.full((len(stops), max(map(len, stops), default=0)), NO_TOKEN, INT32)
        for row, ids in zip(self._stops, stops, strict=True):
            row[: len(ids)] = ids
        self._left = np.array([answer.num_left for answer in answers], np.int64)
        self._reads = np.array([bool(answer.request.params.stop) for answer in answers], np.bool_)

    @property
    def everyone(self) -> list[Answer]:
        """Whom tokens are chosen for: the answers, then those that begin beside them."""
        return (
            [*self.answers, *(other for _, other in self.siblings)]
            if self.siblings
            else self.answers
        )

    def due(self, tokens: IntArray) -> list[Answer]:
        """Take one token of everyone; return those that may end with it."""
        num_answers = len(self.answers)
        self._left -= 1
        found = (self._stops == tokens[:num_answers, None]).any(axis=1)
        found |= (self._left <= 0) | self._reads
        indices: list[int] = found.nonzero()[0].tolist()
        due = [self.answers[index] for index in indices]
        return due + self.everyone[num_answers:]

    def tell(self, tokens: Sequence[IntArray], logprobs: Sequence[Any]) -> None:
        """Hand out what is told of the tokens of everyone."""
        ends = np.cumsum([len(each) for each in tokens]).tolist()
        for answer, end, each in zip(self.everyone, ends, tokens, strict=True):
            answer.told(logprobs[end - len(each) : end])

"""Requests while they run, and their answers; names as users of vLLM know them."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal

import numpy as np
from torch import Tensor

from quire.chat.text import TextStream
from quire.core import Scope
from quire.core.stats import Missed
from quire.core.tokens import INT32
from quire.engines.companions import PassageAccount, PromptInSegments
from quire.engines.loop.params import SamplingParams
from quire.engines.loop.sampling import AnswerRules, Logprob, Sampled, logprobs_of
from quire.engines.steps import PromptStep
from quire.errors import QuireError, RequestFailed
from quire.scheduling import Job

NO_TOKEN = -1
Scores = list[dict[int, Logprob] | None]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CompletionOutput:
    """One of the answers to a request, as far as it is there.

    text           what the tokens say, without what a stop string may still begin with; "" without a tokenizer
    num_tokens     how many there are
    logprobs       per token what `SamplingParams.logprobs` asks for; None: nothing
    finish_reason  None while it goes on
    stop_reason    the stop string or the id of the stop token that ended it; None for the model's own end
    """

    index: int
    text: str
    num_tokens: int
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    _start: int = field(repr=False)
    _known: "array[int]" = field(repr=False, compare=False)

    @property
    def token_ids(self) -> list[int]:
        """The tokens, a list of its own each time: who streams seldom asks for all from the beginning."""
        return self._known[self._start : self._start + self.num_tokens].tolist()


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request in seconds of the engine's clock; None: not yet.

    It has the arrival, the end of the wait for a turn, the first token, and the last token or the end.

    load_s           seconds after its turn in which tiers were asked and loaded from
    loaded_tokens    tokens that came from each tier, by name
    missed           why its hit ended where it did
    num_preemptions  known at its end
    arrival_step     steps of the engine before it came
    prompt_steps     steps that admitted and computed its prompt; those after preemptions too
    last_step        the last step before its end, known then
    """

    arrival_time: float
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    load_s: float = 0.0
    loaded_tokens: Mapping[str, int] = field(default_factory=dict[str, int])
    missed: Missed | None = None
    num_preemptions: int = 0
    arrival_step: int = 0
    prompt_steps: list[PromptStep] = field(default_factory=list[PromptStep])
    last_step: int = 0

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from its coming to its first token."""
        return None if (first := self.first_token_ts) is None else first - self.arrival_time


@dataclass(slots=True)
class RequestOutput:
    """A request with news: all of its answers from their beginning.

    num_cached_tokens  tokens of the prompt whose KV was there when the request was first admitted
    error              why it ended before its time, with `finish_reason` "error"
    prompt_logprobs    per token of the prompt what `SamplingParams.prompt_logprobs` asks for, as far as it was computed;
                       None first, which nothing precedes; None alone: nothing
    passages           what became of the passages of a prompt in segments, where the engine reuses them
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: QuireError | None = None
    passages: PassageAccount | None = None
    prompt_logprobs: Scores | None = None


@dataclass(slots=True)
class EngineStats:
    """Counters of an engine since it was made, and its queues at present."""

    steps: int = 0
    requests: int = 0
    failed_requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    running: int = 0
    waiting: int = 0


class EngineRequest:
    """A request and its answers.

    own_stops  ids of the model's tokens that end an answer; `stops`: these and the request's own
    """

    def __init__(
        self,
        request_id: str,
        prompt: tuple[str | None, list[int]],
        params: SamplingParams,
        scope: Scope,
        own_stops: Sequence[int],
        *,
        metrics: RequestMetrics,
    ) -> None:
        self.request_id = request_id
        self.prompt, self.prompt_ids = prompt
        self.params, self.scope, self.own_stops = params, scope, own_stops
        self.stops = sorted({*own_stops, *(params.stop_token_ids or ())})
        self.answers: list[Answer] = []
        self.num_ended = 0
        self.metrics = metrics
        self.error: QuireError | None = None
        self.passages: PromptInSegments | None = None
        self.prompt_logprobs: Scores | None = None if params.prompt_logprobs is None else [None]

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return self.num_ended == len(self.answers)

    def take_scores(self, first: int, logits: Tensor) -> None:
        """Take the logits `[rows, vocab]` of the prompt's tokens from the `first` on, each told of the next one."""
        if self.prompt_logprobs is not None:
            tokens = np.array(self.prompt_ids[first + 1 :][: len(logits)], INT32)
            tops = [self.params.prompt_logprobs or 0] * len(tokens)
            self.prompt_logprobs[first + 1 :] = logprobs_of(tokens, logits, tops)

    def failed_by(self, error: Exception) -> RequestFailed:
        """Return its error where a step that it was in could not be computed."""
        failed = RequestFailed(
            f"request {self.request_id!r} ended in a step that could not be computed: "
            f"{type(error).__name__}: {error}; other requests go on, and it may be sent again"
        )
        failed.__cause__ = error
        return failed

    def note_end(self, now: float) -> None:
        """Note when its last answer ended, and how often its answers were preempted."""
        preempted = sum(each.num_preempted for each in self.answers)
        self.metrics = replace(self.metrics, last_token_ts=now, num_preemptions=preempted)

    def output(self) -> RequestOutput:
        """Return all that is there of it."""
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_ids,
            self.answers[0].num_found,
            self._told(),
            self.finished,
            self.metrics,
            self.error,
            None if self.passages is None else self.passages.report,
            self.prompt_logprobs,
        )

    def _told(self) -> list[CompletionOutput]:
        """Return its answers: of those among which the best are chosen, none before all have ended."""
        num_told = self.params.n
        if len(self.answers) == num_told:
            return [answer.output(index) for index, answer in enumerate(self.answers)]
        if not self.finished:
            return []
        best = sorted(self.answers, key=lambda answer: -answer.likeliness)[:num_told]
        told = [answer.output(index) for index, answer in enumerate(best)]
        return [replace(e, logprobs=None) for e in told] if self.params.logprobs is None else told


class Answer(Job):
    """One of the n answers to a request: the job that computes it, and its output so far.

    rules     what decides its tokens; None: each is the likeliest
    num_told  tokens that were looked at, up to the one that ends it
    most_told at most so many; of a prompt that is scored alone none, though one is sampled behind it
    """

    def __init__(
        self, request: EngineRequest, rules: AnswerRules | None, stream: TextStream, **job: Any
    ) -> None:
        start_by, adapter = job.pop("start_by"), job.pop("adapter")
        super().__init__(**job | {"max_tokens": max(job["max_tokens"], 1)})
        self.most_told = job["max_tokens"]
        self.start_by, self.adapter = start_by, adapter
        self.request = request
        self.rules = rules
        self.num_told = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._logprobs: list[dict[int, Logprob]] = []
        self._stream = stream

    @property
    def likeliness(self) -> float:
        """The mean log-probability of its tokens; -inf without any."""
        told = self._logprobs[: self.num_told]
        values = [next(iter(each.values())).logprob for each in told]  # its own stands first
        return sum(values) / len(values) if values else -inf

    @property
    def failure(self) -> QuireError | None:
        """Why no token can follow: it is in a grammar that leads nowhere."""
        grammar = self.rules and self.rules.grammar
        return grammar.failure if grammar else None

    def take(self, logprobs: Sequence[dict[int, Logprob]]) -> None:
        """Take what is told of its next tokens."""
        self._logprobs.extend(logprobs)

    def ends(self) -> bool:
        """Check the new tokens, set the reasons at the first that ends the answer; return whether one does."""
        request, params = self.request, self.request.params
        if not self.most_told:
            self.end("length")
        while self.finish_reason is None and self.num_told < self.num_generated:
            token = self.tokens[self.prompt_len + self.num_told]
            self.num_told += 1
            if token in request.stops and self.num_told > params.min_tokens:
                self._read(self.num_told - (not params.include_stop_str_in_output))
                self.end("stop", None if token in request.own_stops else token)
            elif params.stop and self._read(self.num_told) is not None:
                self.end("stop", self._stream.stopped)
            elif self.num_told == self.max_tokens:
                self.end("length")
        return self.finish_reason is not None

    def end(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Set why it ended, unless it has ended before."""
        if self.finish_reason is None:
            if reason != "stop":
                self.num_told = min(self.num_generated, self.most_told)
                self._read(self.num_told)
            self.finish_reason, self.stop_reason = reason, stop_reason
            self.request.num_ended += 1
            self._stream.finish()

    def output(self, index: int) -> CompletionOutput:
        """Return all of it."""
        num_told = self.num_told
        if self.finish_reason is None:
            num_told = self.num_generated
            self._read(num_told)
        asks = self.request.params.num_logprobs is not None
        return CompletionOutput(
            index,
            self._stream.text,
            num_told,
            self._logprobs[:num_told] if asks else None,
            self.finish_reason,
            self.stop_reason,
            self.prompt_len,
            self.tokens,
        )

    def _read(self, num_tokens: int) -> str | None:
        """Bring the text up to so many tokens, and return the text that ends it, if one was found."""
        if not self._stream.tells:
            return None
        unread = slice(self.prompt_len + self._stream.num_tokens, self.prompt_len + num_tokens)
        self._stream.feed(self.tokens[unread].tolist())
        return self._stream.stopped


class AnswerBatch:
    """The answers that a step samples; kept while steps repeat.

    speculating  those that want tokens guessed ahead
    requests     all of theirs, by id
    """

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.answers = answers
        self.rules = [answer.rules for answer in answers]
        self.speculating = [answer for answer in answers if answer.request.params.speculation]
        self.requests = {answer.request.request_id: answer.request for answer in answers}
        stops = [answer.request.stops for answer in answers]
        self._stops = np.full((len(stops), max(map(len, stops), default=0)), NO_TOKEN, INT32)
        for row, ids in zip(self._stops, stops, strict=True):
            row[: len(ids)] = ids
        self._left = np.array([answer.max_tokens - answer.num_generated for answer in answers])
        self._reads = np.array([bool(answer.request.params.stop) for answer in answers], np.bool_)

    def begin(self, now: float) -> None:
        """Note when the requests that are new here were admitted, and had their first token."""
        for request in self.requests.values():
            if request.metrics.first_token_ts is None:
                first = request.answers[0]
                told = {"scheduled_ts": first.started, "missed": first.missed}
                request.metrics = replace(request.metrics, first_token_ts=now, **told)

    def take(self, sampled: Sampled) -> Sequence[Answer]:
        """Take the sampled tokens of each; return the answers that may end with them."""
        for answer, told in zip(self.answers, sampled.logprobs or (), strict=False):
            answer.take(told or ())
        if isinstance(sampled.tokens, list):
            return self.answers
        self._left -= 1
        found = (self._stops == sampled.tokens[:, None]).any(axis=1)
        found |= (self._left <= 0) | self._reads
        indices: list[int] = found.nonzero()[0].tolist()
        return [self.answers[index] for index in indices]

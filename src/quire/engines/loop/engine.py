"""The engine: many requests at once, each shared prefix computed once and read once per step."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any, Unpack, cast

from quire.chat.text import TextStream
from quire.core import CacheManager, Scope
from quire.engines.companions import EngineCompanion, checked_passages
from quire.engines.hf.storage import stack_of, watchers_of
from quire.engines.loop.answers import (
    Answer,
    AnswerBatch,
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestMetrics,
    RequestOutput,
)
from quire.engines.loop.computing import TransformersModel
from quire.engines.loop.pace import EnginePace
from quire.engines.loop.params import SamplingParams
from quire.engines.loop.requests import (
    Prompt,
    RequestOptions,
    job_terms,
    most_tokens,
    read_prompt,
    with_params,
)
from quire.engines.loop.sampling import Sampler, propose
from quire.engines.loop.settings import EngineSettings, scored_tokens
from quire.engines.purging import PurgeableEngine
from quire.engines.steps import StepNotes
from quire.engines.thread_guard import ThreadGuard, guarded, undivided
from quire.errors import ConfigError, QuireError
from quire.scheduling import Job, Scheduler

_CONTEXT = 8
"""Tokens at the end of a prompt that say how the text of its answer begins."""


class Engine(PurgeableEngine):
    """Generates for many requests at once with a model of transformers, or a `GgufModel`.

        engine = Engine(model, tokenizer, kv_memory="4GiB")
        outputs = engine.generate(["Once upon", "Once more"], SamplingParams(max_tokens=64))

    Or step by step: `add_request`, then `step` while `has_unfinished()`. `options` are those of `EngineSettings`.
    It belongs to one thread; `AsyncEngine` gives it one. Raises `ConfigError`, and `UnsupportedModel` for a model
    whose rows cannot be packed.
    """

    def __init__(self, model: Any, tokenizer: Any = None, **options: Any) -> None:
        settings = EngineSettings(**options)
        passages = checked_passages(settings.passages)
        outlives = bool(settings.tiers or (passages and passages.outlives))
        self.adapters = tuple(settings.adapters)
        bind = getattr(model, "in_engine", None) or partial(TransformersModel, model)
        self._bound: Any = bind(settings, outlives=outlives)  # an `EngineModel`
        groups = settings.groups(layout := self._bound.layout)
        self.tokenizer = tokenizer
        self.max_model_len = settings.longest(self._bound.max_positions, groups, layout)
        self.eos_ids, self.own_sampling = self._bound.eos_ids, self._bound.own_sampling
        with ExitStack() as opened:
            self.tiers, is_own = stack_of(settings.tiers)
            if self.tiers is not None and is_own:
                opened.push(self.tiers)
            self.manager = CacheManager(
                block_size=settings.block_size,
                groups=groups,
                policy=settings.policy,
                watchers=[*watchers_of(self.tiers), *settings.watchers],
                clock=settings.clock,
            )
            self._forward = self._bound.forward(self.manager, debug_nan=settings.debug_nan)
            self._guard = ThreadGuard("engine")
            self._stats, self._numbers = EngineStats(), count()
            self._companions: list[EngineCompanion] = [StepNotes(self._stats)]
            self._companions += self._forward.companions
            if self.tiers is not None:
                from quire.engines.loop.tiers import EngineTiers  # noqa: PLC0415 - needs the extra `tiers`

                below = EngineTiers(self.tiers, self._forward, self._bound.fingerprint)
                self._companions.append(below)
            if settings.max_inter_token_s is not None:
                self._companions.append(EnginePace(settings.max_inter_token_s))
            if passages is not None:
                self._companions.append(passages.in_engine(self._forward, self._bound, self._guard))
            for each in self._companions:
                opened.callback(each.close)
            self._vocab_size = self._bound.vocab_size
            self._sampler = Sampler(self._vocab_size, tokenizer=tokenizer, eos_ids=self.eos_ids)
            self._settings, self._clock = settings, settings.clock
            self._is_closed = False
            self._begin()
            self._opened = opened.pop_all()

    def _begin(self) -> None:
        """Begin with nothing to do."""
        hooks = {name: self._each(name) for name in ("bring_up", "opened", "keep")}
        self.scheduler = Scheduler(self.manager, self._settings, **hooks)
        self.scheduler.scored_tokens = scored_tokens(self._vocab_size)
        self._requests: dict[str, EngineRequest] = {}
        self._news: dict[str, EngineRequest] = {}
        self._batch = AnswerBatch([])

    # -- requests --------------------------------------------------------------------------

    @guarded
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> str:
        """Queue a request and return its id.

        Raises `TokensError`, `ConfigError`, `ScopeError`, and `OutOfBlocks` for one that can never fit; as all
        that is asked of an engine, `CacheBusy` while another thread asks.
        """
        given, bound = params or SamplingParams(), self.scope(options.get("scope"))
        return self._add(prompt, given, bound, options, request_id)

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        bound: Scope,
        options: RequestOptions,
        request_id: str | None = None,
    ) -> str:
        """Queue a request for the model that a scope is bound to."""
        if not isinstance(params, SamplingParams):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"params is SamplingParams(...), got {params!r:.60}")
        if request_id is None:
            names = map(str, self._numbers)
            request_id = next(name for name in names if not self.knows(name))
        elif self.knows(request_id):
            raise ConfigError(f"a request {request_id!r} runs already; each has an id of its own")
        if self._is_closed:
            raise ConfigError("the engine was closed; make another one")
        if params.stop and self.tokenizer is None:
            raise ConfigError(
                "stop needs the text: Engine(model, tokenizer), or use stop_token_ids"
            )
        text, tokens, segments = read_prompt(prompt, self.tokenizer)
        most = most_tokens(tokens, params.max_tokens, self._vocab_size, self.max_model_len)
        ids, now = tokens.tolist(), self._clock()
        adapter = bound.lora if bound.lora in self.adapters else None
        job = job_terms(options, now) | {"prompt": tokens, "scope": bound, "max_tokens": most}
        own_stops = () if params.ignore_eos else self.eos_ids
        metrics = RequestMetrics(now, arrival_step=self._stats.steps)
        request = EngineRequest(request_id, (text, ids), params, bound, own_stops, metrics=metrics)
        for rules in self._sampler.rules(params, ids):
            stream = TextStream(self.tokenizer, params, ids[-_CONTEXT:])
            request.answers.append(Answer(request, rules, stream, adapter=adapter, **job))
        if params.prompt_logprobs is not None:
            request.answers[0].num_scored = 0
        elif segments is not None:
            for each in self._companions:
                each.segmented(request, segments)
        self._enter(request)
        return request_id

    @undivided(QuireError)
    def _enter(self, request: EngineRequest) -> None:
        first, *first.twins = request.answers
        self.scheduler.add(first)
        self._requests[request.request_id] = request
        self._stats.requests += 1
        self._stats.prompt_tokens += len(request.prompt_ids)

    @guarded
    def abort(self, request_id: str) -> None:
        """End a request at once, without further output; an ended or unknown one is ignored."""
        if (request := self._requests.get(request_id)) is not None:
            self._end(request, "abort")
        self._news.pop(request_id, None)

    def knows(self, request_id: str) -> bool:
        """Whether a request has not ended, or `step` has not told that it did."""
        return request_id in self._requests or request_id in self._news

    def has_unfinished(self) -> bool:
        """Whether some requests have not ended, or ended with news that `step` has not told, or passages wait."""
        return bool(self._requests or self._news) or self._is_pending

    def stats(self) -> EngineStats:
        """Return a copy of the counters."""
        now = self.scheduler.queues
        return replace(self._stats, running=now.num_running, waiting=now.num_waiting)

    def scope(self, scope: Scope | None = None) -> Scope:
        """Return a scope as the manager knows it, bound to the present model. Raises `ScopeError`, `ConfigError`."""
        return self._bound.scope(scope)

    def in_tiers(self, tokens: list[int], scope: Scope) -> dict[str, int]:
        """Return the tokens of a prompt that each tier would add to those in the pools, by name.

        `scope`: a bound one.
        """
        return {k: n for each in self._companions for k, n in each.held(tokens, scope).items()}

    def prepare(self, params: SamplingParams) -> None:
        """Compile the grammar of a later request, on any thread, so that queueing it is quick. Raises `ConfigError`."""
        self._sampler.grammar(params)

    def reset(self) -> None:
        """Drop all requests, without further output, and all that is cached.

        After `Interrupted` it is the only call left, beside `close`.
        """
        with self._guard.mending():
            for each in self._companions:
                each.recover()
            self.manager.reset()
            self._forward.reset()
            self._begin()

    def close(self) -> None:
        """Abort running requests, write cached blocks to the tiers, and close tiers that were opened here."""
        if self._guard.cut_off:
            self.reset()
        with self._guard:
            for request_id in list(self._requests):
                self.abort(request_id)
            self._is_closed = True
            self._opened.close()

    @property
    def is_settled(self) -> bool:
        """Whether no block of a request that has ended is held: tiers have copied all that they were given."""
        return all(each.is_settled for each in self._companions)

    @property
    def guard(self) -> ThreadGuard:
        """The engine's lock: within `with engine.guard` other threads are refused."""
        return self._guard

    def when_computing(self, call: Callable[[], object]) -> None:
        """Call a function whenever the model begins a step, as other threads have time then.

        An exception of the function fails the step.
        """
        self._forward.before_forward = call

    # -- steps -----------------------------------------------------------------------------

    @guarded
    @undivided()
    def step(self) -> list[RequestOutput]:
        """Compute one step; return the requests that have news, each from its beginning.

        An exception in the model's forward ends the requests of that step, with `error` set, and no other.
        """
        self._advance()
        news, self._news = self._news, {}
        return [request.output() for request in news.values()]

    @guarded
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Return the outputs for prompts, in their order, when all are there.

        `params`: for all of them, or one for each. Raises what `add_request` raises, and the error of a request
        that failed; the others are aborted then.
        """
        asked = with_params(prompts, params)
        bound = self.scope(options.get("scope"))
        others = {*self._requests, *self._news}
        try:
            ids = [self._add(prompt, each, bound, options) for prompt, each in asked]
            requests = [self._requests[request_id] for request_id in ids]
            for request in requests:
                while not request.finished:
                    self._advance()
                if request.error is not None:
                    raise request.error
            while self._is_pending:
                self._advance()
        finally:
            if not self._guard.cut_off:
                for request_id in {*self._requests, *self._news} - others:
                    self.abort(request_id)
        return [request.output() for request in requests]

    # -- within ----------------------------------------------------------------------------

    @undivided()
    def _advance(self) -> None:
        """Compute one step, if there is any; what has news is in `_news` then."""
        if self._requests:
            self._end_outdated()
        for answer in self._batch.speculating:
            if answer.state == "running":
                answer.drafts = propose(answer.known(), answer.request.params.speculation)
        for each in self._companions:
            each.before_step(self.scheduler)
        step = self.scheduler.plan(self._clock())
        given_up, self.scheduler.given_up = self.scheduler.given_up, []
        for job, error in given_up:
            self._end(cast("Answer", job).request, "error", error)
        if step is None:
            return
        if not step.repeats:
            self._batch = AnswerBatch(cast("list[Answer]", step.sampled))
        begun_s = perf_counter()
        try:
            for each in self._companions:
                each.before_forward()
            logits = self._forward.logits(step, self._bound)
            for job, rows in step.scored:
                cast("Answer", job).request.take_scores(job.num_scored, logits[rows])
            if step.spread is not None:
                logits = logits[step.spread]
            sampled = self._sampler.sample(self._batch.rules, logits, step.drafts)
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            self._forward.reset()  # it may have prepared the step in part
            self._fail((job.request for job in cast("list[Answer]", step.jobs)), error)
            return
        for each in self._companions:
            each.observe(step, perf_counter() - begun_s)
        self.scheduler.complete(step, new := sampled.tokens)
        self._stats.steps += 1
        self._stats.generated_tokens += sum(map(len, new)) if isinstance(new, list) else len(new)
        self._news.update(self._batch.requests)
        if not step.repeats:
            self._batch.begin(self._clock())
        for answer in self._batch.take(sampled):
            if answer.failure is not None:
                self._end(answer.request, "error", answer.failure)
            elif answer.finish_reason is None and answer.ends():
                self._finish(answer)

    def _each(self, hook: str) -> Callable[[Job], None]:
        """Return a hook of the scheduler that calls that of each companion."""
        calls = [getattr(each, hook) for each in self._companions]

        def every(job: Job) -> None:
            for call in calls:
                call(job)

        return every

    @property
    def _is_pending(self) -> bool:
        return any(each.is_pending for each in self._companions)

    def _end_outdated(self) -> None:
        """End the requests that came to a model which has changed since: what they have computed is none of its own."""
        if gone := self._bound.outdated(each.scope for each in self._requests.values()):
            changed = [each for each in self._requests.values() if each.scope.model in gone]
            self._fail(changed, ConfigError("the model was changed since the request came"))

    def _fail(self, requests: Iterable[EngineRequest], error: Exception) -> None:
        """End the requests of a step that could not be computed."""
        for request in {request.request_id: request for request in requests}.values():
            self._end(request, "error", request.failed_by(error))

    @undivided()
    def _end(
        self, request: EngineRequest, reason: FinishReason, error: QuireError | None = None
    ) -> None:
        """End all answers of a request that have not ended."""
        if request.finished:
            return
        request.error = error
        self._stats.failed_requests += error is not None
        self._news[request.request_id] = request
        for answer in request.answers:
            if answer.finish_reason is None:
                answer.end(reason)
                self._finish(answer)

    def _finish(self, answer: Answer) -> None:
        """Give back what an answer that has ended holds."""
        request = answer.request
        if answer.state in ("waiting", "running"):
            self.scheduler.finish(answer)
        self._stats.preemptions += answer.num_preempted
        if answer is request.answers[0]:
            self._stats.cached_tokens += answer.num_found
        if request.finished:
            request.note_end(self._clock())
            for each in self._companions:
                each.ended(request)
            del self._requests[request.request_id]

"""Passages in an engine: the KV of a prompt's segments is placed in its blocks at admission."""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from quire.core import Scope
from quire.engines.companions import EngineCompanion
from quire.engines.loop.answers import EngineRequest
from quire.engines.loop.computing import Forward
from quire.engines.models.inventory import Inventory
from quire.engines.models.working_cache import WorkingCache
from quire.engines.packed.bound_model import BoundModel
from quire.engines.packed.model import locked
from quire.engines.segments import Tokens
from quire.engines.thread_guard import ThreadGuard
from quire.errors import ConfigError, NotRelocatable
from quire.scheduling import Job, Scheduler, Step
from quire.tensors import KV, gather_into, scatter
from quire.tensors.kinds import layer_kinds
from quire.tiers.purging import Purged
from quire_passages import (
    PassagePlan,
    Passages,
    PassagesReport,
    Segments,
    Variant,
    report_of,
)
from quire_passages.earned import FORWARD_ROWS, EarnedRows
from quire_passages.hf.audit import MOST_ANSWER, Audit
from quire_passages.hf.blending import Blending, moved_rows
from quire_passages.hf.capture import PassageKV, captured, grow
from quire_passages.hf.holder import PassageHolder
from quire_passages.hf.runs import Runs
from quire_passages.in_blocks import copied, refusal_of
from quire_passages.selectors import Rows
from quire_passages.variants import in_prompt
from quire_passages.verdict import PolicyEstimate

_NONE = np.empty(0, np.int64)

_MOST_PENDING = 64
"""Answered prompts whose passages wait to be captured, and those that wait to be compared; of more, the oldest go."""


class PassagePrompt:
    """The segments of one request, and the results for them.

    num_lacking  passages that the store lacks, which are captured after the answer
    num_exact    tokens whose K and V are exact; None: all of them
    is_moved     whether tokens were answered behind moved passages: a later exact plan, after a preemption, is not told
    """

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.plan: PassagePlan | None = None
        self.report: PassagesReport | None = None
        self.num_lacking = 0
        self.num_exact: int | None = None
        self.is_moved = False
        self.estimate: PolicyEstimate | None = None

    def tell(self, plan: PassagePlan, rows: Rows) -> None:
        """Make the report of a plan; passages that the store lacks count as captured: they are, after the answer."""
        if not (self.is_moved and plan.is_exact):
            self.report = replace(report_of(plan, rows, self.estimate), captured=self.num_lacking)


class EnginePassages(EngineCompanion):
    """The passages of an engine; `bring_up` and `opened` are a scheduler's hooks.

    A prompt in segments is planned when it is admitted; if passages are reused, its K and V are computed and placed at
    once, between two steps, and its sequence stores what is exact alone.

    Isolated captures: passages that the store lacks are computed after the answer, one between two steps, by the model
    that answered, or not at all. While requests wait, they take at most the settings' share of the rows of requests.
    Contextual ones are copied from a prompt's blocks before these are given back, as far as they are exact.
    """

    def __init__(
        self,
        forward: Forward,
        bound: BoundModel,
        guard: ThreadGuard,
        settings: Passages,
    ) -> None:
        model = forward.model.model
        self._forward = forward
        self._manager = forward.manager
        self._model = model
        self._runs = Runs(model, layer_kinds(model.config))
        self._computed = bound.computed
        self._settings = settings
        self._refusal = refusal_of(forward)
        self._pending: deque[tuple[Scope, Segments, set[bytes]]] = deque(maxlen=_MOST_PENDING)
        self._to_compare: deque[tuple[Scope, Segments, list[int]]] = deque(maxlen=_MOST_PENDING)
        self._given: deque[Segments] = deque(() if self._refusal else settings.prompts)
        self._audit: Audit | None = None
        self._earned = EarnedRows(settings.share)
        self._head: tuple[Inventory, bytes, PassageKV] | None = None
        self._has_changed = False
        self.passages = PassageHolder(self._runs, bound.scope, bound.computed, guard, settings)

    def bring_up(self, job: Job) -> None:
        """Plan a prompt before its blocks are looked up.

        Of a prompt that reuses passages only the exact blocks are to be stored.
        """
        if (prompt := _prompt_of(job)) is None:
            return
        cached = self._manager.probe(job.known(), job.scope).num_tokens
        scope = cast("Scope", job.scope)
        plan = self._plan(prompt.segments, scope, cached)
        prompt.plan, prompt.num_lacking = plan, self._num_lacking(scope, plan)
        prompt.is_moved &= any(each.num_generated for each in cast("Any", job).request.answers)
        prompt.estimate = self.passages.estimate(scope)
        prompt.tell(plan, _NONE)
        if plan.fallback is None and job.seq is None:
            asked = job.terms.get("store_until")
            exact = plan.exact_until
            job.terms["store_until"] = exact if asked is None else min(exact, asked)

    def opened(self, job: Job) -> None:
        """Place the KV of an opened prompt up to its question, if the plan says so.

        Without room, or with a model that cannot do it, the prompt is computed like any other.
        """
        prompt, seq = _prompt_of(job), job.open_seq
        first = prompt and prompt.plan
        if (
            prompt is None
            or first is None
            or first.fallback is not None
            or seq.computed >= _end_of(first)
        ):
            return
        plan = self._plan(prompt.segments, cast("Scope", job.scope), seq.computed)
        if plan.fallback is not None or plan.exact_until < first.exact_until:
            prompt.tell(plan, _NONE)
            return
        variants = [cast("Variant", each.variant) for each in plan.placed]
        try:
            with self.passages.store.pin(variants), locked(self._model):
                rows = self._placed(job, plan)
        except Exception as error:  # noqa: BLE001 - a model may raise anything, and there may be no room
            reason = f"passages could not be placed: {error}"
            plan, rows = replace(plan, fallback=reason), _NONE
        else:
            prompt.num_exact = min(plan.exact_until, prompt.num_exact or plan.exact_until)
            prompt.is_moved |= not plan.is_exact
        for each in variants:
            self.passages.store.use(each)
        prompt.tell(plan, rows)

    def keep(self, job: Job) -> None:
        """Copy the passages of a prompt that add to those that are stored, as far as its blocks are exact."""
        if (prompt := _prompt_of(job)) is None or self._settings.capturing != "contextual":
            return
        scope, seq, segments = cast("Scope", job.scope), job.open_seq, prompt.segments
        blending = self._tried(scope)
        if isinstance(blending, NotRelocatable):
            return
        exact = seq.computed if prompt.num_exact is None else min(seq.computed, prompt.num_exact)
        new = [
            in_prompt(segments, at, copied(self._forward, seq, *segments.spans[at]))
            for at in self.passages.adding(segments, scope, exact, blending)
        ]
        self.passages.keep(scope, new)

    def segmented(self, request: EngineRequest, segments: Segments) -> None:
        """Take note of a new request whose prompt came in segments."""
        request.passages = PassagePrompt(segments)

    def before_step(self, scheduler: Scheduler) -> None:
        """Capture a passage or compare a prompt, if no request waits or the budget of rows pays for it."""
        has_time = not scheduler.queues.num_waiting
        if has_time or self._earned.is_left:
            rows = self.capture_next() or self.compare_next()
            self._earned.spend(0 if has_time else rows)

    def observe(self, step: Step, seconds: float) -> None:
        """Note the rows of requests, which pay for captures while others wait."""
        self._earned.earn(len(step.tokens) + FORWARD_ROWS)

    def before_forward(self) -> None:
        """Raise `ConfigError`, once, where the model was changed while passages of a step were placed."""
        changed, self._has_changed = self._has_changed, False
        if changed:
            raise ConfigError("the model was changed while passages were placed")

    def ended(self, request: EngineRequest) -> None:
        """Note that the passages of an answered prompt may be captured, and whether it is to be compared."""
        prompt, scope = cast("PassagePrompt | None", request.passages), request.scope
        if prompt is None or request.error:
            return
        blending = self._tried(scope)
        if self._settings.capturing == "isolated" and self.passages.captures(scope, blending):
            self._pending.append((scope, prompt.segments, set()))
        first = request.answers[0]
        num_told = min(first.num_told, MOST_ANSWER)
        if num_told and self.passages.is_due(scope, prompt.segments, blending):
            said = first.known(first.prompt_len, first.prompt_len + num_told)
            self._to_compare.append((scope, prompt.segments, said.tolist()))

    @property
    def figures(self) -> dict[str, Any]:
        """The verdicts of all tenants, as "passages"."""
        told = self.passages.figures
        return {"passages": told} if told else {}

    @property
    def is_pending(self) -> bool:
        """Whether passages wait to be captured, or prompts to be compared."""
        return bool(self._pending or self._to_compare or self._given or self._audit)

    def compare_next(self) -> float:
        """Do the next piece of comparing a prompt with the full forward; return its rows, 0 where none waits."""
        if self._audit is None:
            if self._given:
                with locked(self._model):
                    self._audit = self.passages.next_given(self._given)
            elif self._to_compare:
                self._audit = self.passages.audit(*self._to_compare.popleft())
            if self._audit is None:
                return 0.0
        rows = self.passages.advance(self._audit)
        if self._audit.has_ended:
            self._audit = None
        return rows

    def capture_next(self) -> int:
        """Compute and keep one passage of those that wait; return its rows, 0 where none waits.

        Each is captured once: one may have to go for another.
        """
        while self._pending:
            scope, segments, tried = self._pending[0]
            blending = self._tried(scope)
            missing = (
                []
                if isinstance(blending, NotRelocatable)
                else self.passages.missing(segments, scope, blending)
            )
            missing = [ids for ids in missing if ids.tobytes() not in tried]
            if len(missing) < 2:
                self._pending.popleft()
            if missing:
                tried.add(missing[0].tobytes())
                found = self._computed(scope, partial(self._captured, segments, missing[:1]))
                kept = self.passages.keep(scope, found or ())
                if not kept and self._pending and self._pending[0][1] is segments:
                    self._pending.popleft()  # the store has no room for it, or the model is another
                if found:
                    return missing[0].size + FORWARD_ROWS
        return 0

    def recover(self) -> None:
        """Forget all captures, and passages that wait to be captured."""
        self._drop_waiting()
        self._head, self._has_changed = None, False
        self.passages.store.clear()

    def purge(self, scope: Scope, is_own: Callable[[Scope], bool], timeout_s: float) -> int:
        """Drop the captures of some scopes, and their waiting prompts; return the captures."""
        for waiting in (self._pending, self._to_compare):
            others = [each for each in waiting if not is_own(each[0])]
            waiting.clear()
            waiting.extend(cast("Any", others))
        if self._audit is not None and is_own(self._audit.bound):
            self._audit.wipe()
            self._audit = None
        if self._head is not None:  # whose it is, nobody knows
            self._head[2].wipe()
            self._head = None
        return self.passages.purge(scope, is_own, timeout_s)

    def barring(self, scope: Scope) -> AbstractContextManager[object]:
        """Have the warm tier take and give nothing of a tenant until the end of a block."""
        return self.passages.barring(scope)

    def purge_tiers(self, scope: Scope, timeout_s: float) -> dict[str, Purged]:
        """Purge the warm tier, as "passages", within `barring`."""
        return self.passages.purge_tiers(scope, timeout_s)

    def close(self) -> None:
        """Drop what waits to be captured or compared, and close the warm tier."""
        self._drop_waiting()
        self._given.clear()
        self.passages.close()

    def _drop_waiting(self) -> None:
        self._pending.clear()
        self._to_compare.clear()
        self._audit = None

    def _num_lacking(self, scope: Scope, plan: PassagePlan) -> int:
        segments, blending = plan.segments, self._tried(scope)
        if isinstance(blending, NotRelocatable):
            return 0
        if self._settings.capturing == "contextual":
            exact = plan.exact_until if plan.fallback is None else segments.num_tokens
            return len(self.passages.adding(segments, scope, exact, blending))
        if self._settings.capturing == "none" or not self.passages.captures(scope, blending):
            return 0
        return len(self.passages.missing(segments, scope, blending))

    def _tried(self, scope: Scope) -> Blending | NotRelocatable:
        if self._refusal is not None:
            return self._refusal
        with locked(self._model):
            return self.passages.tried(scope)

    def _plan(self, segments: Segments, scope: Scope, cached: int) -> PassagePlan:
        return self.passages.plan(segments, scope, cached, self._tried(scope), self._settings)

    def _placed(self, job: Job, plan: PassagePlan) -> Rows:
        """Write K and V of a prompt's tokens up to its question into the blocks of its sequence.

        Returns the rows of moved passages that were computed again.
        """
        seq, scope, stop = job.open_seq, cast("Scope", job.scope), _end_of(plan)
        start, num_exact = seq.computed, plan.exact_until // self._manager.block_size
        # A resumed sequence was opened by another plan.
        seq.store_until = min(seq.store_until, num_exact)
        self._manager.reserve(seq, stop - start)
        self._forward.copy()

        def placed(seen: Inventory) -> Rows:
            past, rows = self._blended(job, plan)
            scatter(self._forward.pools[0], seq.block_ids(0), start, _rows(past, start, stop))
            self._forward.rows(seq, plan.segments.tokens, rows, seen)
            return moved_rows(plan, rows)

        rows = self._computed(scope, placed)
        if rows is None:
            self._has_changed = True
            raise ConfigError("the model was changed meanwhile")
        self._manager.commit(seq, job.known(start, stop))
        return rows

    def _blended(self, job: Job, plan: PassagePlan) -> tuple[WorkingCache, Rows]:
        """Return a working cache of a prompt's tokens up to its question, and the rows that are to be computed over it."""
        seq, tokens, pool = job.open_seq, plan.segments.tokens, self._forward.pools[0]
        start, stop = seq.computed, _end_of(plan)
        past = self._runs.past(
            plan.segments.num_tokens
        )  # with room for the question, which may be asked
        if start:
            kv = cast("PassageKV", cast("Variant", plan.placed[0].variant).kv)
            grow(past, kv, start)
            gather_into(pool, seq.block_ids(0), start, _rows(past, 0, start))
            self._runs.hold(past, tokens[:start])
        if plan.exact_until > start:
            self._runs.feed(past, tokens[start : plan.exact_until], start)
        blending = cast("Blending", self.passages.tried(cast("Scope", job.scope)))
        return past, blending.begin(past, plan, stop)

    def _captured(
        self, segments: Segments, passages: Sequence[Tokens], seen: Inventory
    ) -> list[Variant]:
        """Return captures of passages behind a head; none where the model fails, as nobody asked for them."""
        try:
            return self._runs.isolated(segments.head, passages, self._head_of(segments.head, seen))
        except Exception:  # noqa: BLE001 - a model may raise anything
            return []

    def _head_of(self, head: Tokens, seen: Inventory) -> PassageKV | None:
        """Return K and V of a head, computed once under an inventory of the model, for passages that are captured one by one."""
        text = head.tobytes()
        if not text:
            return None
        if self._head is None or self._head[0] is not seen or self._head[1] != text:
            past = self._runs.past(head.size)
            self._runs.feed(past, head)
            kv = captured(past, 0, head.size)
            assert kv is not None
            self._head = seen, text, kv
        return self._head[2]


def _prompt_of(job: Job) -> PassagePrompt | None:
    """Return the segments of the request that a job answers, where it has any."""
    return cast("Any", job).request.passages  # every job of an engine is an `Answer`


def _end_of(plan: PassagePlan) -> int:
    """Return the tokens before a prompt's question."""
    return plan.segments.spans[-1][1]


def _rows(past: WorkingCache, start: int, stop: int) -> list[KV]:
    """Return K and V of some columns of all layers, as views."""
    return [past.kv_layers[index].row(0, start, stop) for index in sorted(past.kv_layers)]

"""Jobs: the tokens to generate, and their progress; and the limits of a schedule."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Items
from math import inf, isfinite
from operator import attrgetter
from typing import Literal

import msgspec
import numpy as np

from quire.config import as_int, check_count
from quire.core import Scope, Sequence
from quire.core.stats import Missed
from quire.core.terms import RequestTerms
from quire.core.tokens import INT32, IntArray, TokenIds, check_sign, key_of
from quire.errors import ConfigError, TokensError
from quire.scope import ScopePart, check_scope


class Limits(msgspec.Struct, frozen=True):
    """The limits of a schedule. Raises `ConfigError`.

    `max_running`      jobs that run at once
    `max_step_tokens`  tokens that a step computes: one of each job that decodes, the rest of prompts
    `max_prefill_tokens`        tokens of one prompt in a step; None for as many as the step has left
    `watermark`        share of the blocks that an admission leaves free while others run
    `max_passed`       so many jobs that came later are admitted before one that waits; then nobody passes it. Those of
                       other tenants count only for a tenant that has no more running jobs than they
    """

    max_running: int = 64
    max_step_tokens: int = 2048
    max_prefill_tokens: int | None = None
    watermark: float = 0.01
    max_passed: int = 16

    def __post_init__(self) -> None:
        for name in ("max_running", "max_step_tokens", "max_passed"):
            check_count(name, getattr(self, name))
        if self.max_prefill_tokens is not None:
            check_count("max_prefill_tokens", self.max_prefill_tokens)
        if self.max_step_tokens <= self.max_running:
            raise ConfigError(
                f"a step of {self.max_step_tokens} tokens leaves prompts no room beside "
                f"{self.max_running} jobs that decode; allow more tokens, or fewer jobs"
            )
        if not 0 <= self.watermark < 1:
            raise ConfigError(f"watermark is a share from 0 to below 1, got {self.watermark!r}")


class Job:
    """One text to be generated. Its caller makes it; the scheduler alone changes it while it is in one.

    `max_tokens`  new tokens at most: the scheduler has room for so many, its caller ends the job
    `scope`       who may share its blocks
    `priority`    higher ones are served first: one that waits takes the place of a lower one that runs
    `deadline`    on the scheduler's clock, in seconds: then it is given up; None for never
    `terms`       of `CacheManager.open`

    `tokens`      the known ones, prompt and generated; a slice is a copy (a view of all would keep it from growing)
    `twins`       jobs of the same prompt, set by the caller before it is added: a token is sampled for each of them
                  when the prompt is computed, and they fork from it; until then they are nowhere, and end with it
    `num_scored`  leading tokens of the prompt whose logits were told; its caller sets it to 0, before it is added, for a
                  prompt of which all are wanted. Until they are told it finds no KV but what it has computed itself
    `adapter`     of the model that computes it, set by the caller before it is added: a step has jobs of one alone; None
                  for the model by itself
    `drafts`      int32, guesses of what follows, set by the caller before a step is planned; the plan takes them
    `start_by`    on the scheduler's clock, in seconds, set by the caller before it is added: then it is given up if it
                  has not begun; inf once it has
    `started`     when it was admitted first, on the scheduler's clock; None before
    `seq`         its sequence, open while it runs
    `number`      of the scheduler's jobs, in order of arrival
    `num_found`   tokens that were found at its first admission; `missed`: why no more
    `num_preempted`, `num_yielded`  how often it was preempted, and how often of these for another job that waited
    `patience`    so many jobs that came later may still be admitted before it; without any it is urgent
    `num_due`     tokens that it had left to compute when it came
    `num_owed`    tokens of steps that it is owed, as the oldest prompt of its tenant and adapter, and shorter ones got
    `back_at`     the step before which it does not come back, where it was preempted for another one
    `is_overdue`  whether others within their shares passed it so often that equal ones do not take its blocks
    `behind`      the job that computes its prefix, and up to which token
    `urgency`     its priority, or the highest of those that wait for its prefix, or that it held up when it began
    Raises `TokensError`, `ScopeError`, `ConfigError`.
    """

    def __init__(
        self,
        prompt: TokenIds,
        max_tokens: int,
        *,
        scope: Scope | None = None,
        priority: int = 0,
        deadline: float | None = None,
        terms: RequestTerms | None = None,
    ) -> None:
        key = key_of(prompt)
        check_sign(key)
        if not key:
            raise TokensError("the prompt is empty; a job needs at least one token")
        if scope is not None:
            check_scope(scope)
        if deadline is not None and not isfinite(deadline):
            raise ConfigError(f"deadline must be a finite time in seconds, got {deadline!r}")
        self.tokens = array("i", bytes(key))
        self.prompt_len = len(self.tokens)
        self.num_scored = self.prompt_len - 1
        self.max_tokens = check_count("max_tokens", max_tokens)
        self.scope = scope
        self.priority = self.urgency = as_int("priority", priority)
        self.deadline = inf if deadline is None else deadline
        self.start_by = inf
        self.adapter: str | None = None
        self.terms: RequestTerms = terms or {}
        self.twins: Items[Job] = ()
        self.drafts: IntArray | None = None
        self.started: float | None = None
        self.seq: Sequence | None = None
        self.state: Literal["new", "waiting", "running", "finished"] = "new"
        self.number = self.num_found = self.num_preempted = 0
        self.missed: Missed | None = None
        self.num_yielded = self.num_due = self.back_at = 0
        self.num_owed = 0.0
        self.patience = 1
        self.is_overdue = False
        self.behind: tuple[Job, int] | None = None

    @property
    def open_seq(self) -> Sequence:
        """Its sequence, of a job that runs."""
        assert self.seq is not None
        return self.seq

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt's and those generated."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_computed(self) -> int:
        """Tokens whose KV exists."""
        return self.seq.computed if self.seq is not None else 0

    @property
    def num_left(self) -> int:
        """Known tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def scores(self) -> bool:
        """Whether logits of its prompt are wanted, beside those of the last token."""
        return self.num_scored < self.prompt_len - 1

    @property
    def ends_by(self) -> float:
        """The time at which it is given up as it is now."""
        return min(self.deadline, self.start_by)

    @property
    def tenant(self) -> ScopePart:
        """The tenant of its scope, whose jobs share what a schedule has with those of others."""
        return self.scope.tenant if self.scope is not None else None

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Its place among its tenant's jobs, lowest first: who is urgent, by priority, by what is left, by arrival."""
        if not self.patience:
            return (False, 0, 0, self.number)
        return (True, -self.urgency, self.num_due, self.number)

    def known(self, start: int = 0, stop: int | None = None) -> IntArray:
        """Return known tokens [start, stop), int32, as a copy."""
        return np.frombuffer(self.tokens[start:stop], INT32)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.number} {self.state}: {self.prompt_len} tokens of prompt, "
            f"{self.num_generated} of {self.max_tokens} generated, {self.num_computed} computed>"
        )


BY_RANK: Callable[[Job], tuple[bool, int, int, int]] = attrgetter("rank")

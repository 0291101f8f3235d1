"""Requests of a log as jobs of the engine's scheduler: their answers are known, and when these came."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from math import inf

import numpy as np

from quire import Scope
from quire.core.tokens import INT32, IntArray
from quire.scheduling import Job
from quire_sim.caches.prompts import CachePrompt


class LoggedJob(Job):
    """A request of a log whose answer is known.

    `first_s`, `end_s`  when the answer began and ended, in seconds; set when the request starts
    """

    def __init__(self, number: int, prompt: CachePrompt, answer: IntArray | None = None) -> None:
        told = prompt.output if answer is None else answer
        self.answer = told if len(told) else np.zeros(1, INT32)
        tenant = prompt.tenant or None
        scope = Scope(salt=prompt.scope or None, model=prompt.model or None, tenant=tenant)
        super().__init__(prompt.tokens, len(self.answer), scope=scope)
        self.place, self.prompt = number, prompt
        self.sent_s, self.first_s, self.end_s = prompt.time_s or 0.0, 0.0, 0.0

    @property
    def told_s(self) -> float:
        """When its answer began by the log; inf if the log does not tell it."""
        told = self.prompt.first_s
        if len(self.answer) == 1:
            told = self.prompt.duration_s or told or 0.0
        return inf if told is None else self.sent_s + told

    @property
    def next_s(self) -> float:
        """When its next token comes."""
        share = self.num_generated / max(self.max_tokens - 1, 1)
        return self.first_s + (self.end_s - self.first_s) * share

    def tokens_by(self, now: float) -> IntArray:
        """Return the tokens that it generates up to a time, but for the last one."""
        whole = self.end_s - self.first_s
        share = (now - self.first_s) / whole if whole > 0 else 1.0
        return self.answer[self.num_generated : int(share * (self.max_tokens - 1) + 1e-3)]


class SteppedJob(LoggedJob):
    """A request of a log whose server told the steps that computed it.

    Steps have numbers, `after` is that of the step done last. A step that a request tells, and that came too early for
    it here, is made up for by the very next one.
    """

    def __init__(self, number: int, prompt: CachePrompt) -> None:
        assert prompt.steps is not None
        self.steps = prompt.steps
        answer = np.zeros(max(self.steps.num_tokens, 1), INT32)  # what its text does not tell is 0
        known = prompt.output[: len(answer)]
        answer[: len(known)] = known
        super().__init__(number, prompt, answer)
        self._numbers = [number for number, _, _ in self.steps.prompts]
        self._first_token = next(step for step, _, left in self.steps.prompts if not left)

    @property
    def known_s(self) -> float:
        """When its answer ended by the log: all requests of its steps were sent before."""
        return self.sent_s + (self.prompt.duration_s or self.steps.answered_s)

    @property
    def queued_s(self) -> float:
        """When its first step began, by the log's clock."""
        return min(self.sent_s + self.steps.queued_s, self.known_s)

    def next_step(self, after: int) -> int | None:
        """Return the next step at which it comes, its prompt is computed, or it ends; None if that is past."""
        at = bisect_right(self._numbers, after)
        told = [*self._numbers[at : at + 1], self.steps.last_step]
        if self.state == "new":
            told = [self.steps.arrived_step + 1]
        elif not self.num_generated or self.num_left > 1:
            told = told[:-1]
        return min((each for each in told if each > after), default=None)

    def may_start(self, number: int) -> bool:
        """Whether a step may admit it: one that is told, or any where those are past."""
        at = bisect_left(self._numbers, number)
        return at == len(self._numbers) or self._numbers[at] == number

    def part(self, number: int) -> tuple[int, int]:
        """Return the tokens of its prompt that a step computed, and those left behind it; 0, 0 for none."""
        at = bisect_left(self._numbers, number)
        step, *part = self.steps.prompts[min(at, len(self._numbers) - 1)]
        return (part[0], part[1]) if step == number else (0, 0)

    def tokens_in(self, number: int) -> int:
        """Return the most tokens of its prompt in a step: all that are left where the next token came."""
        if not self.may_start(number):
            return 0
        tokens, left = self.part(number)
        return min(tokens, self.num_left - 1) if left else self.num_left

    def tokens_through(self, number: int, num_steps: int) -> IntArray:
        """Return the tokens that it generates in so many steps up to one, but for the last one."""
        first, last = self._first_token, self.steps.last_step
        end = self.num_generated + num_steps - 1
        if self.max_tokens - 1 > last - first > 0:  # some steps made several
            share = min((number - first) / (last - first), 1.0)
            end = int(share * (self.max_tokens - 1) + 1e-3)
        return self.answer[self.num_generated : end]

"""Requests of a log as jobs of the engine's scheduler: their answers are known, and when these came."""

from __future__ import annotations

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

    def __init__(self, number: int, prompt: CachePrompt) -> None:
        self.answer = prompt.output if len(prompt.output) else np.zeros(1, INT32)
        scope = Scope(salt=prompt.scope or None, model=prompt.model or None)
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
    """A request of a log whose server told the steps that computed it."""

    def __init__(self, number: int, prompt: CachePrompt) -> None:
        assert prompt.steps is not None
        super().__init__(number, prompt)
        self.steps = prompt.steps
        self._told = dict(self.steps.prompts)

    @property
    def known_s(self) -> float:
        """When its answer ended by the log: all requests of its steps were sent before."""
        return self.sent_s + (self.prompt.duration_s or self.steps.answered_s)

    def next_step(self, after: int) -> int:
        """Return the next step that computes its prompt or ends it; the very next one if it is late."""
        if self.started is None:
            return max(self.steps.prompts[0][0], after + 1)
        if later := self._later(after):
            return later[0]
        return max(self.steps.last_token, after + 1) if self.num_generated else after + 1

    def tokens_in(self, number: int, num_left: int) -> int:
        """Return the tokens of its prompt that a step computes, of those left: all of them in the last one."""
        if number == self.steps.first_token or not self._later(number):
            return num_left
        return min(self._told.get(number, 0), num_left)

    def _later(self, number: int) -> list[int]:
        return [each for each in self._told if each > number]

    def tokens_through(self, number: int) -> IntArray:
        """Return the tokens that it generates up to the end of a step, but for the last one."""
        first, last = self.steps.first_token, self.steps.last_token
        share = (number - first) / (last - first) if number < last else 1.0
        return self.answer[self.num_generated : int(share * (self.max_tokens - 1) + 1e-3)]

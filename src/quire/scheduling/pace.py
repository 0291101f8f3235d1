"""The pace of a schedule: prompts are cut so that no step takes longer than wanted."""

from math import sqrt

from quire.scheduling.fit import CostFit
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.step import Step

FIRST = 64
"""The prompt tokens of a step before the cost of any was measured."""

MARGIN = 0.95
"""The share of the wanted time that a step is planned for: planning and sending take the rest."""

LEAST = 0.5
"""Prompts get at least this share of the time that the step takes without them."""

GROWTH = 2
"""A step may have so many times the prompt tokens of the largest steps measured lately."""

OFTEN = 8
"""One of so many steps that only decode is measured."""


class StepPace:
    """Bounds the tokens of prompts in a step by the time that they take, as learned from the steps before.

    `target_s`  seconds that a step may take
    """

    def __init__(self, target_s: float) -> None:
        self._target_s, self._fit = target_s, CostFit(5)
        self._largest, self._num_steps = 0.0, 0

    def before_step(self, scheduler: Scheduler) -> None:
        """Say how many tokens of prompts the next step may have."""
        if scheduler.queues.num_waiting or scheduler.queues.num_prefilling:
            scheduler.prompt_tokens = self._affordable(scheduler) if self._largest else FIRST

    def _affordable(self, scheduler: Scheduler) -> int:
        """Return the tokens of prompts for which there is time beside jobs that decode."""
        queues = scheduler.queues
        contexts = sum(job.num_computed for job in queues.decoding)
        base_s = self._fit.seconds((1, len(queues.decoding), contexts, 0, 0))
        allowed_s = max(self._target_s * MARGIN - base_s, base_s * LEAST)
        start = max((job.num_computed for job in queues.prefilling), default=0)
        *_, token_s, pair_s = self._fit.weights
        slope = token_s + pair_s * start
        # pair_s / 2 * n² + slope * n = allowed_s, in the form that holds for pair_s = 0 too
        root = slope + sqrt(slope**2 + 2 * pair_s * allowed_s)
        most = GROWTH * self._largest
        return max(int(min(2 * allowed_s / root, most) if root else most), 1)

    def observe(self, step: Step, seconds: float) -> None:
        """Learn from a step that was computed."""
        num, self._num_steps = step.num_decodes, self._num_steps + 1
        if num == len(step.jobs) and self._num_steps % OFTEN:
            return
        starts, lengths = step.starts[num:].astype(float), step.lengths[num:].astype(float)
        tokens, pairs = float(lengths.sum()), float((lengths * (starts + lengths / 2)).sum())
        self._fit.observe((1, num, float(step.starts[:num].sum()), tokens, pairs), seconds)
        if tokens:
            self._largest = max(tokens, self._largest + (tokens - self._largest) / OFTEN)

"""The steps of an engine that computed each request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.engines.companions import EngineCompanion

if TYPE_CHECKING:
    from quire.scheduling import Job, Step


class StepCounter(Protocol):
    """The counter of an engine's computed steps."""

    steps: int


class PromptStep(NamedTuple):
    """A step, by number from 1, in which a prompt was admitted or computed.

    `tokens`  tokens that it computed: 0 where the prompt was only admitted
    `left`    known tokens that were left behind it: without any, the next token came with this step
    """

    step: int
    tokens: int
    left: int


class StepNotes(EngineCompanion):
    """Notes in the metrics of requests which steps of an engine computed them."""

    def __init__(self, stats: StepCounter) -> None:
        self._stats = stats

    def opened(self, job: Job) -> None:
        _steps(job).append(PromptStep(self._stats.steps + 1, 0, job.num_left))

    def observe(self, step: Step, seconds: float) -> None:
        number = self._stats.steps + 1
        for at in range(step.num_decodes, len(step.jobs)):
            job, tokens = step.jobs[at], int(step.lengths[at])
            if (steps := _steps(job))[-1].step == number:  # it was admitted now
                steps.pop()
            steps.append(PromptStep(number, tokens, job.num_left - tokens))

    def ended(self, request: Any) -> None:
        request.metrics = replace(request.metrics, last_step=self._stats.steps)


def _steps(job: Any) -> list[PromptStep]:
    """Return the steps of a job's request."""
    return job.request.metrics.prompt_steps

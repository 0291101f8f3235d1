"""The steps of an engine that computed each request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from quire.engines.companions import EngineCompanion

if TYPE_CHECKING:
    from quire.engines.loop.answers import Answer, EngineRequest
    from quire.scheduling import Step


class StepNotes(EngineCompanion):
    """Notes in the metrics of requests which steps computed them, by number from 1."""

    def __init__(self) -> None:
        self._num_steps = 0

    def observe(self, step: Step, seconds: float) -> None:
        self._num_steps += 1
        for at in range(step.num_decodes, len(step.jobs)):
            request = cast("Answer", step.jobs[at]).request
            request.metrics.prompt_steps.append((self._num_steps, int(step.lengths[at])))

    def ended(self, request: EngineRequest) -> None:
        request.metrics = replace(request.metrics, last_step=self._num_steps)

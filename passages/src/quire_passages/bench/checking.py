"""Whether passages of a model can be reused on texts, and by which policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quire.engines.segments import Segments
from quire.errors import NotRelocatable
from quire_passages.hf import PassageModel, Relocation
from quire_passages.verdict import PolicyEstimate, Verdict, candidates

Told = Callable[[int, list[PolicyEstimate]], object]
"""Is shown the prompts that were compared so far, and the estimates."""


@dataclass(frozen=True, slots=True)
class PassageCheck:
    """The result of checking passages on a model.

    relocation  the relocation gate's result; None: it refused the model
    refusal     the gate's reason then
    verdict     what policies do to answers; of few prompts where the check was ended early
    """

    relocation: Relocation | None
    refusal: str | None
    verdict: Verdict | None

    @property
    def chosen(self) -> str | None:
        """The name of the policy that is good enough, if one is."""
        chosen = self.verdict and self.verdict.chosen
        return None if chosen is None else chosen.name


def check_passages(
    model: Any,
    prompts: Iterable[Segments],
    *,
    count: int = 64,
    target: float = 0.98,
    answer_tokens: int = 32,
    progress: Told | None = None,
) -> PassageCheck:
    """Put a model through the gate, then compare policies with the full forward on so many prompts.

    An interrupt ends the check with what was found so far.
    """
    try:
        passage_model = PassageModel(model)
    except NotRelocatable as error:
        return PassageCheck(None, str(error), None)
    found = passage_model.relocation
    policies = candidates(found.num_layers, drops_rows=found.drops_rows is None)
    verdict = Verdict(policies, target)
    try:
        for number, segments in enumerate(islice(prompts, count)):
            compared = passage_model.compare(segments, verdict.wanted, num_tokens=answer_tokens)
            verdict.add(compared)
            if progress is not None:
                progress(number + 1, verdict.estimates())
    except KeyboardInterrupt:
        pass
    return PassageCheck(found, None, verdict)

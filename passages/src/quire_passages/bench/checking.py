"""Whether passages of a model can be reused on texts, and by which policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from quire.engines.hf import PrefixCache
from quire.engines.segments import Segments
from quire.errors import NotRelocatable
from quire_passages import Passages
from quire_passages.hf import Relocation
from quire_passages.verdict import PolicyEstimate, Verdict

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
    progress: Told | None = None,
) -> PassageCheck:
    """Put a model through the gate, then compare policies on so many prompts, as a `PrefixCache` with defaults does.

    A third as many come before as traffic. An interrupt ends the check with what was found so far.
    """
    held: Any = PrefixCache(model, "1MiB", passages=Passages(target=target)).passages
    try:
        found, verdict = held.relocation(), held.verdict_on()
    except NotRelocatable as error:
        return PassageCheck(None, str(error), None)

    def told(estimates: list[PolicyEstimate]) -> None:
        if progress is not None and estimates:
            progress(verdict.num_prompts, estimates)

    history = -(-count // 3)
    with suppress(KeyboardInterrupt):
        held.judge(islice(prompts, history + count), progress=told, history=history)
    return PassageCheck(found, None, verdict)

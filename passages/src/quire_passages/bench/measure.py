"""Questions asked of a model by every method, each answer beside that of the full forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median
from typing import Any

import torch

from quire.bench.timing import Progress, Row
from quire_passages import Segments, Variant
from quire_passages.bench.methods import FULL, Captured, Method
from quire_passages.bench.published import mean_of_all
from quire_passages.bench.workloads import Case
from quire_passages.hf import Blended, PassageModel
from quire_passages.hf.beside import divergence
from quire_passages.hf.weighing import largest_early


@dataclass(slots=True)
class Tally:
    """The results of one method on the questions asked so far.

    agreed   whether the next token was that of the full forward
    kl       nats from the distribution of the full forward to this one
    right    whether the answer was right, by category
    again    rows computed again, of `moved` ones of passages that were placed
    seconds  wall time of each prompt
    """

    agreed: list[bool] = field(default_factory=list[bool])
    kl: list[float] = field(default_factory=list[float])
    right: dict[str, list[bool]] = field(default_factory=dict[str, list[bool]])
    again: int = 0
    moved: int = 0
    seconds: list[float] = field(default_factory=list[float])

    def asked(
        self,
        model: Any,
        case: Case,
        prompt: Callable[[], Blended],
        whole: torch.Tensor | None,
    ) -> torch.Tensor:
        """Ask a case's questions behind what `prompt` computes, and count them beside `whole`, or else beside themselves.

        Returns their logits, `[questions, vocab]`.
        """
        started = time.perf_counter()
        blended = prompt()
        self.seconds.append(time.perf_counter() - started)
        self.again += blended.rows.size
        self.moved += blended.moved
        questions = torch.tensor([each.tokens for each in case.asked], device=model.device)
        blended.past.batch_repeat_interleave(len(case.asked))
        with torch.inference_mode():
            answers = model(questions, past_key_values=blended.past).logits[:, -1].float().cpu()
        self.add(case, answers if whole is None else whole, answers)
        return answers

    def add(self, case: Case, whole: torch.Tensor, logits: torch.Tensor) -> None:
        """Count the answers to a case's questions beside those of the full forward: logits, `[questions, vocab]`."""
        self.kl += map(float, divergence(whole, logits))
        for asked, expected, given in zip(case.asked, whole, logits, strict=True):
            best = int(given.argmax())
            self.agreed.append(best == int(expected.argmax()))
            self.right.setdefault(asked.category, []).append(best == asked.answer)

    def row(self, name: str, full: Tally) -> Row:
        """Return it as a row."""
        rates: Row = {}
        if len(self.right) > 1:
            rates = {
                f"{category}_rate": fmean(found) for category, found in sorted(self.right.items())
            }
        took_ms = median(self.seconds) * 1e3
        return {
            "name": name,
            "agree_rate": fmean(self.agreed),
            "kl": fmean(self.kl),
            "right_rate": fmean(each for found in self.right.values() for each in found),
            **rates,
            "rows_rate": self.again / self.moved if self.moved else 1.0,
            "ms": took_ms,
            "ratio_to_full": took_ms / (median(full.seconds) * 1e3),
        }


def measure(
    model: Any,
    passage_model: PassageModel,
    cases: Sequence[Case],
    methods: Mapping[str, Method],
    progress: Progress | None = None,
) -> list[Row]:
    """Ask all questions by the full forward and by each method in turn: a row for each, `full` first.

    passage_model  the model behind its gate

    `agree_rate`  questions whose next token is that of the full forward
    `kl`          nats by which its distribution differs from the full forward's, mean
    `right_rate`  questions answered right, and for each category `CATEGORY_rate`
    `rows_rate`   rows computed again, of those of passages that were placed
    `ms`          median wall time of a prompt up to its questions; `ratio_to_full` is beside the full forward
    """
    tallies = {name: Tally() for name in (FULL, *methods)}
    for number, case in enumerate(cases):
        if progress is not None:
            progress(f"prompt {number + 1} of {len(cases)}")
        captures = _Captures(passage_model, case)
        segments = Segments.of([case.head, *case.passages, case.opening])
        full = partial(passage_model.full, segments)
        whole = tallies[FULL].asked(model, case, full, None)
        for name, method in methods.items():
            blend = partial(
                passage_model.blend,
                segments,
                captures.of(method),
                method.selector,
                reposition=method.reposition,
            )
            tallies[name].asked(model, case, blend, whole)
    return [tally.row(name, tallies[FULL]) for name, tally in tallies.items()]


class _Captures:
    """Captures of a case's passages: alone, and within earlier prompts once a method asks."""

    def __init__(self, passage_model: PassageModel, case: Case) -> None:
        self._passage_model = passage_model
        self._case = case
        self._alone: list[Variant] = passage_model.capture_alone(case.passages, case.head)
        self._earlier: dict[Captured, dict[bytes, list[Variant]]] = {}

    def of(self, method: Method) -> Sequence[Variant]:
        """Return the captures that a method places, one for each passage."""
        if method.captured == "alone":
            return self._alone
        if method.captured not in self._earlier:
            self._earlier[method.captured] = self._capture_earlier(method.captured)
        earlier = self._earlier[method.captured]
        keys = [variant.ids for variant in self._alone]
        return [
            method.selector.preferred(earlier[key], tuple(keys[:at])) for at, key in enumerate(keys)
        ]

    def _capture_earlier(self, captured: Captured) -> dict[bytes, list[Variant]]:
        count = mean_of_all if captured == "earlier by mean" else largest_early
        found: dict[bytes, list[Variant]] = {}
        for passages in self._case.earlier:
            segments = Segments.of([self._case.head, *passages, (0,)])
            for variant in self._passage_model.capture_all(segments, count=count):
                found.setdefault(variant.ids, []).append(variant)
        return found

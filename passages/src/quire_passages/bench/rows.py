"""Rows of `quire bench passages`: what reusing passages does to answers and to the time they take."""

from __future__ import annotations

from collections.abc import Sequence

from quire.bench.timing import Progress, Row, check_names
from quire_passages.bench.measure import measure
from quire_passages.bench.methods import FULL, METHODS, QUICK
from quire_passages.bench.workloads import WORKLOADS
from quire_passages.hf import PassageModel

CASES, QUICK_CASES = 40, 5
"""Prompts of a workload."""

TIMED = ("name", "rows_rate", "ms", "ratio_to_full")
"""What a row has of a workload whose answers mean nothing."""


def rows(
    names: Sequence[str] | None = None,
    progress: Progress | None = None,
    *,
    among: Sequence[str] | None = None,
    quick: bool = False,
) -> list[Row]:
    """Measure the named methods (all by default) on the workloads `among` (all by default).

    A row has what `measure` says, and its `workload`. `quick` takes fewer prompts and methods. Raises `ValueError` for
    a name that does not exist.
    """
    workloads = {each.name: each for each in WORKLOADS}
    check_names(names or (), (FULL, *METHODS))
    check_names(among or (), workloads)
    wanted = names or ((FULL, *QUICK) if quick else (FULL, *METHODS))
    methods = {name: METHODS[name] for name in wanted if name != FULL}
    found: list[Row] = []
    for workload in among or workloads:
        if progress is not None:
            progress(f"{workload}: loading")
        model, tokenizer = workloads[workload].load()
        cases = workloads[workload].cases(tokenizer, QUICK_CASES if quick else CASES)
        passage_model = PassageModel(model)
        say = None if progress is None else _under(workload, progress)
        measured = measure(model, passage_model, cases, methods, say)
        kept = [row for row in measured if row["name"] in wanted]
        if not workloads[workload].is_judged:
            kept = [{key: row[key] for key in row if key in TIMED} for row in kept]
        found += [{"workload": workload, **row} for row in kept]
    return found


def _under(workload: str, progress: Progress) -> Progress:
    return lambda said: progress(f"{workload}: {said}")

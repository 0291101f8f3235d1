"""Whether a model's passages can be reused, and how much of them has to be computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.bench.timing import Progress, Row
from quire.errors import ConfigError, NotRelocatable
from quire_passages import KVDeviation, NoRows
from quire_passages.bench import quotes
from quire_passages.bench.measure import measure
from quire_passages.bench.methods import Method
from quire_passages.bench.workloads import NUM_PASSAGES, Case, Ids, quoted
from quire_passages.hf import PassageModel, Relocation
from quire_passages.hf.check_layer import LEAST_AGREEMENT, MOST_KL

BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
NUM_QUOTES, QUOTED_TOKENS = 8, 16


@dataclass(frozen=True, slots=True)
class PassageCheck:
    """The result of checking passages on a model.

    relocation  the relocation gate's result; None: it refused the model
    refusal     the gate's reason then
    rows        of each budget, as `measure` gives them
    budget      the least that holds `LEAST_AGREEMENT` and `MOST_KL`; None: no budget does
    """

    relocation: Relocation | None
    refusal: str | None
    rows: list[Row]
    budget: float | None


def check_passages(
    model: Any,
    texts: Sequence[Ids],
    head: Ids,
    opening: Ids,
    *,
    num_prompts: int = 12,
    passage_tokens: int = 64,
    progress: Progress | None = None,
) -> PassageCheck:
    """Put a model through the gate, then ask for what follows in passages of texts, by rising budgets.

    texts    token ids that passages are cut from
    head     what each passage is computed behind: the first token that the model expects; may be empty
    opening  what stands between passages and quotes; one token at least

    Prompts have six passages and eight quotes, half of which end where a passage does. Raises `ConfigError` for
    texts that are too short.
    """
    long_enough = [text for text in texts if len(text) >= 2 * passage_tokens]
    if sum(map(len, long_enough)) < NUM_PASSAGES * passage_tokens:
        raise ConfigError(
            f"the passages have {sum(map(len, texts)):,} tokens, of which {sum(map(len, long_enough)):,} in texts of "
            f"{2 * passage_tokens} or more; {NUM_PASSAGES * passage_tokens} are needed: pass more or longer files"
        )
    cases = _cases(long_enough, head, opening, num_prompts, passage_tokens)
    if progress is not None:
        progress("the gate")
    try:
        passage_model = PassageModel(model, sample=cases[0].passages)
    except NotRelocatable as error:
        return PassageCheck(None, str(error), [], None)
    methods = {"moved": Method(NoRows())}
    methods |= {budget_name(share): Method(KVDeviation(share)) for share in BUDGETS}
    found = measure(model, passage_model, cases, methods, progress)
    rows = [{key: row[key] for key in row if key != "right_rate"} for row in found]
    holding = (share for share in BUDGETS if holds(rows, budget_name(share)))
    return PassageCheck(passage_model.relocation, None, rows, next(holding, None))


def budget_name(share: float) -> str:
    """Return the name of a budget's row."""
    return f"{share:.0%} of rows"


def holds(rows: Sequence[Row], name: str) -> bool:
    """Return whether a row holds both bounds."""
    row = next(row for row in rows if row["name"] == name)
    return float(row["agree_rate"]) >= LEAST_AGREEMENT and float(row["kl"]) <= MOST_KL


def _cases(texts: Sequence[Ids], head: Ids, opening: Ids, count: int, size: int) -> list[Case]:
    rng = np.random.default_rng(44)
    cases: list[Case] = []
    while len(cases) < count:
        runs = quotes.cut_runs(rng, texts, NUM_PASSAGES, size)
        if any(len(run) > 1 for run in runs):
            asked = quoted(rng, runs, NUM_QUOTES, QUOTED_TOKENS)
            cases.append(
                Case(head, [passage for run in runs for passage in run], opening, asked, [])
            )
    return cases

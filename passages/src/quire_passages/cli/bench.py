"""`quire bench passages`: answers with reused passages beside full forwards."""

from dataclasses import asdict, replace
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from quire.bench.timing import Row
from quire.cli import models
from quire.cli.bench_tables import tell
from quire.cli.files import check_writable, write_text
from quire.cli.options import AsJson, Dtype, MaybeModel, Quick, ReportTo, Rows, Seed, names
from quire.cli.output import answer, progress, stdout
from quire.cli.tables import plain_table
from quire.errors import ConfigError
from quire_passages.cli.options import MaybePassageTokens, MaybePrompts, Texts

QUICK_PROMPTS, PROMPTS = 12, 200
QUICK_POOL, QUICK_HISTORY = 20, 8


def passages(
    *,
    rows: Rows = None,
    workloads: Annotated[
        str | None, typer.Option(help="Only these workloads, separated by commas.")
    ] = None,
    model: MaybeModel = None,
    dtype: Dtype = "float32",
    texts: Texts = None,
    prompts: MaybePrompts = None,
    passage_tokens: MaybePassageTokens = None,
    seed: Seed = 50,
    outcomes: Annotated[
        Path | None,
        typer.Option(
            help="Append what each prompt gave to this file, and go on behind those that it has.",
            show_default=False,
        ),
    ] = None,
    report: ReportTo = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Compare answers with reused passages to full forwards, by method and by rows computed again.

    facts: a small model that answers questions about facts in passages, which update each other
    and run over borders. quotes, tiny: real text that the models were trained on; -new: text that
    they were not. Agreement of the next token, KL, rows computed again, wall time. --quick: few
    prompts and methods.

    --model: that model instead, on prompts about Python's manual or --texts, whose passages come from a pool of 60 in
    changing orders. Agreement and KL of answers of 32 tokens with bounds of 95 %, and CPU time to the first token.
    Ctrl-C ends it with the figures so far.

    [bold]Examples[/bold]

      quire bench passages --quick
      quire bench passages --workloads facts --rows moved,epic_8,kv_deviation_15%
      quire bench passages --report passages.html
      quire bench passages --model ./my-model --prompts 200 --outcomes outcomes.jsonl
    """
    models.check_installed()
    check_writable(report, ".html", ".svg")
    check_writable(outcomes)
    models.hush()
    if model is None:
        if outcomes or texts or prompts:
            raise ConfigError(
                "--prompts, --texts and --outcomes are of a --model, which is not given"
            )
        found = _on_small_models(names(rows), names(workloads), quick=quick, as_json=as_json)
    elif workloads is not None:
        raise ConfigError(
            "--workloads are of quire's own small models; leave it out beside --model"
        )
    else:
        given = {"texts": texts, "passage_tokens": passage_tokens, "seed": seed, "quick": quick}
        count = prompts or (QUICK_PROMPTS if quick else PROMPTS)
        found = _on_model(models.load(model, dtype), count, names(rows), outcomes, **given)
        found = [{"workload": Path(model).name, **row} for row in found]
        answer(found, lambda found: stdout().print(by_time(model, found)), as_json=as_json)
    if report is not None:
        from quire_passages.bench import picture

        drawn = picture.page(found) if report.suffix == ".html" else picture.picture(found)
        write_text(report, drawn)


def by_workload(title: str, rows: list[Row]) -> Group:
    """Return a table for the rows of each workload."""
    from quire_passages.bench.picture import cell

    tables: list[Table] = []
    for workload, each in groupby(rows, key=lambda row: str(row["workload"])):
        group = list(each)
        keys = [key for key in group[0] if key not in ("workload", "name")]
        heads = (key.removesuffix("_rate").replace("_", " ") for key in keys)
        named = Text(f"{title}: {workload}", "bold")
        table = plain_table(Column("name", no_wrap=True), *heads, title=named, title_justify="left")
        for row in group:
            table.add_row(str(row["name"]), *(cell(key, row[key]) for key in keys))
        tables.append(table)
    return Group(*tables)


def by_time(title: str, rows: list[Row]) -> Group:
    """Return a table of policies on one model, and which agrees most in half the time."""
    from quire_passages.bench.frontier import best_within

    if not rows:
        return Group(Text("no prompt was measured"))
    named = Text(
        f"{title}: {rows[0]['prompts']} prompts, {rows[0]['tokens']} tokens of answers", "bold"
    )
    heads = ("agree", "95 %", "KL", "95 %", "work", "CPU s", "of full")
    table = plain_table(Column("name", no_wrap=True), *heads, title=named, title_justify="left")
    for row in rows:
        agree, low, high, kl, kl_low, kl_high, work, cpu_s, ratio = (
            float(row[key]) for key in _KEYS
        )
        figures = (
            f"{agree:.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{kl:.4f}",
            f"{kl_low:.4f} to {kl_high:.4f}",
        )
        table.add_row(str(row["name"]), *figures, f"{work:.0%}", f"{cpu_s:.2f}", f"{ratio:.0%}")
    best = best_within(rows)
    said = "no policy takes at most half the time of a full forward"
    if best is not None:
        said = f"best in half the time: {best['name']}, {best['agree_rate']:.1%}"
    return Group(table, Text(), Text(said))


_KEYS = (
    "agree_rate",
    "agree_low",
    "agree_high",
    "kl",
    "kl_low",
    "kl_high",
    "work_rate",
    "cpu_s",
    "ratio_to_full",
)


def _on_small_models(
    rows: list[str], workloads: list[str], *, quick: bool, as_json: bool
) -> list[Row]:
    from quire_passages.bench import rows as passage_rows

    measure = partial(passage_rows.rows, rows or None, among=workloads or None, quick=quick)
    return tell(measure, "passages reused", by_workload, as_json=as_json)


def _on_model(
    loaded: tuple[Any, Any],
    count: int,
    rows: list[str],
    outcomes: Path | None,
    **given: Any,
) -> list[Row]:
    """Measure policies on so many prompts; return the rows, of fewer prompts where it was interrupted.

    given  `texts` and `seed` of the prompts, `passage_tokens`, and `quick`: fewer passages and less traffic
    """
    from quire_passages.bench.asked_text import TextSizes, text_prompts
    from quire_passages.bench.frontier import (
        HISTORY,
        OutcomeFile,
        PolicyBench,
        best_within,
        facts_of,
        summary,
    )
    from quire_passages.bench.texts import read_texts

    model, tokenizer = loaded
    read = read_texts(given["texts"])
    longest, seed = given["passage_tokens"], given["seed"]
    sizes = TextSizes() if longest is None else TextSizes(tokens=(longest // 2, longest))
    history = HISTORY
    if given["quick"]:
        sizes, history = replace(sizes, pool=QUICK_POOL), QUICK_HISTORY
    prompts = text_prompts(tokenizer, sizes, seed=seed, texts=read)
    with progress("putting the model through its gate") as say:
        try:
            bench = PolicyBench(model, prompts, rows, history=history)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        settings = {"seed": seed, "history": history, **asdict(sizes)}
        facts = facts_of(model, read, **settings, rows=[*bench.policies])
        file = OutcomeFile(outcomes, facts)
        missing = count - len(file.outcomes)
        try:
            for number in bench.pass_history() if missing > 0 else ():
                say(f"traffic that came before: prompt {number} of {bench.num_history}")
            for found in islice(bench.outcomes(len(file.outcomes)), max(missing, 0)):
                file.add(found)
                best = best_within(so_far := summary(file.outcomes)) or so_far[0]
                say(
                    f"prompt {len(file.outcomes)} of {count}: {best['name']} {best['agree_rate']:.1%}"
                )
        except KeyboardInterrupt:
            pass
    return summary(file.outcomes[:count])

"""`quire bench passages`: answers with reused passages beside full forwards."""

from functools import partial
from itertools import groupby
from typing import Annotated

import typer
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from quire.bench.timing import Row
from quire.cli.bench_tables import tell
from quire.cli.files import check_writable, write_text
from quire.cli.models import check_installed, hush
from quire.cli.options import AsJson, Quick, ReportTo, Rows, names
from quire.cli.tables import plain_table


def passages(
    *,
    rows: Rows = None,
    workloads: Annotated[
        str | None, typer.Option(help="Only these workloads, separated by commas.")
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

    [bold]Examples[/bold]

      quire bench passages --quick
      quire bench passages --workloads facts --rows moved,epic_8,kv_deviation_15%
      quire bench passages --report passages.html
    """
    check_installed()
    check_writable(report, ".html", ".svg")
    from quire_passages.bench import picture
    from quire_passages.bench import rows as passage_rows

    hush()
    measure = partial(
        passage_rows.rows, names(rows) or None, among=names(workloads) or None, quick=quick
    )
    found = tell(measure, "passages reused", by_workload, as_json=as_json)
    if report is not None:
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

"""Rows of benchmarks as tables."""

from collections.abc import Callable
from typing import Any

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from quire.cli.output import answer, progress, stdout
from quire.cli.tables import plain_table
from quire.errors import ConfigError

Row = dict[str, float | str]


UNITS = {"median_us": "us", "requests_per_s": "req/s", "bytes": "bytes"}
"""The figure of a row, by the key it stands under, with its unit; the first that a row has."""


def tell(
    measure: Callable[[Callable[[str], None]], list[Row]],
    title: str,
    draw: Callable[[str, list[Row]], Table | Group],
    *,
    as_json: bool,
) -> list[Row]:
    """Measure, print the rows and return them; an unknown name becomes a `ConfigError`."""
    with progress("starting") as say:
        try:
            rows = measure(say)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    answer(rows, lambda rows: stdout().print(draw(title, rows)), as_json=as_json)
    return rows


def listed(title: str, rows: list[Row]) -> Table:
    """Return a table of rows: a column for every key that a row has."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = sorted(keys, key=lambda key: ("ratio" in key) + 2 * (key == "same_tokens"))
    heads = (
        Column(key, no_wrap=True)
        if key in ("name", "workload", "system")
        else key.replace("_", " ")
        for key in columns
    )
    table = plain_table(*heads, title=Text(title, "bold"), title_justify="left")
    for row in rows:
        table.add_row(*(_cell(key, row.get(key)) for key in columns))
    return table


def figures(title: str, rows: list[Row]) -> Table:
    """Return a table of one figure per row, and whatever else a row says beside it."""
    name, unit = (Column(head, no_wrap=True) for head in ("name", "unit"))
    heads = (name, "figure", unit, Column("beside it"))
    table = plain_table(*heads, title=Text(title, "bold"), title_justify="left")
    for row in rows:
        unit = next(unit for unit in UNITS if unit in row)
        others = [key for key in row if key not in ("name", unit)]
        notes = [
            f"{key.removesuffix('_us').replace('_', ' ')} {_cell(key, row[key])}" for key in others
        ]
        table.add_row(str(row["name"]), _cell(unit, row[unit]), UNITS[unit], ", ".join(notes))
    return table


def _cell(key: str, value: Any) -> Text | str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if key.startswith("ratio"):
        return Text(f"{value:.2f}" if value >= 0.1 else f"{value:.3f}", "bold")
    if key.endswith("rate"):
        return f"{value:.1%}"
    digits = 0 if abs(value) >= 100 or value == int(value) else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"

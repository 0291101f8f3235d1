"""The rows of `quire replay` as a table for people."""

from collections.abc import Callable
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Column
from rich.text import Text

from quire.cli.tables import plain_table
from quire.config import format_bytes

Row: TypeAlias = dict[str, Any]

Cell: TypeAlias = Callable[[Row], str]
"""The text of a row in a column."""


def show(console: Console, document: dict[str, Any], command: str) -> None:
    """Print the rows, what they have in common, and the command that computes them again."""
    console.print()
    console.print(
        Text.assemble(
            (str(document["trace"]), "bold"),
            f": {document['num_requests']:,} requests, {document['prompt_tokens']:,} prompt "
            f"tokens, {document['num_unique']:,} different blocks of {document['block_size']} "
            f"tokens; at most {document['ceiling']:.2%} can be found",
        )
    )
    columns = _columns(document["rows"])
    console.print(_table(document["rows"], columns))
    for line in _notes(document):
        console.print(Text(f"  {line}", "bright_black"))
    console.print(Text(f"\n  {command}\n", "bright_black"), soft_wrap=True)


def _table(rows: list[Row], columns: dict[str, Cell]) -> Any:
    table = plain_table(*map(_head, columns), num_keys=3)
    last = None
    for row in rows:
        capacity = row["capacity_blocks"]
        if last not in (None, capacity):
            table.add_section()
        cells = [cell(row) for cell in columns.values()]
        if capacity == last:
            cells[:2] = "", ""
        table.add_row(*cells, style="bold" if _is_best(row, rows) else "")
        last = capacity
    return table


def _head(name: str) -> Column:
    if name == "policy":
        return Column(name, no_wrap=True)
    return Column(name, justify="right", style="bright_black" * (name in QUIET))


def _columns(rows: list[Row]) -> dict[str, Cell]:
    """Return the columns that rows fill."""
    columns = dict(COLUMNS)
    if "saved_prefill_s" in rows[0]:
        columns["saved prefill"] = lambda row: f"{row['saved_prefill_s']:,.0f} s"
    if any("mean_wait_s" in row for row in rows):
        columns["mean wait"] = _known("mean_wait_s", "{:,.2f} s")
    columns["CPU s"] = lambda row: f"{row['seconds']:.2f}"
    return columns


def _known(name: str, form: str) -> Cell:
    """Return a cell that is empty where a row has no such figure."""
    return lambda row: "" if row.get(name) is None else form.format(row[name])


def _missed(*reasons: str) -> Cell:
    def cell(row: Row) -> str:
        tokens = sum(row["missed"][reason] for reason in reasons)
        return f"{tokens / max(row['prompt_tokens'], 1):.1%}"

    return cell


def _of_best(row: Row) -> str:
    best = row["optimum_token_hit"]
    return f"{row['token_hit'] / best:.1%}" if best else ""


COLUMNS: dict[str, Cell] = {
    "blocks": lambda row: f"{row['capacity_blocks']:,}",
    "of all": lambda row: f"{100 * row['share']:.3g} %" if row["share"] else "",
    "policy": lambda row: row["policy"],
    "token hit": lambda row: f"{100 * row['token_hit']:.2f} %",
    "of best": _of_best,
    "evicted": _known("evictions", "{:,}"),
    "gone": _missed("evicted"),
    "block hit": lambda row: f"{100 * row['block_hit']:.2f} %",
    "cold": _missed("cold"),
    "other": _missed("oversized", "partial_block"),
}
"""Those that matter most stand first: in a narrow terminal the others are below."""

QUIET = ("gone", "cold", "other", "CPU s")
"""Columns that are read last."""


def _is_best(row: Row, rows: list[Row]) -> bool:
    """Whether no other policy finds more at this capacity, and there are others."""
    others = [
        each["token_hit"]
        for each in rows
        if each["capacity_blocks"] == row["capacity_blocks"] and each["policy"] != "optimum"
    ]
    return row["policy"] != "optimum" and len(others) > 1 and row["token_hit"] == max(others)


def _notes(document: dict[str, Any]) -> list[str]:
    notes = [
        "of best: share of what the optimum finds, which knows the future",
        "gone: prompt tokens that were seen before and are not cached any more",
    ]
    if document["hints"] != "none":
        notes.append(f"hints: {document['hints']}")
    if document["concurrent"]:
        notes.append("requests overlap; the optimum is that of one request at a time")
    if "model" in document:
        row = document["rows"][0]
        notes.append(
            f"without a cache, {document['model']} needs {row['prefill_s']:,.0f} s of prefill on "
            f"{document['gpu']}; a block is {format_bytes(document['kv_bytes_per_block'])}"
        )
    return notes

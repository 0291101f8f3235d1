"""The rows of `quire replay` as a table for people."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text

from quire.cli.tables import plain_table
from quire.config import format_bytes

Row: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A column: its head, and what of a row it shows."""

    head: str
    cell: Callable[[Row], str]
    style: str = ""


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
    for line in _notes(document, [column.head for column in columns]):
        console.print(Text(f"  {line}", "bright_black"))
    console.print(Text(f"\n  {command}\n", "bright_black"), soft_wrap=True)


def _table(rows: list[Row], columns: list[Column]) -> Any:
    table = plain_table(num_keys=3)
    for column in columns:
        left = column.head == "policy"
        justify = "left" if left else "right"
        table.add_column(column.head, justify=justify, style=column.style, no_wrap=left)
    last = None
    for row in rows:
        capacity = row["capacity_blocks"]
        if last not in (None, capacity):
            table.add_section()
        cells = [column.cell(row) for column in columns]
        if capacity == last:
            cells[:2] = "", ""
        table.add_row(*cells, style="bold" if _is_best(row, rows) else "")
        last = capacity
    return table


def _columns(rows: list[Row]) -> list[Column]:
    """Return the columns that rows fill."""
    more: list[Column] = []
    if "saved_prefill_s" in rows[0]:
        more.append(Column("saved prefill", lambda row: f"{row['saved_prefill_s']:,.0f} s"))
    if any("mean_wait_s" in row for row in rows):
        more.append(Column("mean wait", _wait))
    return [*COLUMNS[:-1], *more, COLUMNS[-1]]


def _missed(*reasons: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        tokens = sum(row["missed"][reason] for reason in reasons)
        return f"{tokens / max(row['prompt_tokens'], 1):.1%}"

    return cell


def _of_best(row: Row) -> str:
    best = row["optimum_token_hit"]
    return f"{row['token_hit'] / best:.1%}" if best else ""


def _evicted(row: Row) -> str:
    return "" if row["evictions"] is None else f"{row['evictions']:,}"


def _wait(row: Row) -> str:
    wait = row.get("mean_wait_s")
    return f"{wait:,.2f} s" if wait is not None else ""


COLUMNS = (
    Column("blocks", lambda row: f"{row['capacity_blocks']:,}"),
    Column("of all", lambda row: f"{100 * row['share']:.3g} %" if row["share"] else ""),
    Column("policy", lambda row: row["policy"]),
    Column("token hit", lambda row: f"{100 * row['token_hit']:.2f} %"),
    Column("of best", _of_best),
    Column("evicted", _evicted),
    Column("gone", _missed("evicted"), "bright_black"),
    Column("block hit", lambda row: f"{100 * row['block_hit']:.2f} %"),
    Column("cold", _missed("cold"), "bright_black"),
    Column("other", _missed("oversized", "partial_block"), "bright_black"),
    Column("CPU s", lambda row: f"{row['seconds']:.2f}", "bright_black"),
)
"""Those that matter most stand first: in a narrow terminal the others are below."""


def _is_best(row: Row, rows: list[Row]) -> bool:
    """Whether no other policy finds more at this capacity, and there are others."""
    others = [
        each["token_hit"]
        for each in rows
        if each["capacity_blocks"] == row["capacity_blocks"] and each["policy"] != "optimum"
    ]
    return row["policy"] != "optimum" and len(others) > 1 and row["token_hit"] == max(others)


def _notes(document: dict[str, Any], heads: list[str]) -> list[str]:
    meanings = {
        "of best": "share of what the optimum finds, which knows the future",
        "gone": "prompt tokens that were seen before and are not cached any more",
    }
    notes = [f"{head}: {meaning}" for head, meaning in meanings.items() if head in heads]
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

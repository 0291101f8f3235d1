"""`quire replay`: a trace through the real cache, by capacity and policy."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from quire.cli.files import check_writable, csv_text, write_text
from quire.cli.options import AsJson, CsvTo, Jobs, MaybeBlockSize, MaybeGpu, MaybeModel, ReportTo
from quire.cli.output import print_json, progress, stderr, stdout
from quire.cli.tables import plain_table
from quire.config import format_bytes
from quire_sim.cli import inputs

DEFAULT_GPU = "h100"

BOUNDS = ("optimum", "reachable")
"""Rows that no policy exceeds."""


Row: TypeAlias = dict[str, Any]

Cell: TypeAlias = Callable[[Row], str]
"""The text of a row in a column."""


def replay(
    context: typer.Context,
    trace: Annotated[Path, typer.Argument(help="A trace file.", show_default=False)],
    *,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="10% of the different blocks, 64GiB (with --model), or blocks; more than once.",
            show_default=" ".join(inputs.DEFAULT_CAPACITIES),
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(help="Policies, separated by commas.", show_default="lru,learned,optimum"),
    ] = None,
    block_size: MaybeBlockSize = None,
    hints: Annotated[
        str,
        typer.Option(
            help="Hints of callers: none, recorded, never, no-store, session-end, last-use, "
            "return-time[:noise].",
        ),
    ] = "none",
    model: MaybeModel = None,
    gpu: MaybeGpu = None,
    concurrent: Annotated[
        bool, typer.Option("--concurrent", help="Let requests overlap, and wait for room.")
    ] = False,
    prefill_rate: Annotated[
        float | None, typer.Option(help="Prompt tokens per second of a request, with --concurrent.")
    ] = None,
    decode_rate: Annotated[
        float | None, typer.Option(help="Output tokens per second of a request, with --concurrent.")
    ] = None,
    jobs: Jobs = None,
    executor: Annotated[str, typer.Option(help="Workers of --jobs: process or ray.")] = "process",
    csv_file: CsvTo = None,
    report: ReportTo = None,
    as_json: AsJson = False,
) -> None:
    """The hit ratio of a trace on the real cache, by capacity and policy.

    Drives the cache manager that serves requests, block by block; the optimum, which
    no policy exceeds, stands beside every row. Hits are prompt tokens found, as a share of all.

    [bold]Examples[/bold]

      quire replay trace.jsonl.gz
      quire replay trace.jsonl.gz --capacity 10% --capacity 18279 --policies lru,fifo
      quire replay trace.jsonl.gz --capacity 64GiB --model llama-3.1-8b --gpu h100
      quire replay trace.jsonl.gz --capacity 5% --policies lru --hints session-end
      quire replay trace.jsonl.gz --concurrent --model llama-3.1-8b --gpu h100
      quire replay trace.jsonl.gz --report report.html
      quire replay trace.jsonl.gz --json --csv rows.csv
    """
    from quire_sim.cli.replay_run import Replays
    from quire_sim.executors import executor_named
    from quire_sim.foresight import check_kind
    from quire_sim.sweep import Experiment

    check_writable(csv_file)
    check_writable(report, ".html")
    check_kind(hints)
    chosen = inputs.policies_of(policies)
    where = executor_named(executor, jobs or os.cpu_count() or 1)
    roofline = inputs.load_model(model, gpu, DEFAULT_GPU)
    service = inputs.service_of((prefill_rate, decode_rate), roofline, concurrent=concurrent)
    source = inputs.opened(trace, block_size)
    asked = inputs.Asked.of(trace, context)
    with progress(f"reading {trace.name}") as say:
        say(f"reading {trace.name}")
        replays = Replays(Experiment(source, hints, service=service), roofline, where)
    num_unique = replays.curves.num_unique
    blocks = inputs.capacities_in_blocks(
        capacity, num_unique, source.block_size, roofline.model if roofline else None
    )
    document = replays.document(blocks, chosen)
    if csv_file is not None:
        write_text(csv_file, csv_of(document["rows"]))
    if report is not None:
        write_text(report, replays.page(document, asked))
        stderr().print(f"report written to {report}", markup=False, highlight=False)
    if as_json:
        print_json(document)
    else:
        show(stdout(), document, asked.command())


def csv_of(rows: list[dict[str, Any]]) -> str:
    """Return rows as CSV; the miss reasons are columns of their own."""
    flat = [
        {key: value for key, value in row.items() if not isinstance(value, (dict, list))}
        | {f"missed_{reason}": tokens for reason, tokens in row["missed"].items()}
        for row in rows
    ]
    return csv_text(flat)


def show(console: Console, document: dict[str, Any], command: str) -> None:
    """Print the rows, their common settings, and the command that computes them again."""
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


def _gap_closed(row: Row) -> str:
    closed = row["gap_closed"]
    return "" if closed is None or row["policy"] in BOUNDS else f"{closed + 0.0:.0%}"


COLUMNS: dict[str, Cell] = {
    "blocks": lambda row: f"{row['capacity_blocks']:,}",
    "of all": lambda row: f"{100 * row['share']:.3g} %" if row["share"] else "",
    "policy": lambda row: row["policy"],
    "token hit": lambda row: f"{100 * row['token_hit']:.2f} %",
    "reachable": lambda row: f"{100 * row['reachable_token_hit']:.2f} %",
    "gap closed": _gap_closed,
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
        if each["capacity_blocks"] == row["capacity_blocks"] and each["policy"] not in BOUNDS
    ]
    return row["policy"] not in BOUNDS and len(others) > 1 and row["token_hit"] == max(others)


def _notes(document: dict[str, Any]) -> list[str]:
    notes = [
        "reachable: no policy of a pool finds more; gap closed: of what is between LRU and that",
        "optimum: no policy finds more, even if it may leave out at once what a request has used",
        "both are exact where all blocks are whole; last, partial blocks that came before count as found",
        "gone: prompt tokens that were seen before and are not cached any more",
    ]
    if document["hints"] != "none":
        notes.append(f"hints: {document['hints']}")
    if document["concurrent"]:
        notes.append("requests overlap; the bounds are those of one request at a time")
    if "model" in document:
        row = document["rows"][0]
        notes.append(
            f"without a cache, {document['model']} needs {row['prefill_s']:,.0f} s of prefill on "
            f"{document['gpu']}; a block is {format_bytes(document['kv_bytes_per_block'])}"
        )
    return notes

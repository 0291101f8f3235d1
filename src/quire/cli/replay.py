"""`quire replay`: a trace through the real cache, by capacity and policy."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli import inputs
from quire.cli.files import check_writable, csv_text, write_text
from quire.cli.options import AsJson, CsvTo, MaybeBlockSize, MaybeGpu, MaybeModel, ReportTo
from quire.cli.output import print_json, progress, stderr, stdout
from quire.cli.replay_table import show
from quire.extras import require

DEFAULT_GPU = "h100"


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
            "--foreseen",
            help="What callers foresee: none, recorded, never, no-store, session-end, last-use.",
        ),
    ] = "none",
    model: MaybeModel = None,
    gpu: MaybeGpu = None,
    concurrent: Annotated[
        bool, typer.Option("--concurrent", help="Let requests overlap, and wait for room.")
    ] = False,
    prefill_rate: Annotated[
        float | None,
        typer.Option(help="Prompt tokens per second of a request, with --concurrent."),
    ] = None,
    decode_rate: Annotated[
        float | None,
        typer.Option(help="Output tokens per second of a request, with --concurrent."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Replays at a time.", show_default="CPU cores")
    ] = None,
    executor: Annotated[str, typer.Option(help="Where they run: process or ray.")] = "process",
    csv_file: CsvTo = None,
    report: ReportTo = None,
    as_json: AsJson = False,
) -> None:
    """The hit ratio of a trace on the real cache, by capacity and policy.

    Drives the cache manager that serves requests, block by block; the optimum, which
    knows the future, stands beside every row. Hits are prompt tokens found, as a share of all.

    [bold]Examples[/bold]

      quire replay trace.jsonl.gz
      quire replay trace.jsonl.gz --capacity 10% --capacity 18279 --policies lru,fifo
      quire replay trace.jsonl.gz --capacity 64GiB --model llama-3.1-8b --gpu h100
      quire replay trace.jsonl.gz --capacity 5% --policies lru --foreseen session-end
      quire replay trace.jsonl.gz --concurrent --model llama-3.1-8b --gpu h100
      quire replay trace.jsonl.gz --report report.html
      quire replay trace.jsonl.gz --json --csv rows.csv
    """
    from quire.cli.replay_run import Replays
    from quire.sim.executors import executor_named
    from quire.sim.foresight import check_kind
    from quire.sim.sweep import Experiment

    check_writable(csv_file)
    check_writable(report, ".html")
    if report is not None:
        require("report", "a report")
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

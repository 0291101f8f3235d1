"""`quire replay`: a trace through the real cache, by capacity and policy."""

import csv
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from quire.cli.output import print_json, progress, stdout
from quire.cli.replay_inputs import (
    capacities_in_blocks,
    load_model,
    opened,
    policies_of,
    service_of,
)
from quire.cli.replay_table import show
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.sim.curves import Curves
    from quire.sim.hardware import Roofline
    from quire.sim.replay import ReplayResult
    from quire.sim.sweep import Measure
    from quire.sim.trace.rows import Trace

DEFAULT_CAPACITIES = ("1%", "5%", "10%", "25%", "50%")
DEFAULT_GPU = "h100"


def replay(
    trace: Annotated[Path, typer.Argument(help="A trace file.", show_default=False)],
    *,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            help="10% of the different blocks, 64GiB (with --model), or blocks; more than once.",
            show_default=" ".join(DEFAULT_CAPACITIES),
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Policies, separated by commas.", show_default="lru,learned,optimum"),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per block, a multiple of the trace's.")
    ] = None,
    partial: Annotated[
        str,
        typer.Option(
            help="A last, partial block that the trace names: keep it, as published numbers do, "
            "or drop it."
        ),
    ] = "keep",
    hints: Annotated[
        str,
        typer.Option(
            help="What callers foresee: none, recorded, never, no-store, session-end, last-use."
        ),
    ] = "none",
    model: Annotated[
        str | None,
        typer.Option(help="What is saved: a known model, or a folder with its config.json."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Its accelerator.", show_default=DEFAULT_GPU)
    ] = None,
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
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write the rows to this file as CSV.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """The hit ratio of a trace on the real cache, by capacity and policy.

    Drives the cache manager that serves requests, block by block; the optimum, which
    knows the future, stands beside every row. Hits are prompt tokens found, as a share of all.

    [bold]Examples[/bold]

      quire replay trace.jsonl.gz
      quire replay trace.jsonl.gz --capacity 10% --capacity 18279 --policy lru,fifo
      quire replay trace.jsonl.gz --capacity 64GiB --model llama-3.1-8b --gpu h100
      quire replay trace.jsonl.gz --capacity 5% --policy lru --hints session-end
      quire replay trace.jsonl.gz --concurrent --model llama-3.1-8b --gpu h100
      quire replay trace.jsonl.gz --json --csv rows.csv
    """
    from quire.sim.executors import executor_named
    from quire.sim.foresight import check_kind

    check_kind(hints)
    policies = policies_of(policy)
    where = executor_named(executor, jobs or os.cpu_count() or 1)
    roofline = load_model(model, gpu, DEFAULT_GPU)
    service = service_of((prefill_rate, decode_rate), roofline, concurrent=concurrent)
    source = opened(trace, block_size, partial)
    with progress("reading") as say:
        from quire.sim.curves import curves
        from quire.sim.sweep import Pair, pairs_of, sweep

        say(f"reading {trace.name}")
        both = curves(source)
        blocks = capacities_in_blocks(
            DEFAULT_CAPACITIES if capacity is None else capacity,
            both.num_unique,
            source.block_size,
            roofline.model if roofline else None,
        )
        pairs = pairs_of(blocks, policies)
        enough = max(both.num_unique, 1)
    with progress("replaying", len(pairs)) as say:
        say(f"{len(pairs)} replays")
        results = sweep(
            source,
            [Pair(min(pair.capacity_blocks, enough), pair.policy) for pair in pairs],
            hints=hints,
            measures=_measures(roofline),
            service=service,
            executor=where,
            done=lambda pair: say(f"{pair.policy} in {pair.capacity_blocks:,} blocks"),
        )
    results = [
        msgspec.structs.replace(result, capacity_blocks=pair.capacity_blocks)
        for pair, result in zip(pairs, results, strict=True)
    ]
    document = facts(source, both, hints, roofline)
    document |= {"concurrent": concurrent, "rows": rows_of(results, both)}
    if csv_file is not None:
        write_csv(csv_file, document["rows"])
    if as_json:
        print_json(document)
    else:
        show(stdout(), document, command())


def facts(
    trace: "Trace", both: "Curves", hints: str, roofline: "Roofline | None"
) -> dict[str, Any]:
    """Return what all rows have in common."""
    common: dict[str, Any] = {
        "trace": trace.source,
        "block_size": trace.block_size,
        "num_requests": both.num_requests,
        "prompt_tokens": both.prompt_tokens,
        "num_unique": both.num_unique,
        "ceiling": both.ceiling,
        "hints": hints,
    }
    if roofline is not None:
        common |= {"model": roofline.model.name, "gpu": roofline.accelerator.name}
        common["kv_bytes_per_block"] = roofline.model.kv.per_token * trace.block_size
    return common


def rows_of(results: "Sequence[ReplayResult]", both: "Curves") -> list[dict[str, Any]]:
    """Return results as rows, each with its share of the blocks and the optimum beside it."""
    return [
        result.row()
        | {
            "share": result.capacity_blocks / both.num_unique if both.num_unique else None,
            "optimum_token_hit": both.optimum.at(result.capacity_blocks),
        }
        for result in results
    ]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as CSV; the miss reasons are columns of their own. Raises `ConfigError`."""
    flat = [
        {key: value for key, value in row.items() if not isinstance(value, (dict, list))}
        | {f"missed_{reason}": tokens for reason, tokens in row["missed"].items()}
        for row in rows
    ]
    columns = list(dict.fromkeys(key for row in flat for key in row))
    try:
        with path.expanduser().open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(flat)
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from error


def command() -> str:
    """Return the command line that is running, as one would type it again."""
    import sys

    return shlex.join(["quire", *sys.argv[1:]])


def _measures(roofline: "Roofline | None") -> "list[Measure]":
    if roofline is None:
        return []
    from quire.sim.savings import MeasureSavings

    return [MeasureSavings(roofline)]

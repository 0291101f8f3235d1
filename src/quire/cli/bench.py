"""`quire bench`: the benchmarks, as tables."""

from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from quire.cli.files import check_writable, write_text
from quire.cli.inputs import names
from quire.cli.models import check_installed, hush
from quire.cli.options import AsJson, Quick, ReportTo, Rows
from quire.cli.output import print_json, progress, stdout
from quire.cli.tables import plain_table
from quire.config import parse_bytes
from quire.errors import ConfigError
from quire.extras import require

Row = dict[str, float | str]

UNITS = {"median_us": "us", "requests_per_s": "req/s", "bytes": "bytes"}
"""The figure of a row, by the key it stands under, with its unit; the first that a row has."""

QUICK_CORE: tuple[str, ...] = ("match_1k", "match_8k", "alloc_free_20", "decode_256", "import_core")

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """The benchmarks: the core, transformers with reuse, tiers, many requests at once.

    [bold]Examples[/bold]

      quire bench core
      quire bench core --rows match_8k,decode_256
      quire bench hf --quick
      quire bench serve --quick
      quire bench tiers 'disk:/mnt/nvme/try?capacity=1GiB'
    """


@app.command("core")
def core(*, rows: Rows = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Time the control plane: match, insert, allocate, evict, decode, serve.

    CPU time, medians, in microseconds. --quick leaves the serve loops out.

    [bold]Example[/bold]

      quire bench core --rows match_8k,decode_256,serve_b
    """
    from quire.bench import core_rows

    wanted = names(rows) or (list(QUICK_CORE) if quick else None)
    title = "quire's core, CPU time, medians"
    _tell(partial(core_rows.rows, wanted), title, figures, as_json=as_json)


@app.command("hf")
def hf(*, rows: Rows = None, quick: Quick = False, as_json: AsJson = False) -> None:
    """Time transformers: plain, with a cache kept by hand, and with quire.

    Time to the first new token and decode rate, over prefixes of 512 to 4,096
    tokens, on quire-tiny (3.8 M parameters) and on a random Llama (_25m). All
    ways take turns; ratios are this row's value over the other way's.

    [bold]Example[/bold]

      quire bench hf --rows hf_ttft_warm_2k,hf_ttft_by_hand_2k
    """
    check_installed()
    from quire.bench import hf_rows

    hush()
    wanted = names(rows) or None
    title = "transformers, wall time"
    _tell(partial(hf_rows.rows, wanted, quick=quick), title, listed, as_json=as_json)


@app.command("tiers")
def tiers(
    places: Annotated[
        list[str] | None, typer.Argument(help="Tiers, written as for --tier; places of their own.")
    ] = None,
    *,
    block_bytes: Annotated[
        str, typer.Option(help="Sizes of blocks, separated by commas.")
    ] = "64KiB,1MiB",
    num_bytes: Annotated[
        str, typer.Option("--bytes", help="Bytes that each round puts and gets.")
    ] = "64MiB",
    gate: Annotated[
        bool,
        typer.Option("--gate", help="Judge what is loaded and what computed, by round trip."),
    ] = False,
    report: ReportTo = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Time tiers: put, get and lookups; memory and a disk among the temporary files, or those named.

    Wall time, medians of rounds, MB/s of payload; checksums are always on. What is put is
    deleted again, but a tier that is full makes room for it: name an empty place.
    Exit code 1 where none could be timed.
    With --gate, what requests take that hit and that miss, beside computing and loading always,
    for round trips of 0 to 50 ms (redis://, through a proxy that delays) and 64 to 8,192 tokens;
    --report draws the grid.

    [bold]Examples[/bold]

      quire bench tiers
      quire bench tiers 'disk:/mnt/nvme/try?capacity=1GiB' --block-bytes 1MiB,4MiB
      quire bench tiers redis://127.0.0.1:6379 --json
      quire bench tiers redis://127.0.0.1:6379 --gate --report grid.svg
    """
    from quire.bench import gate_picture, gate_rows, tier_rows

    if gate:
        check_writable(report, ".svg")
        measure = partial(gate_rows.rows, places or (), quick=quick)
        found = _tell(measure, "requests, computed or loaded", listed, as_json=as_json)
        if report is not None:
            write_text(report, gate_picture.picture(found))
        return
    if report is not None:
        raise ConfigError("--report draws the grid of --gate; other rows are shown here only")

    measure = partial(
        tier_rows.rows,
        places or (),
        block_bytes=[parse_bytes(size) for size in names(block_bytes)],
        round_bytes=parse_bytes(num_bytes),
        rounds=3 if quick else 9,
    )
    found = _tell(measure, "tiers, MB/s of payload", listed, as_json=as_json)
    if all("reason" in row for row in found):
        raise typer.Exit(1)


@app.command("chunks")
def chunks(
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

      quire bench chunks --quick
      quire bench chunks --workloads facts --rows moved,epic_8,kv_deviation_15%
      quire bench chunks --report chunks.html
    """
    check_installed()
    check_writable(report, ".html", ".svg")
    from quire.bench.chunks import picture
    from quire.bench.chunks import rows as chunk_rows

    hush()
    measure = partial(
        chunk_rows.rows, names(rows) or None, among=names(workloads) or None, quick=quick
    )
    found = _tell(measure, "passages reused", by_workload, as_json=as_json)
    if report is not None:
        drawn = picture.page(found) if report.suffix == ".html" else picture.picture(found)
        write_text(report, drawn)


@app.command("serve")
def serve(
    *,
    rows: Rows = None,
    among: Annotated[
        str | None, typer.Option(help="Only these systems, separated by commas.")
    ] = None,
    precisions: Annotated[
        str | None, typer.Option(help="Only float32 or bfloat16, separated by commas.")
    ] = None,
    vllm: Annotated[
        Path, typer.Option(help="The interpreter of an environment that has vLLM.")
    ] = Path(".venv-vllm/bin/python"),
    open_loop: Annotated[
        bool, typer.Option("--open-loop", help="Ask servers over HTTP, as requests come.")
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(help="Expected requests per second.", show_default="half of vLLM's"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A trace file.", show_default="Poisson"),
    ] = None,
    slo_ttft: Annotated[
        float | None,
        typer.Option(help="Seconds to the first token that are still good.", show_default="0.5"),
    ] = None,
    slo_tpot: Annotated[
        float | None,
        typer.Option(help="Seconds per further token that are still good.", show_default="0.05"),
    ] = None,
    report: ReportTo = None,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Time many requests at once: quire's engine, vLLM on the CPU, transformers, one by one.

    Requests that share a prefix and requests that share none, chats, agents and documents, on
    quire-tiny and on a random Llama of 76 M parameters. The systems take turns, the best of five
    rounds counts. vLLM is measured where benchmarks/peers/vllm_environment.py has made its
    environment. --quick: the small model, one round.
    With --open-loop, `quire serve` and `vllm serve` are asked over HTTP by one client, requests
    come as a Poisson process or at the times of a trace, and goodput is what meets both objectives.

    [bold]Examples[/bold]

      quire bench serve --quick --rows shared_32 --among quire,prefix-cache
      quire bench serve --open-loop --rows shared_128,chat --precisions bfloat16 --report open.svg
    """
    check_installed()
    check_writable(report, ".svg")
    from quire.bench import serve_picture, serve_rows
    from quire.bench.serve_http import OpenLoop

    hush()
    way = serve_rows.AtOnce()
    given = {"rate": rate, "trace": trace, "ttft_s": slo_ttft, "itl_s": slo_tpot}
    given = {name: value for name, value in given.items() if value is not None}
    if open_loop:
        require("serve", "a server")
        way = OpenLoop(**given)  # pyright: ignore[reportArgumentType] - each by its name
    elif given:
        raise ConfigError("--rate, --trace, --slo-ttft and --slo-tpot are of --open-loop; add it")
    choice = serve_rows.ServeChoice(
        names(rows) or None, names(among) or None, names(precisions) or None, vllm, quick, way
    )
    title = "requests as they come" if open_loop else "requests at once"
    found = _tell(partial(serve_rows.rows, choice), title, listed, as_json=as_json)
    if report is not None:
        write_text(report, serve_picture.picture(found))


def _tell(
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
    if as_json:
        print_json(rows)
    else:
        stdout().print(draw(title, rows))
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


def by_workload(title: str, rows: list[Row]) -> Group:
    """Return a table for the rows of each workload."""
    from quire.bench.chunks.picture import cell

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

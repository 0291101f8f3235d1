"""`quire bench`: the benchmarks, as tables."""

from functools import partial
from typing import Annotated

import typer

from quire.cli.bench_tables import figures, listed, tell
from quire.cli.elsewhere import PartlyElsewhere
from quire.cli.models import check_installed, hush
from quire.cli.options import AsJson, Quick, Rows, names
from quire.config import parse_bytes

QUICK_CORE: tuple[str, ...] = ("match_1k", "match_8k", "alloc_free_20", "decode_256", "import_core")

app = typer.Typer(cls=PartlyElsewhere, no_args_is_help=True)


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
    tell(partial(core_rows.rows, wanted), title, figures, as_json=as_json)


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
    tell(partial(hf_rows.rows, wanted, quick=quick), title, listed, as_json=as_json)


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
        typer.Option(
            "--gate", help="Measure the cost gate: times of loading and computing, by round trip."
        ),
    ] = False,
    quick: Quick = False,
    as_json: AsJson = False,
) -> None:
    """Time tiers: put, get and lookups; memory and a disk among the temporary files, or those named.

    Wall time, medians of rounds, MB/s of payload; checksums are always on. What is put is
    deleted again, but a tier that is full makes room for it: name an empty place.
    Exit code 1 where none could be timed.
    With --gate, what requests take that hit and that miss, beside computing and loading always,
    for round trips of 0 to 50 ms (redis://, through a proxy that delays) and 64 to 8,192 tokens.

    [bold]Examples[/bold]

      quire bench tiers
      quire bench tiers 'disk:/mnt/nvme/try?capacity=1GiB' --block-bytes 1MiB,4MiB
      quire bench tiers redis://127.0.0.1:6379 --json
      quire bench tiers redis://127.0.0.1:6379 --gate
    """
    from quire.bench import gate_rows, tier_rows

    if gate:
        measure = partial(gate_rows.rows, places or (), quick=quick)
        tell(measure, "requests, computed or loaded", listed, as_json=as_json)
        return
    measure = partial(
        tier_rows.rows,
        places or (),
        block_bytes=[parse_bytes(size) for size in names(block_bytes)],
        round_bytes=parse_bytes(num_bytes),
        rounds=3 if quick else 9,
    )
    found = tell(measure, "tiers, MB/s of payload", listed, as_json=as_json)
    if all("reason" in row for row in found):
        raise typer.Exit(1)

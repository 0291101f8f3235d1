"""`quire bench tiers`: what tiers give, beside what they stand on, as a table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from quire.cli.downloads import allow_download
from quire.cli.files import check_writable, write_text
from quire.cli.models import check_installed, hush
from quire.cli.options import AsJson, Quick, ReportTo, Yes
from quire.cli.output import print_json, progress, stdout
from quire.cli.tables import plain_table
from quire.config import parse_bytes
from quire.errors import ConfigError
from quire.extras import require

if TYPE_CHECKING:
    from quire.bench.tier_measure import Row

DEFAULT_BLOCKS = "64KiB,256KiB,1MiB,4MiB"
GOOD_RATIO = 0.8
SLOWER = 1.1


def tiers(
    *,
    kinds: Annotated[
        str | None, typer.Option(help="Only these tiers, separated by commas: host, disk, ...")
    ] = None,
    block_bytes: Annotated[
        str, typer.Option(help="Sizes of blocks, separated by commas.")
    ] = DEFAULT_BLOCKS,
    path: Annotated[
        Path | None,
        typer.Option(help="A directory on the disk to measure.", show_default="temporary files'"),
    ] = None,
    num_bytes: Annotated[
        str, typer.Option("--bytes", help="The most that is on that disk at any time.")
    ] = "1GiB",
    quick: Quick = False,
    with_peers: Annotated[
        bool, typer.Option("--with-peers", help="LMCache's storages beside ours, in .venv-peers.")
    ] = False,
    first_tokens: Annotated[
        bool, typer.Option("--first-tokens", help="First tokens from tiers, against computing.")
    ] = False,
    report: ReportTo = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Time tiers: put, get and lookups, beside the raw file, socket or store.

    Wall time, medians of rounds in turn, MB/s of payload; checksums are always on. Redis and
    the S3 server are started here, on loopback. About a minute; with --with-peers four.

    With --first-tokens: the time to the first token on quire-tiny by length of the prefix, computed, from
    the tier, and as the cost gate decides; and what tiers cost prompts that never come back.

    [bold]Examples[/bold]

      quire bench tiers
      quire bench tiers --kinds disk --path /mnt/nvme --block-bytes 1MiB,4MiB
      quire bench tiers --kinds disk,redis --with-peers --json
      quire bench tiers --first-tokens --report crossover.svg
    """
    names = tuple(name.strip() for name in kinds.split(",")) if kinds else None
    check_writable(report, ".svg")
    if first_tokens:
        _first_tokens(names, path, report, quick=quick, as_json=as_json)
        return
    if report is not None:
        raise ConfigError("--report draws what --first-tokens measures; give both")
    if with_peers:
        allow_download({"lmcache"}, yes=yes)
    from quire.bench.tier_peers import Peers
    from quire.bench.tier_rows import TierBench, rows

    bench = TierBench(
        names=names,
        block_bytes=tuple(parse_bytes(size.strip()) for size in block_bytes.split(",")),
        path=path,
        num_bytes=parse_bytes(num_bytes),
        rounds=3 if quick else 9,
    )
    with progress("starting") as say:
        others = Peers(path, say) if with_peers else None
        measured = rows(bench, say, others)
    if as_json:
        print_json(measured)
    else:
        stdout().print(tier_table(measured))


def _first_tokens(
    names: tuple[str, ...] | None,
    path: Path | None,
    report: Path | None,
    *,
    quick: bool,
    as_json: bool,
) -> None:
    check_installed()
    if report is not None:
        require("report", "a picture")
    from quire.bench import tier_plot, tier_ttft

    hush()
    with progress("starting") as say:
        measured = tier_ttft.rows(names, say, path=path, quick=quick)
    if report is not None:
        write_text(report, tier_plot.crossover(measured))
    if as_json:
        print_json(measured)
    else:
        stdout().print(first_token_table(measured))


def first_token_table(measured: "list[Row]") -> Table:
    """Return a table of first tokens, and what tiers cost where nothing comes back."""
    title = "milliseconds to the first token, and how often computing takes that"
    table = plain_table(title=Text(title, "bold"), title_justify="left")
    table.add_column("tier", no_wrap=True)
    for name in ("prefix", "computed", "from the tier", "", "with the gate", "", "tokens taken"):
        table.add_column(name, justify="right")
    for row in measured:
        if "recompute_ms" in row:
            table.add_row(*_first_token_cells(row))
    notes = [f"{row['tier']}: {row['reason']}" for row in measured if "reason" in row]
    notes += [
        f"prompts of {row['prefix']} tokens that never come back, {row['tier']}: {row['on_ms']:.0f} ms with "
        f"tiers, {row['off_ms']:.0f} without: {row['on_ratio']:.3f} of the time, {row['cpu_ratio']:.3f} of the CPU time; "
        f"{row['stored_share']:.0%} of them were stored"
        for row in measured
        if "on_ratio" in row
    ]
    table.caption, table.caption_justify = "\n".join(notes), "left"
    return table


def _first_token_cells(row: "Row") -> list[Text | str]:
    cells: list[Text | str] = [str(row["tier"]), f"{row['prefix']:,}", f"{row['recompute_ms']:.1f}"]
    for way in ("hit", "gated"):
        ratio = float(row[f"{way}_ratio"])
        color = "bold green" if ratio <= 1 else "bold yellow" if ratio <= SLOWER else "bold red"
        cells += [f"{row[f'{way}_ms']:.1f}", Text(f"{ratio:.2f}", color)]
    return [*cells, f"{row['gated_tokens']:,.0f}"]


def tier_table(measured: "list[Row]") -> Table:
    """Return a table of rows of `quire bench tiers`, and why tiers are missing."""
    table = plain_table(title=Text("tiers, MB/s of payload", "bold"), title_justify="left")
    for name in ("tier", "block"):
        table.add_column(name, no_wrap=True, justify="left" if name == "tier" else "right")
    for name in ("put", "raw", "of raw", "get", "raw", "of raw", "lookups/s"):
        table.add_column(name, justify="right")
    table.add_column("how")
    for row in measured:
        if "reason" not in row:
            table.add_row(*_cells(row))
    missing = {str(row["tier"]): str(row["reason"]) for row in measured if "reason" in row}
    if missing:
        table.caption = "\n".join(f"{name}: {reason}" for name, reason in missing.items())
        table.caption_justify = "left"
    return table


def _cells(row: "Row") -> list[Text | str]:
    cells: list[Text | str] = [str(row["tier"]), _size(int(row["block_bytes"]))]
    for way in ("put", "get"):
        ratio = float(row[f"{way}_ratio"])
        color = "bold green" if ratio >= GOOD_RATIO else "bold yellow"
        cells += [
            f"{row[f'{way}_mb_s']:,.0f}",
            f"{row[f'raw_{way}_mb_s']:,.0f}",
            Text(f"{ratio:.2f}", color),
        ]
    return [*cells, f"{row['lookups_s']:,.0f}", str(row["mode"])]


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes >> 10} KiB"

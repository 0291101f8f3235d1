"""`quire curve`: the hit rate of a trace for every size of a cache."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from rich.text import Text

from quire.cli.files import check_writable, csv_text, write_text
from quire.cli.options import AsJson, CsvTo, Jobs, MaybeBlockSize, names
from quire.cli.output import is_utf8, print_json, progress, stdout
from quire.cli.tables import plain_table
from quire_sim.cli.inputs import amount, opened

if TYPE_CHECKING:
    from quire_sim.curves import Curve, Curves
    from quire_sim.trace.rows import Trace, TraceRequest

SHARES = (1, 5, 10, 25, 50, 100)
"""Capacities of the table, in % of the different blocks of the trace."""

KNEE = 0.9
TIERS = ("device", "host", "disk", "remote")
SHOW_EVERY = 4096

HEIGHT = 10
"""Lines of the picture, axis apart."""

LEFT = 8
"""Characters before the picture: the scale of the hit ratio."""

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character, by column and by row."""

DECADES = 3
"""Powers of ten from the left end of the axis, 0.1 % of the blocks, to the right, all of them."""

LRU, OPTIMUM = "green", "magenta"


def curve(
    trace: Annotated[Path, typer.Argument(help="A trace file.", show_default=False)],
    *,
    at: Annotated[
        str, typer.Option(help="More capacities to list: blocks, or % of the different blocks.")
    ] = "",
    hierarchy: Annotated[
        str, typer.Option(help="Capacities of exclusive tiers, the fastest first, by commas.")
    ] = "",
    block_size: MaybeBlockSize = None,
    count_from: Annotated[
        str, typer.Option(help="Requests that only warm the cache up: a number, or %.")
    ] = "0",
    points: Annotated[
        int,
        typer.Option(min=2, help="Approximate number of points of each curve in --json and --csv."),
    ] = 1000,
    jobs: Jobs = None,
    as_json: AsJson = False,
    csv_file: CsvTo = None,
) -> None:
    """The hit ratio of a trace for every capacity, under LRU and at best.

    From one pass over the file. No policy finds more than the optimum, and no pool more than is reachable, which
    keeps what a request uses while it runs. All three are exact where blocks are whole; of last, partial blocks that
    came before, the two bounds count all as found. Hits are prompt tokens in blocks that were cached, as a share of all.

    [bold]Examples[/bold]

      quire curve trace.jsonl.gz
      quire curve trace.jsonl.gz --hierarchy 10%,100%
      quire curve trace.jsonl.gz --json --points 200 --at 4096,8192
      quire curve trace.jsonl.gz --count-from 50% --csv curve.csv
    """
    check_writable(csv_file)
    both = _read(trace, block_size, count_from, jobs or os.cpu_count() or 1)
    listed = [both.num_unique * share // 100 for share in SHARES]
    listed += [amount(word, both.num_unique, "--at") for word in names(at)]
    sizes = [amount(word, both.num_unique, "--hierarchy") for word in names(hierarchy)]
    if csv_file is not None:
        write_text(csv_file, csv_text(_rows(both, points, listed)))
    tiers = _tiers(both, sizes)
    if as_json:
        print_json(_document(both, points, listed, tiers) | {"trace": str(trace)})
    else:
        _show(both, sorted(set(listed)), tiers, str(trace))


def _document(
    both: "Curves", points: int, listed: list[int], tiers: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return both curves as plain data: pairs of capacity in blocks and token hit, 0 to 1."""
    result: dict[str, Any] = {}
    for name in ("lru", "optimum", "reachable"):
        thin = getattr(both, name).thinned(points, listed)
        pairs = zip(thin.capacities.tolist(), thin.token_hit.tolist(), strict=True)
        result[name] = [list(pair) for pair in pairs]
    facts = ("block_size", "num_requests", "prompt_tokens", "num_unique", "ceiling", "seconds")
    result |= {name: getattr(both, name) for name in facts}
    return result | ({"tiers": tiers} if tiers else {})


def _rows(both: "Curves", points: int, listed: list[int]) -> Iterator[dict[str, float]]:
    """Yield a row per capacity: blocks, token hit of LRU and of both bounds."""
    chosen: set[int] = set()
    for each in (both.lru, both.reachable, both.optimum):
        chosen.update(each.thinned(points, listed).capacities.tolist())
    for blocks in sorted(chosen):
        hits = {"lru": both.lru.at(blocks), "optimum": both.optimum.at(blocks)}
        yield {"capacity_blocks": blocks, **hits, "reachable": both.reachable.at(blocks)}


def _tiers(both: "Curves", sizes: Sequence[int]) -> list[dict[str, Any]]:
    further = [f"tier {number + 1}" for number in range(len(TIERS), len(sizes))]
    rows = zip((*TIERS[: len(sizes)], *further), sizes, both.lru.tiers(sizes), strict=True)
    return [dict(zip(("tier", "capacity_blocks", "token_hit"), row, strict=True)) for row in rows]


def _read(path: Path, block_size: int | None, count_from: str, jobs: int) -> "Curves":
    import msgspec

    from quire_sim.curves import curves_of
    from quire_sim.executors import Processes
    from quire_sim.reuse import reuses

    begun = time.process_time()
    trace = opened(path, block_size)
    with progress(f"reading {path.name}") as say:
        read = reuses(_told(trace, say), trace.block_size)
        reading = time.process_time() - begun
        say("computing")
        first = amount(count_from, read.num_requests, "--count-from")
        both = curves_of(read, count_from=first, executor=Processes(jobs))
    return msgspec.structs.replace(both, seconds=reading + both.seconds)


def _told(trace: "Trace", say: Callable[[str], None]) -> "Iterator[TraceRequest]":
    """Yield the requests of a trace, and say how far it is read."""
    for number, request in enumerate(trace):
        if number % SHOW_EVERY == 0:
            say(f"{number:,} requests")
        yield request


def _show(both: "Curves", listed: list[int], tiers: list[dict[str, Any]], name: str) -> None:
    console = stdout()
    console.print(
        f"\n[bold]{name}[/bold]: {both.num_requests:,} requests, {both.prompt_tokens:,} prompt "
        f"tokens counted, {both.num_unique:,} different blocks of {both.block_size} tokens\n"
    )
    console.print(picture(both, width=min(console.width, 76), utf8=is_utf8(console)))
    table = plain_table("of all blocks", "blocks", "LRU", "reachable", "optimum")
    for blocks in listed:
        share = f"{100 * blocks / both.num_unique:.3g} %" if both.num_unique else ""
        hits = (
            f"{100 * each.at(blocks):.2f} %" for each in (both.lru, both.reachable, both.optimum)
        )
        table.add_row(share, f"{blocks:,}", *hits)
    console.print(table)
    if tiers:
        table = plain_table(Column("tier, exclusive, LRU"), "blocks", "found there")
        for tier in tiers:
            found = f"{100 * tier['token_hit']:.2f} %"
            table.add_row(tier["tier"], f"{tier['capacity_blocks']:,}", found)
        missed = 1 - sum(tier["token_hit"] for tier in tiers)
        table.add_row("nowhere", "", f"{100 * missed:.2f} %")
        console.print(table)
    knees = (f"{each.capacity_for(KNEE):,}" for each in (both.lru, both.optimum))
    console.print(
        f"{KNEE:.0%} of the ceiling ({100 * both.ceiling:.2f} %) at [bold]{next(knees)} blocks[/bold] "
        f"with LRU, {next(knees)} at best; {both.seconds:.2f} s of CPU\n"
    )


def picture(both: "Curves", *, width: int, utf8: bool) -> Text:
    """Draw hit ratio over capacity, the capacity in powers of ten, in `width` columns."""
    columns = max(width - LEFT - 2, 10)
    lower, upper = (_cells(both, curve, columns) for curve in (both.lru, both.optimum))
    text = Text(no_wrap=True)
    for line in range(HEIGHT):
        shown = line in {0, HEIGHT // 2}
        ratio = both.ceiling * (1 - line / HEIGHT)
        text.append(f"{100 * ratio:5.1f} % " if shown else " " * LEFT, "bright_black")
        text.append("┤" if utf8 and shown else "│" if utf8 else "|", "bright_black")
        for column in range(columns):
            below, above = lower[line][column], upper[line][column]
            mark = chr(0x2800 | below | above) if utf8 else "L" if below else "o" if above else " "
            text.append(mark, LRU if below else OPTIMUM)
        text.append("\n")
    text.append(" " * LEFT + ("└" if utf8 else "+"), "bright_black")
    text.append(_axis(columns, utf8=utf8) + "\n", "bright_black")
    text.append(" " * (LEFT + 1) + _labels(columns) + "\n", "bright_black")
    text.append(" " * (LEFT + 1))
    text.append("LRU" if utf8 else "L LRU", LRU)
    text.append(" below, ")
    text.append("the optimum" if utf8 else "o the optimum", OPTIMUM)
    text.append(" above; capacity in % of the different blocks\n")
    return text


def _cells(both: "Curves", curve: "Curve", columns: int) -> list[list[int]]:
    """Return the braille bits of one curve, [lines][columns]; 0 where nothing is."""
    cells = [[0] * columns for _ in range(HEIGHT)]
    steps, rows = columns * 2, HEIGHT * 4
    for step in range(steps):
        share = 10 ** (DECADES * (step / (steps - 1) - 1))
        hit = curve.at(int(both.num_unique * share)) / (both.ceiling or 1)
        row = min(int((1 - hit) * rows), rows - 1)
        cells[row // 4][step // 2] |= DOTS[step % 2][row % 4]
    return cells


def _axis(columns: int, *, utf8: bool) -> str:
    line = ["─" if utf8 else "-"] * columns
    for decade in range(DECADES + 1):
        line[_place(decade, columns)] = "┴" if utf8 else "+"
    return "".join(line)


def _labels(columns: int) -> str:
    line = [" "] * (columns + 8)
    for decade, label in enumerate(("0.1 %", "1 %", "10 %", "100 %")):
        at = max(_place(decade, columns) - (len(label) - 1 if decade == DECADES else 1), 0)
        line[at : at + len(label)] = label
    return "".join(line).rstrip()


def _place(decade: int, columns: int) -> int:
    return decade * (columns - 1) // DECADES

"""A picture of a tier: namespaces, prefixes by scope, and their recency."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from quire.cli.output import HEIGHTS, is_utf8, progress
from quire.cli.tables import facts_table, plain_table
from quire.cli.tier_place import check_installed, kind_of, reading, shown
from quire.config import format_bytes

if TYPE_CHECKING:
    from quire.tiers.contents.survey import RecordTally, Survey
    from quire.tiers.format import Namespace

HASH_DIGITS = 10
MAX_INDENT = 8

STRIP = 20
"""Characters of a strip: two buckets each, what was used last on the left."""

ASCII_LEVELS = " .:-=+*#@"
STYLES = ("red", "red", "yellow", "yellow", "yellow", "cyan", "cyan", "blue", "blue", "blue")


@dataclass(frozen=True)
class Picture:
    """A tier's directory or address, and what it holds."""

    place: str
    kind: str
    found: "Survey"


def surveyed(place: str) -> Picture:
    """Look through a tier: a directory, or an address. Raises `TierError` and `ConfigError`."""
    check_installed()
    from quire.tiers.contents.survey import survey

    with reading(place) as held, progress("listing records") as begin:
        found = survey(
            held.tier, held.names, lambda done, total: begin(f"reading {done:,} of {total:,}")
        )
        path = Path(place).expanduser() if held.path is None else held.path
        kind = kind_of(path) or place.partition(":")[0]
        return Picture(shown(place), kind, found)


def as_data(picture: Picture) -> dict[str, Any]:
    """Return a survey as JSON has it."""
    import msgspec

    return {
        "place": picture.place,
        "kind": picture.kind,
        **msgspec.to_builtins(picture.found, str_keys=True),
    }


def namespace_words(namespace: "Namespace | None", fingerprint: str) -> str:
    """Say what a namespace is in few words."""
    if namespace is None:
        return f"{fingerprint[:12]}... (no name)" if fingerprint else "not read"
    first, stop = namespace.heads
    heads = f", heads {first}-{stop - 1}" if stop else ", states"
    return (
        f"{_short(namespace.model)}, {_printable(namespace.dtype)}, blocks of "
        f"{namespace.block_size}, layers {_ranges(namespace.layers)}{heads}"
    )


def draw(console: Console, picture: Picture, *, top: int) -> None:
    """Print a survey: the `top` largest namespaces, scopes, and prefixes of each scope."""
    utf8 = is_utf8(console)
    found = picture.found
    total = found.total
    sizes = (f"{count:,} of {format_bytes(size)}" for size, count in found.record_sizes.items())
    facts = [
        ("tier", f"{picture.place} ({picture.kind})"),
        ("records", f"{total.records:,} ({format_bytes(total.num_bytes)})"),
        ("sizes", ", ".join(sizes) or "none"),
    ]
    if found.bad_lines:
        facts.append(("names", f"{found.bad_lines:,} lines could not be read and were left out"))
    console.print()
    console.print(facts_table((name, Text(value)) for name, value in facts))
    if not total.records:
        return
    console.print()
    console.print(_namespaces(found, top, utf8=utf8))
    if found.scopes:
        console.print(_prefixes(found, top, utf8=utf8))
    if found.unnamed.records:
        records, size, strip = _counts(found.unnamed, total, utf8=utf8)
        head = "without a name", "bold"
        console.print(Text.assemble(head, f"  {records} records, {size}  ", strip))
        if not found.scopes:
            console.print(
                "Keys are digests: without names.jsonl beside the records nobody can tell their "
                "prefixes.",
                style="bright_black",
            )
    if total.recency:
        console.print(
            "used: on the left what was used last, on the right what goes first; the height is a "
            "row's share of the records of that age",
            style="bright_black",
        )


def _namespaces(found: "Survey", top: int, *, utf8: bool) -> Table:
    table = _table("namespace")
    for row in found.namespaces[:top]:
        words = namespace_words(row.namespace, row.fingerprint)
        tokens = row.tally.records * row.tokens_per_block
        table.add_row(
            Text(words if row.namespace or not row.dtype else f"{words}, {row.dtype}"),
            f"{tokens:,}" if row.tokens_per_block else "",
            *_counts(row.tally, found.total, utf8=utf8),
        )
    _add_hidden(table, "", len(found.namespaces) - top)
    return table


def _prefixes(found: "Survey", top: int, *, utf8: bool) -> Table:
    table = _table("scope and prefix")
    for scope in found.scopes[:top]:
        name = _printable(scope.label) or f"scope {scope.root[:12]}"
        table.add_row(Text(name, "bold"), "", *_counts(scope.tally, found.total, utf8=utf8))
        largest = sorted(scope.runs, key=lambda run: -run.below.num_bytes)[:top]
        shown = {run.first_block for run in largest}
        for run in scope.runs:
            if run.first_block in shown:
                table.add_row(
                    Text("  " * (1 + min(run.depth, MAX_INDENT)) + run.first_block[:HASH_DIGITS]),
                    f"{run.start_token:,}-{run.stop_token:,}",
                    *_counts(run.own, found.total, utf8=utf8),
                )
        _add_hidden(table, "  ", len(scope.runs) - len(largest))
    _add_hidden(table, "", len(found.scopes) - top)
    return table


def _add_hidden(table: Table, indent: str, count: int) -> None:
    """Say how many rows are left out: a table of thousands takes a minute to lay out."""
    if count > 0:
        table.add_row(Text(f"{indent}and {count:,} smaller ones", "bright_black"))


def _table(what: str) -> Table:
    used = Column("used", no_wrap=True, min_width=STRIP)
    return plain_table(Column(what, overflow="fold"), "tokens", "records", "size", used)


def _counts(tally: "RecordTally", total: "RecordTally", *, utf8: bool) -> tuple[str, str, Text]:
    strip = _strip(tally, total, utf8=utf8)
    return f"{tally.records:,}", format_bytes(tally.num_bytes), strip


def _strip(tally: "RecordTally", total: "RecordTally", *, utf8: bool) -> Text:
    """Draw what share of the records of each age is counted here."""
    levels = HEIGHTS if utf8 else ASCII_LEVELS
    text = Text()
    if not tally.recency:
        return text
    each = len(total.recency) // STRIP
    for place in range(STRIP):
        part = slice(place * each, (place + 1) * each)
        mine, of = sum(tally.recency[part]), sum(total.recency[part])
        level = -(-mine * (len(levels) - 1) // of) if of else 0
        text.append(levels[level], STYLES[place * len(STYLES) // STRIP])
    return text


def _short(model: str) -> str:
    model = _printable(model)
    return f"{model[:12]}..." if len(model) > 40 else model


def _printable(text: str) -> str:
    """Return text without what would move a terminal's cursor."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _ranges(layers: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)

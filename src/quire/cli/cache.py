"""`quire cache`: verify, evict, export and import what a tier holds."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.files import check_writable
from quire.cli.options import AsJson
from quire.cli.output import print_json, stderr, stdout
from quire.cli.tables import plain_table
from quire.cli.tier_check import read_all, show_verified, steps
from quire.cli.tier_place import check_installed, kind_of, path_of, reading, shown, writing
from quire.config import format_bytes, parse_bytes
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.tiers.contents.portable import Part
    from quire.tiers.format import Header

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

DAMAGED = 1

Place = Annotated[
    str,
    typer.Argument(
        help="A tier's directory, or an address like redis://localhost.", show_default=False
    ),
]
Scope = Annotated[
    str | None,
    typer.Option(help="Only of this scope, as quire inspect names it.", show_default=False),
]
Prefix = Annotated[
    str | None,
    typer.Option(
        help="Only of this prefix: the beginning of a block hash, as quire inspect shows it.",
        show_default=False,
    ),
]


@app.callback()
def cache() -> None:
    """What a tier holds: check it, make room, carry it elsewhere.

    quire inspect PATH shows what is there.

    [bold]Examples[/bold]

      quire cache verify /var/cache/quire
      quire cache evict /var/cache/quire --to 10GiB
      quire cache export /var/cache/quire prefixes.safetensors
      quire cache import prefixes.safetensors redis://localhost
    """
    check_installed()


@app.command()
def verify(
    place: Place,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Drop the damaged records.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read every record and check every byte of it.

    Exit code 1 if damaged records are left, or some could not be read.

    Without --repair nothing is changed; with it, the damaged ones are dropped,
    which is what a read in use does. Records of a later version of quire are
    counted as foreign and left alone.

    [bold]Examples[/bold]

      quire cache verify /var/cache/quire
      quire cache verify /var/cache/quire --repair --json
    """
    from quire.tiers.base import Outcome

    with reading(place) as held:
        damaged, counts, num_bytes = read_all(held.tier)
    if damaged:
        # Somebody may have been writing them just then: what is damaged stays so.
        with reading(place) as held:
            suspects = frozenset(bytes.fromhex(each["key"]) for each in damaged)
            still, again, _ = read_all(held.tier, suspects)
        counts[Outcome.CORRUPT] -= len(damaged)
        counts[Outcome.ABSENT] += len(damaged) - again.total()
        counts += again
        damaged = still
    dropped = 0
    if repair and damaged:
        with writing(place) as held:
            keys = [bytes.fromhex(each["key"]) for each in damaged]
            held.tier.delete(keys, 60.0)
            left = held.tier.contains(keys, 60.0)
            dropped = left.count(False)
    found = {
        "place": shown(place),
        "records": sum(counts.values()),
        "bytes": num_bytes,
        "whole": counts[Outcome.HIT],
        "damaged": damaged,
        "dropped": dropped,
        "foreign": counts[Outcome.FOREIGN],
        "gone": counts[Outcome.ABSENT],
        "unread": counts[Outcome.ERROR] + counts[Outcome.TIMEOUT] + counts[Outcome.SKIPPED],
    }
    if as_json:
        print_json(found)
    else:
        show_verified(found)
    if len(damaged) > dropped or found["unread"]:
        raise typer.Exit(DAMAGED)


@app.command()
def evict(
    place: Place,
    *,
    to: Annotated[
        str | None,
        typer.Option(help="Keep so much, the records used last.", show_default=False),
    ] = None,
    scope: Scope = None,
    prefix: Prefix = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop records: those used longest ago, of a scope or a prefix, or all.

    With --prefix the block and all behind it go, so that no tail is left
    without its head. A disk tier gives the room back to the file system.

    [bold]Examples[/bold]

      quire cache evict /var/cache/quire --to 10GiB
      quire cache evict /var/cache/quire --scope "lora=translate" --dry-run
      quire cache evict /var/cache/quire --prefix 3fa1c2
    """
    if sum((to is not None, scope is not None, prefix is not None, everything)) != 1:
        raise ConfigError("say what goes: one of --to SIZE, --scope, --prefix or --all")
    from quire.cli.tier_choice import behind, oldest

    with (reading if dry_run else writing)(place) as held:
        entries = list(held.tier.scan())
        if to is not None:
            gone = oldest(entries, 0 if to == "0" else parse_bytes(to))
        elif everything:
            gone = entries
        else:
            keys = behind(held.names, scope, prefix)
            gone = [entry for entry in entries if entry.key in keys]
        if not dry_run:
            with steps("evicting") as advance:
                for start in range(0, len(gone), 1000):
                    batch = gone[start : start + 1000]
                    held.tier.delete([entry.key for entry in batch], 60.0)
                    advance(start + len(batch), len(gone))
            if held.path is not None:
                from quire.cli.tier_choice import prune_names

                prune_names(held.names, held.path, held.tier)
    gone_bytes = sum(entry.num_bytes for entry in gone)
    left = sum(entry.num_bytes for entry in entries) - gone_bytes
    path = path_of(place)
    if not dry_run and path is not None and kind_of(path) == "disk":
        with writing(str(path), left):
            """Slabs are made to fit the capacity that they are opened with."""
    found = {
        "place": shown(place),
        "dry_run": dry_run,
        "evicted": len(gone),
        "evicted_bytes": gone_bytes,
        "left": len(entries) - len(gone),
        "left_bytes": left,
    }
    if as_json:
        print_json(found)
        return
    stdout().print(
        f"{'would evict' if dry_run else 'evicted'} {len(gone):,} records "
        f"({format_bytes(gone_bytes)}); {len(entries) - len(gone):,} left ({format_bytes(left)})"
    )


@app.command("export")
def export_(
    place: Place,
    file: Annotated[Path, typer.Argument(help="A safetensors file.", show_default=False)],
    *,
    scope: Scope = None,
    prefix: Prefix = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write prefixes to a safetensors file, K and V of each layer as tensors.

    quire cache import reads it, on this machine or another; so does any
    program that reads safetensors. With --prefix the blocks before it are
    written, too: it is of no use without them.

    [bold]Examples[/bold]

      quire cache export /var/cache/quire prefixes.safetensors
      quire cache export redis://localhost all.safetensors --json
      quire cache export /var/cache/quire one.safetensors --prefix 3fa1c2
    """
    from quire.cli.tier_choice import around
    from quire.tiers.contents.portable import export_records

    if file.exists() and not force:
        raise ConfigError(f"{str(file)!r} is there already; take another name, or --force")
    check_writable(file)
    with reading(place) as held, steps("reading") as advance:
        keys = around(held.names, scope, prefix)

        def wanted(header: "Header") -> bool:
            return keys is None or header.key in keys

        done = export_records(held.tier, file, held.names, wanted, advance)
    found = {
        "place": shown(place),
        "file": str(file),
        "records": done.num_records,
        "bytes": done.num_bytes,
        "left_out": done.num_left_out,
        "parts": [_part(part) for part in done.parts],
    }
    if as_json:
        print_json(found)
        return
    console = stdout()
    console.print(
        f"wrote {done.num_records:,} records ({format_bytes(done.num_bytes)}) to {file}",
        markup=False,
    )
    _show_parts(done.parts)
    if done.num_left_out:
        stderr().print(
            f"{done.num_left_out:,} could not be read whole and were left out", style="yellow"
        )


@app.command("import")
def import_(
    file: Annotated[
        Path, typer.Argument(help="What quire cache export wrote.", show_default=False)
    ],
    place: Place,
    *,
    as_json: AsJson = False,
) -> None:
    """Put the prefixes of a file into a tier, after all of it was checked.

    A file that is damaged, or was not written by quire cache export, changes nothing.

    [bold]Examples[/bold]

      quire cache import prefixes.safetensors /var/cache/quire
      quire cache import prefixes.safetensors "disk:/new?capacity=200GiB"
      quire cache import prefixes.safetensors redis://localhost
    """
    from quire.tiers.base import Outcome
    from quire.tiers.contents.portable import import_records

    with writing(place) as held, steps("checking") as advance:
        done = import_records(file, held.tier, progress=advance)
        held.tier.flush()
        if held.path is not None:
            from quire.tiers.contents.names import NamesFile

            NamesFile(held.path).add_book(done.names, held.names)
    refused = {
        outcome: count
        for outcome, count in done.outcomes.items()
        if outcome not in (Outcome.STORED, Outcome.PRESENT)
    }
    found = {
        "file": str(file),
        "place": shown(place),
        "records": done.num_records,
        "bytes": done.num_bytes,
        "stored": done.outcomes.get(Outcome.STORED, 0),
        "present": done.outcomes.get(Outcome.PRESENT, 0),
        "refused": refused,
        "parts": [_part(part) for part in done.parts],
    }
    if as_json:
        print_json(found)
    else:
        stdout().print(
            f"stored {found['stored']:,} of {done.num_records:,} records "
            f"({format_bytes(done.num_bytes)} in all) in {shown(place)}; {found['present']:,} were there",
            markup=False,
        )
        _show_parts(done.parts)
    if refused:
        said = ", ".join(f"{count:,} {outcome}" for outcome, count in refused.items())
        stderr().print(f"error: the tier did not take all: {said}", style="red", markup=False)
        raise typer.Exit(DAMAGED)


def _part(part: "Part") -> dict[str, Any]:
    import msgspec

    return {
        "fingerprint": part.fingerprint,
        "records": part.count,
        "payload_bytes": part.payload_bytes,
        "dtype": part.dtype.name.lower(),
        "namespace": msgspec.to_builtins(part.namespace),
    }


def _show_parts(parts: "list[Part]") -> None:
    from quire.cli.tier_picture import namespace_words

    table = plain_table()
    table.add_column("part")
    table.add_column("records", justify="right")
    table.add_column("of")
    table.add_column("as")
    for number, part in enumerate(parts):
        as_what = "tensors by layer" if len(part.slices) > 1 else "bytes"
        words = namespace_words(part.namespace, part.fingerprint)
        table.add_row(str(number), f"{part.count:,}", words, as_what)
    stdout().print(table)

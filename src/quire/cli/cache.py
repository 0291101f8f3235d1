"""`quire cache`: verify and evict the records of a tier."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from rich.text import Text

from quire.cli.options import AsJson
from quire.cli.output import answer, print_json, progress, stdout
from quire.cli.purging import purge
from quire.cli.tables import facts_table, plain_table
from quire.cli.tier_keys import key
from quire.cli.tier_place import check_installed, kind_of, path_of, reading, shown, writing
from quire.cli.tiers import TierKeyFile
from quire.config import format_bytes, parse_bytes
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.tiers.base import Outcome, Tier

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

DAMAGED = 1
"""The exit code."""

SHOWN = 10
"""Damaged records in a table, at most."""

Place = Annotated[
    str,
    typer.Argument(
        help="A tier's directory, or an address like redis://localhost.", show_default=False
    ),
]
Scope = Annotated[
    str | None,
    typer.Option(help="Only records of this scope, as quire inspect names it.", show_default=False),
]
Prefix = Annotated[
    str | None,
    typer.Option(
        help="Only records of this prefix: the beginning of a block hash, as quire inspect shows it.",
        show_default=False,
    ),
]


@app.callback()
def cache() -> None:
    """Verify and evict the records of a tier.

    quire inspect PATH shows what is there. To carry it elsewhere, copy the
    directory while nothing writes to it.

    [bold]Examples[/bold]

      quire cache verify /var/cache/quire
      quire cache evict /var/cache/quire --to 10GiB
      quire cache key /etc/quire/tier.key
      quire cache purge /var/cache/quire --tenant-file -
    """
    check_installed()


app.command("key")(key)


@app.command()
def verify(
    place: Place,
    *,
    repair: Annotated[bool, typer.Option("--repair", help="Drop the damaged records.")] = False,
    tier_key_file: TierKeyFile = None,
    as_json: AsJson = False,
) -> None:
    """Read every record and check every byte of it.

    [bold]Exit codes[/bold]

      0  every record is whole; with --repair also: the damaged ones are dropped
      1  damaged records are left, records were lost, or some could not be read
      2  the place cannot be read as a tier, or an option cannot be

    Without --repair nothing is changed; with it, the damaged ones are dropped,
    which is what a read in use does, and what is lost is forgotten. Records of a later version of quire are
    counted as foreign and left alone. With --tier-key-file every record needs a signature of one of these keys as well:
    one with a false signature is damaged, one without any, or of another key, is counted as untrusted and left alone.

    [bold]Examples[/bold]

      quire cache verify /var/cache/quire
      quire cache verify /var/cache/quire --repair --json
    """
    from quire.tiers.base import Outcome
    from quire.tiers.keys import TierKey
    from quire.tiers.stack.vouching import vouch

    key = None if tier_key_file is None else TierKey.from_file(tier_key_file)
    with reading(place) as held:
        vouch([held.tier], key)
        damaged, counts, num_bytes = read_all(held.tier)
        lost = num_lost(held.tier)
    if damaged or lost:
        # Somebody may have been writing them just then: what is damaged stays so.
        with reading(place) as held:
            vouch([held.tier], key)
            suspects = frozenset(bytes.fromhex(each["key"]) for each in damaged)
            still, again, _ = read_all(held.tier, suspects)
            lost = min(lost, num_lost(held.tier))
        counts[Outcome.CORRUPT] -= len(damaged)
        counts[Outcome.ABSENT] += len(damaged) - again.total()
        counts += again
        damaged = still
    dropped = 0
    if repair and (damaged or lost):
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
        "lost": lost,
        "foreign": counts[Outcome.FOREIGN],
        "untrusted": counts[Outcome.UNTRUSTED],
        "gone": counts[Outcome.ABSENT],
        "unread": counts[Outcome.ERROR] + counts[Outcome.TIMEOUT] + counts[Outcome.SKIPPED],
    }
    answer(found, show_verified, as_json=as_json)
    if len(damaged) > dropped or (lost and not repair) or found["unread"]:
        raise typer.Exit(DAMAGED)


@app.command()
def evict(
    place: Place,
    *,
    to: Annotated[
        str | None,
        typer.Option(help="Size to keep: the most recently used records.", show_default=False),
    ] = None,
    scope: Scope = None,
    prefix: Prefix = None,
    everything: Annotated[bool, typer.Option("--all", help="All records.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be dropped, and drop nothing.")
    ] = False,
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
    from quire.cli.tier_choice import behind, oldest, prune_names

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
            if held.path is not None and kind_of(held.path) != "disk":
                prune_names(held.names, held.path, held.tier)
    gone_bytes = sum(entry.num_bytes for entry in gone)
    left = sum(entry.num_bytes for entry in entries) - gone_bytes
    path = path_of(place)
    if not dry_run and path is not None and kind_of(path) == "disk":
        with writing(str(path), left) as held:  # slabs are made to fit this, so there is space
            prune_names(held.names, path, held.tier)
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


app.command()(purge)


@contextmanager
def steps(what: str) -> Generator[Callable[[int, int], None]]:
    """Show how many records of how many are done, on a terminal."""
    with progress(what) as begin:
        yield lambda done, total: begin(f"{what} {done:,} of {total:,}")


def read_all(
    tier: "Tier", only: frozenset[bytes] | None = None
) -> tuple[list[dict[str, Any]], Counter[str], int]:
    """Read every record, or some; return those that are damaged, counts by outcome, and bytes."""
    from quire.tiers.base import Outcome
    from quire.tiers.contents.batches import read_batches

    entries = [entry for entry in tier.scan() if only is None or entry.key in only]
    damaged: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    with steps("verifying") as advance:
        for done, batch in read_batches(tier, entries):
            for entry, buffer, outcome in batch:
                found, reason = _judged(entry.key, buffer, outcome)
                counts[found] += 1
                if found is Outcome.CORRUPT:
                    damaged.append(
                        {"key": entry.key.hex(), "bytes": entry.num_bytes, "reason": reason}
                    )
            advance(done, len(entries))
    return damaged, counts, sum(entry.num_bytes for entry in entries)


def num_lost(tier: "Tier") -> int:
    """Return how many places of a disk tier should hold a record and do not."""
    from quire.tiers.disk import Disk

    return tier.recovered.num_lost if isinstance(tier, Disk) else 0


def _judged(key: bytes, record: memoryview, outcome: "Outcome") -> "tuple[Outcome, str]":
    """Return the outcome of a record and the reason of its damage, if there is one.

    A slab's place without the record that it should have reads as absent. If what it has is another
    record, it was given to that one meanwhile; if it is none, it is damaged.
    """
    from quire.errors import RecordError
    from quire.tiers.base import Outcome
    from quire.tiers.format import verify as verify_record

    if outcome is Outcome.FORGED:
        return Outcome.CORRUPT, "its signature does not hold"
    if outcome not in (Outcome.CORRUPT, Outcome.ABSENT) or (
        outcome is Outcome.ABSENT and not any(record[:8])
    ):
        return outcome, ""
    try:
        header = verify_record(record)
    except RecordError as error:
        return Outcome.CORRUPT, str(error)
    if header.key != key:
        return outcome, f"holds the record of key {header.key.hex()}"
    return outcome, "is not the record that was stored here"


def show_verified(found: dict[str, Any]) -> None:
    """Print what verifying found."""
    console = stdout()
    damaged = found["damaged"]
    facts = [
        ("records", f"{found['records']:,} ({format_bytes(found['bytes'])})"),
        ("whole", f"{found['whole']:,}"),
        ("damaged", Text(f"{len(damaged):,}", "red" if damaged else "green")),
    ]
    facts += [
        (name, f"{found[name]:,}")
        for name in ("dropped", "lost", "foreign", "untrusted", "gone", "unread")
        if found[name]
    ]
    console.print(facts_table(facts))
    if damaged:
        table = plain_table(Column("damaged record", no_wrap=True), "size", Column("why"))
        for each in damaged[:SHOWN]:
            table.add_row(each["key"][:16] + "...", format_bytes(each["bytes"]), each["reason"])
        console.print(table)
        if len(damaged) > SHOWN:
            console.print(f"and {len(damaged) - SHOWN:,} more; --json lists all")
        if not found["dropped"]:
            console.print("reads of these are misses; --repair drops them")

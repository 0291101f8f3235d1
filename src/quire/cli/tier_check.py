"""Reading every record of a tier, and saying what is wrong with some."""

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.table import Column
from rich.text import Text

from quire.cli.output import progress, stdout
from quire.cli.tables import facts_table, plain_table
from quire.config import format_bytes

if TYPE_CHECKING:
    from quire.tiers.base import Outcome, Tier

SHOWN = 10


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
    from quire.tiers.contents.batches import batches, carved

    entries = [entry for entry in tier.scan() if only is None or entry.key in only]
    damaged: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    with steps("verifying") as advance:
        for done, batch in batches(entries, [entry.num_bytes for entry in entries]):
            buffers = carved([entry.num_bytes for entry in batch])
            outcomes = tier.get([entry.key for entry in batch], buffers, 60.0)
            for entry, buffer, outcome in zip(batch, buffers, outcomes, strict=True):
                found, reason = _judged(entry.key, buffer, outcome)
                counts[found] += 1
                if found is Outcome.CORRUPT:
                    damaged.append(
                        {"key": entry.key.hex(), "bytes": entry.num_bytes, "reason": reason}
                    )
            advance(done, len(entries))
    return damaged, counts, sum(entry.num_bytes for entry in entries)


def _judged(key: bytes, record: memoryview, outcome: "Outcome") -> "tuple[Outcome, str]":
    """Return the outcome of a record and the reason of its damage, if there is one.

    A slab's place without the record that it should have reads as absent. If what it has is another
    record, it was given to that one meanwhile; if it is none, it is damaged.
    """
    from quire.errors import RecordError
    from quire.tiers.base import Outcome
    from quire.tiers.format import verify as verify_record

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
        for name in ("dropped", "foreign", "gone", "unread")
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

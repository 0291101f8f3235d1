"""Records as a safetensors file, to carry prefixes from one cache to another, and back.

A file has parts, each of records that share a namespace, a group and a size, `n` in number:

    "0.headers"          uint8 [n, 128]      the records' headers as they were sealed, checksums included
    "0.hashes"           uint8 [n, 32]       block hashes, zeros where they are not known
    "0.layers.7.k"       [n, block_size, heads, width]   where the namespace says how payloads lie;
    "0.layers.7.v"                           states: "0.layers.7.<name>" [n, ...]
    "0.payloads"         uint8 [n, bytes]    instead, where it does not, or numbers are quantized

Layers are counted as in the model. The metadata hold "quire" (the version of all this), "parts" (JSON,
what each part's namespace is) and "names" (lines as in `quire.tiers.contents.names`). Blocks stand in the order of
their prefixes where that is known.

Reading puts each record together again, verifies it as a tier does, and checks that its key and
fingerprint are what the metadata say; nothing is stored before all of the file was found right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from quire.errors import RecordError, TierError
from quire.tiers.base import Outcome, Tier
from quire.tiers.contents.batches import BATCH_BYTES, BATCH_RECORDS, batches, carved
from quire.tiers.contents.names import NameBook
from quire.tiers.contents.payload_words import Slice
from quire.tiers.contents.portable_parts import (
    NO_HASH,
    Part,
    entries_of,
    metadata_of,
    parts_of,
    read_parts,
)
from quire.tiers.contents.tensor_file import TensorReader, TensorWriter
from quire.tiers.format import (
    HEADER_BYTES,
    KEY_BYTES,
    Header,
    Namespace,
    record_bytes,
    record_key,
    verify,
)

Progress = Callable[[int, int], None]
"""Told how many steps are done, of how many. Each record takes two: it is read twice."""


class Exported(msgspec.Struct, frozen=True):
    """What an export wrote. `num_left_out`: records that could not be read whole."""

    num_records: int
    num_bytes: int
    num_left_out: int
    parts: list[Part]


class Imported(msgspec.Struct, frozen=True):
    """What an import brought. `outcomes` of `Tier.put`, by name; `names` that came along."""

    num_records: int
    num_bytes: int
    outcomes: dict[str, int]
    parts: list[Part]
    names: NameBook


def export_records(
    tier: Tier,
    path: str | Path,
    names: NameBook | None = None,
    wanted: Callable[[Header], bool] = lambda _: True,
    progress: Progress = lambda _done, _total: None,
) -> Exported:
    """Write a tier's records to a safetensors file, replacing one that is there.

    `wanted` chooses records by their header. Raises `TierError` where the tier cannot be listed,
    has none that are wanted, loses some meanwhile, or where the file cannot be written; then there
    is no new file.
    """
    names = names if names is not None else NameBook()
    entries = list(tier.scan())
    headers: list[Header] = []
    for done, batch in batches(entries, [entry.num_bytes for entry in entries], BATCH_BYTES):
        sizes = [entry.num_bytes for entry in batch]
        for _, record in _get(tier, [entry.key for entry in batch], sizes):
            headers.append(verify(record))
        progress(done, 2 * len(entries))
    chosen = [header for header in headers if wanted(header)]
    if not chosen:
        raise TierError(f"{tier.name} has no records to export: {len(headers)} whole, none wanted")
    parts = parts_of(chosen, names)
    with TensorWriter(Path(path), entries_of(parts), metadata_of(parts, names)) as file:
        done = 2 * len(entries) - len(chosen)
        for name, (part, members) in enumerate(parts):
            _write_part(tier, file, f"{name}.", part, members)
            done += len(members)
            progress(done, 2 * len(entries))
        file.finish()
    return Exported(
        len(chosen),
        sum(record_bytes(header.payload_bytes) for header in chosen),
        len(entries) - len(headers),
        [part for part, _ in parts],
    )


def import_records(
    path: str | Path,
    tier: Tier,
    namespaces: Sequence[Namespace] | None = None,
    progress: Progress = lambda _done, _total: None,
) -> Imported:
    """Put the records of a file that `export_records` wrote into a tier.

    `namespaces`: the only ones that are of use; None: any. Raises `RecordError` where the file is
    none of these, a record in it is not right, or has another namespace; then nothing was stored.
    What the tier refuses is counted.
    """
    with TensorReader(Path(path)) as file:
        parts, names = read_parts(file)
        if namespaces is not None:
            _check_namespaces(file, parts, namespaces)
        runs = _runs(parts)
        total = 2 * sum(part.count for part in parts)
        keys: set[bytes] = set()
        for done, batch in _records(file, parts, runs):
            keys.update(header.key for header, _ in batch)
            if len(keys) != done:
                raise file.wrong("it holds two records of one key")
            progress(done, total)
        outcomes: Counter[str] = Counter()
        num_bytes = 0
        # The last first: what is put last is taken for used last, and heads must outlive tails.
        for done, batch in _records(file, parts, reversed(runs)):
            records = [record for _, record in batch]
            outcomes.update(tier.put([header.key for header, _ in batch], records, 60.0))
            num_bytes += sum(map(len, records))
            progress(total // 2 + done, total)
    counts = {str(outcome): count for outcome, count in sorted(outcomes.items())}
    return Imported(total // 2, num_bytes, counts, parts, names)


def _write_part(
    tier: Tier,
    file: TensorWriter,
    prefix: str,
    part: Part,
    members: Sequence[tuple[Header, bytes]],
) -> None:
    size = record_bytes(part.payload_bytes)
    for done, batch in batches(members, [size] * part.count, BATCH_BYTES):
        records = [
            record for _, record in _get(tier, [each.key for each, _ in batch], [size] * len(batch))
        ]
        if len(records) != len(batch):
            raise TierError(
                f"{len(batch) - len(records)} records were gone from {tier.name} before they were "
                "written; try again, with nobody else at work on it"
            )
        first = done - len(batch)

        def write(name: str, rows: list[bytes], first: int = first) -> None:
            file.write(file.entries[prefix + name].begin + first * len(rows[0]), b"".join(rows))

        write("headers", [bytes(record[:HEADER_BYTES]) for record in records])
        write("hashes", [block for _, block in batch])
        for each in part.slices:
            begin, end = HEADER_BYTES + each.begin, HEADER_BYTES + each.end
            write(each.name, [bytes(record[begin:end]) for record in records])


def _check_namespaces(
    file: TensorReader, parts: Sequence[Part], namespaces: Sequence[Namespace]
) -> None:
    digests = {namespace.digest.hex() for namespace in namespaces}
    for part in parts:
        if part.fingerprint in digests:
            continue
        if part.namespace is None:
            raise file.wrong(f"records of an unknown namespace, fingerprint {part.fingerprint}")
        theirs = msgspec.to_builtins(part.namespace)
        differences = [
            {name: value for name, value in theirs.items() if value != ours[name]}
            for ours in map(msgspec.to_builtins, namespaces)
        ]
        fewest = min(differences, key=len, default=theirs)
        said = ", ".join(f"{name} {value!r}" for name, value in fewest.items())
        raise file.wrong(f"records of another kind than this cache's: {said}")


def _runs(parts: Sequence[Part]) -> list[tuple[int, int, int]]:
    """Return which records are read together: number of the part, first record, how many."""
    runs: list[tuple[int, int, int]] = []
    for number, part in enumerate(parts):
        step = max(1, min(BATCH_BYTES // record_bytes(part.payload_bytes), BATCH_RECORDS))
        runs += [
            (number, first, min(step, part.count - first)) for first in range(0, part.count, step)
        ]
    return runs


def _records(
    file: TensorReader, parts: Sequence[Part], runs: Iterable[tuple[int, int, int]]
) -> Iterator[tuple[int, list[tuple[Header, memoryview]]]]:
    """Put records together again and verify them; yield them in batches, with how many were yielded.

    A batch's buffers are used again for the next of its part: their padding is zeros.
    """
    done, part = 0, -1
    buffers: list[memoryview] = []
    for number, first, count in runs:
        if part != number or len(buffers) < count:
            size, part = record_bytes(parts[number].payload_bytes), number
            buffers = carved([size] * count)
        batch = _batch(file, f"{number}.", parts[number], (first, buffers[:count]))
        done += count
        yield done, batch


def _batch(
    file: TensorReader, prefix: str, part: Part, place: tuple[int, list[memoryview]]
) -> list[tuple[Header, memoryview]]:
    first, records = place

    def rows(name: str, num_bytes: int) -> Iterator[memoryview]:
        begin = file.entries[prefix + name].begin + first * num_bytes
        data = memoryview(file.read(begin, num_bytes * len(records)))
        return (data[at : at + num_bytes] for at in range(0, len(data), num_bytes))

    pieces = [Slice("headers", "U8", (), -HEADER_BYTES, 0), *part.slices]
    for each in pieces:
        if each.begin == each.end:
            continue
        begin, end = HEADER_BYTES + each.begin, HEADER_BYTES + each.end
        for record, row in zip(records, rows(each.name, end - begin), strict=True):
            record[begin:end] = row
    found: list[tuple[Header, memoryview]] = []
    hashes = rows("hashes", KEY_BYTES)
    for index, (record, block) in enumerate(zip(records, hashes, strict=True), start=first):
        try:
            header = verify(record)
        except RecordError as error:
            raise file.wrong(f"record {index} of part {prefix[:-1]}: {error}") from error
        _check_header(file, part, header, bytes(block))
        found.append((header, record))
    return found


def _check_header(file: TensorReader, part: Part, header: Header, block: bytes) -> None:
    said = (part.fingerprint, part.group, part.dtype, part.payload_bytes)
    if said != (header.fingerprint.hex(), header.group, header.dtype, header.payload_bytes):
        raise file.wrong(f"record {header.key.hex()} is not of the part that it stands in")
    if block != NO_HASH and record_key(header.fingerprint, block) != header.key:
        raise file.wrong(
            f"record {header.key.hex()} is not of the block hash that stands beside it"
        )


def _get(tier: Tier, keys: Sequence[bytes], sizes: Sequence[int]) -> list[tuple[bytes, memoryview]]:
    """Return those records that are there and whole."""
    buffers = carved(sizes)
    outcomes = tier.get(keys, buffers, 60.0)
    return [
        (key, buffer)
        for key, buffer, outcome in zip(keys, buffers, outcomes, strict=True)
        if outcome is Outcome.HIT
    ]

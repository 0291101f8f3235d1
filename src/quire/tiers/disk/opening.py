"""Opening of a directory: its slabs, and the records that lie in them."""

from __future__ import annotations

import logging
import os
import re
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.errors import RecordError, TierError
from quire.tiers.directory import InTheWay, open_file
from quire.tiers.disk.index_file import (
    ENTRY,
    KEY_AT,
    MAX_SIZE,
    ROW_BYTES,
    SIZE_UNIT,
    IndexContents,
    checksums,
)
from quire.tiers.disk.slab import Slab, Slabs
from quire.tiers.format import HEADER_BYTES, TAG_AT, read_header, record_bytes
from quire.tiers.places.columns import KEY_WORDS, as_words, later_duplicates

_NAME = re.compile(r"(slab|index)-([1-9][0-9]*)\.quire")

_NO_WORDS = np.zeros((0, KEY_WORDS), np.uint64)

_LOOKED_AT = 64
"""Rows of an index, or records, that are looked at to see whose a file is."""

_log = logging.getLogger(__name__)


class Recovered(msgspec.Struct, frozen=True):
    """Counts of the contents of a directory at opening.

    `num_records`  records that are there; each is verified when it is read
    `num_rebuilt`  of these, which an index did not tell and the records' own headers did
    `num_lost`     places that should hold a record and do not: of a damaged entry there is no
                   telling, so it may have been none
    `num_repeated` records that lay there twice
    """

    num_records: int
    num_rebuilt: int
    num_lost: int
    num_repeated: int

    @property
    def is_clean(self) -> bool:
        """Whether the index files describe exactly the records that are there."""
        return not (self.num_rebuilt or self.num_lost or self.num_repeated)


def open_slabs(slabs: Slabs, room: int) -> Recovered:
    """Open all slabs of a directory, with indexes of their records.

    A slab has the places that its records need, and of the others as many as fit into `room`
    bytes: the file may be of any length, with nothing in it. Raises `OSError`, and `TierError` where a later version wrote an index.
    """
    with ExitStack() as opened:
        for size in _sizes(slabs.directory, "slab"):
            slabs[size] = slabs.open(size)
            opened.callback(slabs[size].close)
        recovered = _fill(slabs, room)
        opened.pop_all()
    if recovered.num_rebuilt or recovered.num_lost:
        _log.warning(
            "%s: %d records were found by their own headers, as the index of their slab was damaged or gone; %d were lost",
            slabs.directory,
            recovered.num_rebuilt,
            recovered.num_lost,
        )
    return recovered


def _fill(slabs: Slabs, room: int) -> Recovered:
    """Publish what the files of indexes tell, and what records' own headers tell where these do not."""
    entries: list[NDArray[Any]] = []
    num_lost = sum(_without_slab(slabs).values())
    num_rebuilt = num_repeated = 0
    for slab in slabs.values():
        contents = slab.index_file.read()
        told, by_header = contents.entries, _by_headers(slab, contents)
        is_inside = told["place"] < slab.places_in_file
        num_lost += np.count_nonzero(~is_inside)
        num_lost += np.count_nonzero(~np.isin(contents.damaged, by_header["place"]))
        num_rebuilt += len(by_header)
        if len(by_header) or not is_inside.all():
            told = np.concatenate([told[is_inside], by_header])
        entries.append(told)
    later = later_duplicates(np.concatenate([_key_words(own) for own in entries] or [_NO_WORDS]))
    if len(later):
        num_repeated = len(later)
        entries = _without_repeated(entries)
    newest = max((int(own["stamp"].max(initial=0)) for own in entries), default=0)
    for own in entries:
        unknown = np.flatnonzero(own["stamp"] == 0)[::-1]  # low places are near heads of prompts
        own["stamp"][unknown] = np.arange(newest + 1, newest + 1 + len(unknown))
        newest += len(unknown)
    for slab, own in zip(slabs.values(), entries, strict=True):
        places = own["place"].astype(np.int64)
        usable = min(room // slab.record_bytes, slab.places_in_file)
        slab.index.grow(max(usable, int(places.max(initial=-1)) + 1))
        slab.index.load(places, own["key"], own["tag"], own["stamp"])
    num_records = sum(map(len, entries))
    return Recovered(num_records, num_rebuilt, int(num_lost), num_repeated)


def _sizes(directory: Path, kind: str) -> list[int]:
    """Return the record sizes of which a directory has a slab, or an index, that can be one of ours."""
    names = [(_NAME.fullmatch(path.name), path) for path in directory.iterdir()]
    found = [
        int(match[2])
        for match, path in names
        if match and match[1] == kind and path.is_file() and not path.is_symlink()
    ]
    return sorted(size for size in found if 0 < size <= MAX_SIZE and not size % SIZE_UNIT)


def _without_slab(slabs: Slabs) -> dict[int, int]:
    """Return by record size how many records the indexes name whose slab somebody removed."""
    found: dict[int, int] = {}
    for size in _sizes(slabs.directory, "index"):
        if size not in slabs:
            index = slabs.index_file(size, os.O_RDONLY)
            try:
                found[size] = len(index.read().entries)
            finally:
                index.close()
    return found


def _without_repeated(entries: list[NDArray[Any]]) -> list[NDArray[Any]]:
    """Return entries of slabs, of those with one key the one that was used last; of equals the lowest place: records move down."""
    order = np.argsort(-np.concatenate([own["stamp"] for own in entries]), kind="stable")
    words = np.concatenate([_key_words(own) for own in entries])
    is_kept = np.ones(len(order), np.bool_)
    is_kept[order[later_duplicates(words[order])]] = False
    ends = np.cumsum([len(own) for own in entries])
    return [own[kept] for own, kept in zip(entries, np.split(is_kept, ends[:-1]), strict=True)]


def _by_headers(slab: Slab, contents: IndexContents) -> NDArray[Any]:
    """Return entries, without stamps, for the records in places of which the index's file does not tell."""
    end = slab.places_in_file
    places = [place for place in contents.damaged if place < end]
    if contents.num_entries < end:
        for written in slab.written_places():
            places += range(max(written.start, contents.num_entries), written.stop)
    found: list[tuple[int, bytes, bytes]] = []
    for place in places:
        header = bytes(slab.read_header(place))
        with suppress(RecordError):
            fields = read_header(header)
            if record_bytes(fields.payload_bytes) == slab.record_bytes:
                found.append((place, fields.key, header[TAG_AT:]))
    entries = np.zeros(len(found), ENTRY)
    entries["size"] = slab.record_bytes // SIZE_UNIT
    if found:
        entries["place"], keys, tags = zip(*found, strict=True)
        _key_words(entries)[:] = as_words(keys)
        entries["tag"] = np.frombuffer(b"".join(tags), "<u8")
    return entries


def _key_words(entries: NDArray[Any]) -> NDArray[np.uint64]:
    return entries.view(np.uint64).reshape(-1, ROW_BYTES // 8)[:, KEY_AT // 8 :]


def check_strangers(directory: Path) -> None:
    """Raise `TierError` where files of a directory without a marker only have names of slabs or indexes.

    Those of a tier that lost its marker say by their content whose they are: one is enough. An empty file says nothing.
    """
    files = [
        (directory / f"{kind}-{size}.quire", ROW_BYTES if kind == "index" else size)
        for kind in ("index", "slab")
        for size in _sizes(directory, kind)
    ]
    written = [(path, step) for path, step in files if path.stat().st_size]
    strangers = [path for path, step in written if not _is_own(path, step)]
    if strangers and len(strangers) == len(written):
        raise TierError(
            f"{strangers[0]} is in the way of a file of the tier, and no marker says that it is one: move it elsewhere"
        )


def _is_own(path: Path, step: int) -> bool:
    """Whether a file has a row of an index or a record among the first, so many bytes each."""
    with suppress(OSError, InTheWay), open(path, "rb", opener=open_file) as file:
        for place in range(_LOOKED_AT):
            head = os.pread(file.fileno(), HEADER_BYTES, place * step)
            row = np.frombuffer(head[:ROW_BYTES].ljust(ROW_BYTES, b"\0"), ENTRY)
            if any(head) and checksums(row)[0] == row["checksum"][0]:
                return True
            with suppress(RecordError):
                read_header(head)
                return True
    return False


def remove_empty(slabs: Slabs) -> None:
    """Remove the slabs without places, from the directory too, and indexes without a slab."""
    for size in _without_slab(slabs):
        slabs.files.unlink(slabs.index_path(size))
    for size in [size for size, slab in slabs.items() if not slab.index.num_places]:
        slabs.pop(size).remove()

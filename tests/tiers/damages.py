"""Ways in which the files of a disk tier go wrong, beside `mutations.py`: damaged, mixed with those of another day or store."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from mutations import SECTOR_BYTES, files_in

from quire.tiers.disk.index_file import ENTRY, ROW_BYTES, checksums
from quire.tiers.format import PAGE_BYTES


def damaged(chance: random.Random, folder: Path, others: Sequence[Path]) -> str:
    """Damage one to three files of a disk tier's folder, or take parts of others; return what was done.

    `others`  what the folder was earlier, or another store
    """
    done: list[str] = []
    for _ in range(chance.choice((1, 1, 2, 3))):
        path = chance.choice(files_in(folder))
        name, damage = chance.choice(list(DAMAGES.items()))
        source = chance.choice(others) / path.relative_to(folder)
        other = (
            source.read_bytes() if source.exists() else chance.choice(files_in(folder)).read_bytes()
        )
        content = bytearray(path.read_bytes())
        damage(chance, content, other)
        path.write_bytes(content)
        if name == "is_gone":
            path.unlink()
        done.append(f"{name} {path.name}")
    return ", ".join(done)


def _flips(chance: random.Random, content: bytearray, _: bytes) -> None:
    for _ in range(chance.choice((1, 4, 100)) if content else 0):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def _is_cut(chance: random.Random, content: bytearray, _: bytes) -> None:
    del content[chance.randrange(len(content) + 1) :]


def _has_zeros(chance: random.Random, content: bytearray, _: bytes) -> None:
    part = _unit(chance, content, (ROW_BYTES, SECTOR_BYTES, PAGE_BYTES))
    content[part] = bytes(part.stop - part.start)


def _has_noise(chance: random.Random, content: bytearray, _: bytes) -> None:
    part = _unit(chance, content, (1, ROW_BYTES, SECTOR_BYTES))
    content[part] = chance.randbytes(part.stop - part.start)


def _repeats(chance: random.Random, content: bytearray, _: bytes) -> None:
    at = chance.randrange(len(content) + 1)
    content[at:at] = content[max(0, at - chance.choice((ROW_BYTES, 200))) : at]


def _grows(chance: random.Random, content: bytearray, other: bytes) -> None:
    content += chance.choice((chance.randbytes(chance.randrange(1, 300)), other))


def _swaps(chance: random.Random, content: bytearray, _: bytes) -> None:
    sizes = chance.choice(((ROW_BYTES,), (SECTOR_BYTES,), (PAGE_BYTES,)))
    one, two = (_unit(chance, content, sizes) for _ in range(2))
    if one.stop - one.start == two.stop - two.start:
        content[one], content[two] = content[two], content[one]


def _is_torn(chance: random.Random, content: bytearray, other: bytes) -> None:
    """Some of it is of another day, or another store."""
    unit = chance.choice((ROW_BYTES, SECTOR_BYTES, PAGE_BYTES))
    for at in range(0, min(len(content), len(other)), unit):
        if chance.random() < 0.5:
            part = slice(at, min(at + unit, len(content), len(other)))
            content[part] = other[part]


def _is_replaced(_: random.Random, content: bytearray, other: bytes) -> None:
    content[:] = other


def _says_otherwise(chance: random.Random, content: bytearray, other: bytes) -> None:
    """Rows of an index have a field of other rows, or another number, and their checksums fit."""
    for _ in range(chance.choice((1, 3, 20))):
        part = _unit(chance, content, (ROW_BYTES,))
        if part.stop - part.start < ROW_BYTES:
            return
        row = np.frombuffer(content[part], ENTRY).copy()
        rows = np.frombuffer(other[: len(other) // ROW_BYTES * ROW_BYTES], ENTRY)
        field = chance.choice(("stamp", "tag", "place", "size", "key", "all"))
        if field == "all" and len(rows):
            place = row["place"].copy()
            row[:] = chance.choice(rows)
            row["place"] = place
        elif field != "all" and len(rows) and chance.random() < 0.7:
            row[field] = chance.choice(rows)[field]
        elif field not in ("key", "all"):
            row[field] = chance.randrange(1 << 31)
        row["checksum"] = checksums(row)
        content[part] = row.tobytes()


def _is_gone(_: random.Random, content: bytearray, __: bytes) -> None:
    content.clear()


DAMAGES: dict[str, Callable[[random.Random, bytearray, bytes], None]] = {
    each.__name__[1:]: each
    for each in (
        _flips,
        _is_cut,
        _has_zeros,
        _has_noise,
        _repeats,
        _grows,
        _swaps,
        _is_torn,
        _is_replaced,
        _says_otherwise,
        _is_gone,
    )
}


def _unit(chance: random.Random, content: bytearray, sizes: Sequence[int]) -> slice:
    """Return where a sector or the like lies, the end of the file at most."""
    size = chance.choice(sizes)
    start = chance.randrange(0, len(content) + 1, size)
    return slice(start, min(start + size, len(content)))

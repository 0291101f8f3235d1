"""Machine code kept from one process to the next: `quire/kernels` in the user's cache directory.

A file is named by the digest of all that decides its code: the sources of this package, the compiler, the CPU, who
writes it and what for. So one that is found is right, and none is ever changed. Where nothing can be kept or read,
code is compiled anew; nobody is told.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec

from quire.config import user_cache

MOST = 256
"""Files that are kept; the oldest go."""

_SOURCES = sorted(Path(__file__).parent.rglob("*.py"))


class MachineCode(msgspec.Struct, frozen=True):
    """Functions by name, and the object file that they are in."""

    names: list[str]
    content: bytes


def machine_code(facts: tuple[object, ...], make: Callable[[], MachineCode]) -> MachineCode:
    """Return the machine code for these facts: kept from any process, or made now.

    facts  what decides the code beside the sources; each says all of itself as `repr`
    """
    place = _place(facts)
    found = None if place is None else _read(place)
    if found is None:
        found = make()
        if place is not None:
            with suppress(OSError):  # the next process makes it again
                _keep(place, found)
    return found


def _place(facts: tuple[object, ...]) -> Path | None:
    """Return the file of what is made of facts; None where sources are not as they were imported, or there is no place."""
    with suppress(OSError, RuntimeError):  # the latter where nobody has a home
        sources = _digest()
        if _SOURCES and _stats() == _IMPORTED:
            name = sha256(repr((sources, *facts)).encode()).hexdigest()
            return user_cache() / "kernels" / name
    return None


@cache
def _digest() -> str:
    return sha256(b"\0".join(path.read_bytes() for path in _SOURCES)).hexdigest()


def _stats() -> list[tuple[int, int, int]]:
    """Return what tells whether sources have changed."""
    stats = (path.stat() for path in _SOURCES)
    return [(each.st_size, each.st_mtime_ns, each.st_ino) for each in stats]


_IMPORTED = _stats()
"""Of the sources as they are imported: this module is the first."""


def _read(place: Path) -> MachineCode | None:
    """Return what a file has, if it is whole, and nobody but this user can have written it."""
    with suppress(OSError, msgspec.DecodeError), place.open("rb") as file:
        stat = os.fstat(file.fileno())
        content = file.read()
        own = stat.st_uid == os.geteuid() and not stat.st_mode & 0o022
        if own and content[:32] == sha256(content[32:]).digest():
            return msgspec.msgpack.decode(content[32:], type=MachineCode)
    return None


def _keep(place: Path, code: MachineCode) -> None:
    """Write a file that is there as a whole or not at all."""
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    packed = msgspec.msgpack.encode(code)
    with NamedTemporaryFile(dir=place.parent, delete=False) as file:
        new = Path(file.name)
        try:
            file.write(sha256(packed).digest() + packed)
            file.close()
            new.replace(place)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
    files = sorted(place.parent.iterdir(), key=lambda each: each.stat().st_mtime_ns)
    for old in files[:-MOST]:
        old.unlink(missing_ok=True)

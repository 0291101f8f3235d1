"""A look into a disk tier's directory that changes nothing, also while a process writes to it."""

from __future__ import annotations

import os

from quire.errors import TierError
from quire.tiers.addresses import directory_of
from quire.tiers.disk.tier import Disk


class DiskReader(Disk):
    """The records that were in a directory when it was opened.

    It takes no lock and stores nothing. A record whose place was given to another since reads as `ABSENT`, one
    whose place is being written just then as `CORRUPT`; what is stored later is not seen.
    Raises `TierError` where the directory cannot be read, or a later version wrote it.
    """

    is_local = False

    def __init__(self, path: str | os.PathLike[str], *, name: str = "disk") -> None:
        directory = directory_of(path)
        if not directory.is_dir():
            raise TierError(f"{path} cannot be read as a disk tier: it is no directory")
        super().__init__(directory, read_only=True, name=name)

    def _size(self) -> tuple[int, int, int]:
        return *super()._size()[:2], -1

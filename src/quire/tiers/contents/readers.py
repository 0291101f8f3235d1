"""Tiers that are looked at and not changed: nothing stored, nothing dropped, no use noted."""

from __future__ import annotations

import os

from quire.errors import TierError
from quire.tiers.base import Answers, Buffers, Keys, Outcome, Tier
from quire.tiers.files.tier import Files
from quire.tiers.purging import Purge
from quire.tiers.wrapped import Wrapped


class ReadOnlyTier(Tier):
    """A tier without `put`, `delete` and `touch`."""

    drops_damaged = False

    def touch(self, keys: Keys) -> None:
        """Leave the order of uses as it is."""

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        """Leave every record `SKIPPED`."""

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        """Leave what is damaged where it is: `get` would have it dropped."""

    def _purge(self, purge: Purge) -> None:
        """Raise `TierError`: nothing is deleted here."""
        raise TierError(f"{self.name} is open to read only")

    def _set_mark(self, name: str, timeout_s: float) -> None:
        """Leave others alone."""

    def _say_damaged(self, keys: list[bytes]) -> None:
        """Say nothing: who looks at a tier says what was found."""


class FilesReader(ReadOnlyTier, Files):
    """The directory of a `Files` tier, which others may be writing to. Raises `TierError` where it cannot be listed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path, read_only=True)


class ReadOnlyView(ReadOnlyTier, Wrapped):
    """Any other tier, which it owns."""

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        self.tier._get(keys, buffers, timeout_s, answers)  # noqa: SLF001 - `get` would drop

"""Tiers that are looked at and not changed: nothing stored, nothing dropped, no use noted."""

from __future__ import annotations

from quire.errors import TierError
from quire.tiers.base import Answers, Buffers, Keys, Outcome
from quire.tiers.purging import Purge
from quire.tiers.wrapped import Wrapped


class ReadOnlyView(Wrapped):
    """A tier without `put`, `delete` and `touch`, which owns the one within."""

    drops_damaged = False

    def touch(self, keys: Keys) -> None:
        """Leave the order of uses as it is."""

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        self.tier._get(keys, buffers, timeout_s, answers)  # noqa: SLF001 - `get` would drop

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        """Leave every record `SKIPPED`."""

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        """Leave what is damaged where it is: `get` would have it dropped."""

    def _purge(self, purge: Purge) -> None:
        """Raise `TierError`: nothing is deleted here."""
        raise TierError(f"{self.name} is open to read only")

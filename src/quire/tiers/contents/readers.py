"""Tiers that are looked at and not changed: nothing stored, nothing dropped, no use noted."""

from __future__ import annotations

import os
from collections.abc import Iterator

from quire.errors import TierError
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier
from quire.tiers.files.tier import Files


class ReadOnlyTier(Tier):
    """A tier without `put` and `delete`."""

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        """Leave every record `SKIPPED`."""

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        """Leave what is damaged where it is: `get` would have it dropped."""


class FilesReader(ReadOnlyTier, Files):
    """The directory of a `Files` tier, which others may be writing to. Raises `TierError` where it cannot be listed."""

    def _open(self) -> None:
        """List the directory instead of making it."""
        try:
            os.listdir(self._root)  # noqa: PTH208 - as the tier does
        except OSError as error:
            raise TierError(f"cannot list {self._root!r}: {error.strerror}") from error


class ReadOnlyView(ReadOnlyTier):
    """Any other tier, which it owns."""

    def __init__(self, tier: Tier) -> None:
        super().__init__()
        self.tier = tier
        self.name, self.is_local = tier.name, tier.is_local

    def scan(self) -> Iterator[ListedRecord]:
        return self.tier.scan()

    def close(self) -> None:
        self.tier.close()

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        self.tier._get(keys, buffers, timeout_s, answers)  # noqa: SLF001 - `get` would drop

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        return self.tier.contains(keys, timeout_s)

    def _size(self) -> tuple[int, int, int]:
        stats = self.tier.stats()
        return stats.num_records, stats.num_bytes, stats.capacity_bytes

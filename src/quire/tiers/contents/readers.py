"""Tiers that are looked at and not changed: nothing stored, nothing dropped, no use noted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from quire.errors import TierError
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier, in_time
from quire.tiers.files.room import file_of, walk


class ReadOnlyTier(Tier):
    """A tier without `put` and `delete`. `path` is its directory; None where it has none."""

    path: Path | None = None

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        """Leave every record `SKIPPED`."""

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        """Leave what is damaged where it is: `get` would have it dropped."""


class FilesReader(ReadOnlyTier):
    """The directory of a `Files` tier, which others may be writing to.

    Raises `TierError` where it cannot be listed.
    """

    name = "files"
    is_local = False

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path: Path | None = Path(path)
        self._root = os.fspath(path)
        self.modified_s: dict[bytes, float] = {}
        try:
            os.listdir(self._root)  # noqa: PTH208 - `walk` finds nothing in what is not there
            listed = sorted(walk(self._root), reverse=True)
        except OSError as error:
            raise TierError(f"cannot list {self._root!r}: {error.strerror}") from error
        self._listed = [
            ListedRecord(key, num_bytes, age) for age, (_, num_bytes, key) in enumerate(listed)
        ]
        self.modified_s = {key: modified / 1e9 for modified, _, key in listed}

    def scan(self) -> Iterator[ListedRecord]:
        return iter(self._listed)

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        for index in in_time(len(keys), timeout_s):
            answers.settle(index, self._read(keys[index], buffers[index]))

    def _read(self, key: bytes, buffer: memoryview) -> Outcome:
        try:
            with Path(file_of(self._root, key)).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != len(buffer):
                    return Outcome.FOREIGN
                done = 0
                while done < len(buffer) and (count := file.readinto(buffer[done:])):
                    done += count
        except FileNotFoundError:
            return Outcome.ABSENT
        except OSError:
            return Outcome.ERROR
        return Outcome.HIT if done == len(buffer) else Outcome.CORRUPT

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        return [key in self.modified_s for key in keys]

    def _size(self) -> tuple[int, int, int]:
        return len(self._listed), sum(entry.num_bytes for entry in self._listed), -1


class ReadOnlyView(ReadOnlyTier):
    """Any other tier, which it owns. What is damaged stays as far as that tier's own reading lets it."""

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

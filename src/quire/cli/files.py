"""Files that commands read and write: an unusable one is refused before the work."""

import csv
import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError


def read_text(path: Path) -> str:
    """Return the text of a file. Raises `ConfigError`."""
    try:
        return path.expanduser().read_text("utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text: {error.reason}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file. Raises `ConfigError`."""
    try:
        path.expanduser().write_text(text, "utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r}: {error.strerror}") from error


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with a column for every key that a row has."""
    rows = list(rows)
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def check_writable(path: Path | None, *endings: str) -> None:
    """Raise `ConfigError` unless a file can be written here later; None is no file.

    Its name has one of the `endings`, where there are any. Nothing is created.
    """
    if path is None:
        return
    place = path.expanduser()
    if endings and place.suffix not in endings:
        raise ConfigError(
            f"cannot write {str(path)!r}: the name must end in {' or '.join(endings)}"
        )
    if place.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: it is a folder; name a file in it")
    if not place.parent.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
    if not os.access(place if place.exists() else place.parent, os.W_OK):
        raise ConfigError(f"cannot write {str(path)!r}: it may not be written by this user")


def check_new(path: Path | None) -> None:
    """Raise `ConfigError` unless a file can be written here later that is not there yet."""
    check_writable(path)
    if path is not None and path.expanduser().exists():
        raise ConfigError(f"{str(path)!r} is there already; name a new file, or move that one away")

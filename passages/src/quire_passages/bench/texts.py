"""Texts of files that passages are cut from."""

import gzip
import zlib
from collections.abc import Sequence
from pathlib import Path

from quire.config import read_bytes
from quire.errors import ConfigError
from quire_passages.bench.prose import manual


def read_texts(paths: Sequence[Path] | None) -> list[str] | None:
    """Return the texts of files, of `.gz` ones as man pages; None for none. Raises `ConfigError`."""
    return None if paths is None else [_read(path) for path in paths]


def _read(path: Path) -> str:
    data = read_bytes(path)
    try:
        if path.suffix != ".gz":
            return data.decode("utf-8")
        return manual(gzip.decompress(data).decode("utf-8"))
    except (OSError, EOFError, ValueError, zlib.error) as error:
        kind = "a man page" if path.suffix == ".gz" else "UTF-8 text"
        raise ConfigError(f"cannot read {str(path)!r} as {kind}: {error}") from error

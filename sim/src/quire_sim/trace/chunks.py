"""Files as chunks of whole lines, whatever they are compressed with; memory stays bounded."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from quire.errors import TraceError

CHUNK_BYTES = 1 << 20
"""Bytes of text that are read at once."""

LINE_LIMIT = 64 << 20
"""No line is longer, in bytes: a prompt of 100 million tokens with ids of eight digits."""

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ZSTD_ENDINGS = frozenset({".zst", ".zstd"})


def line_chunks(path: Path) -> Iterator[bytes]:
    """Yield the text of a file in chunks of whole lines of about a MiB.

    The last chunk ends as the file does, with a newline or without. Raises `TraceError` for a
    line over `LINE_LIMIT` and for compressed data that is damaged or ends too early.
    """
    open_line: list[bytes] = []
    open_bytes = 0
    with open_text(path) as stream:
        while piece := read_some(stream, path):
            cut = piece.rfind(b"\n") + 1
            if cut:
                yield b"".join((*open_line, piece[:cut]))
                open_line, open_bytes = [], 0
            open_line.append(piece[cut:])
            open_bytes += len(piece) - cut
            if open_bytes > LINE_LIMIT:
                raise TraceError(
                    f"{path}: a line is longer than {LINE_LIMIT:,} bytes; a trace is JSON Lines: "
                    "one request per line"
                )
    if open_bytes:
        yield b"".join(open_line)


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank. Raises `TraceError`."""
    for chunk in line_chunks(path):
        yield from lines_in(chunk)


def lines_in(text: bytes) -> Iterator[bytes]:
    """Yield the lines of a text that are not blank."""
    return (line for line in text.split(b"\n") if line.strip())


@contextmanager
def open_text(path: Path) -> Generator[IO[bytes]]:
    """Open a plain, gzip or zstd file by what it begins with. Raises `TraceError`."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise TraceError(
            f"{path} is no regular file: a trace is read more than once; save it to a file first"
        )
    try:
        raw = path.open("rb")
    except OSError as error:
        raise TraceError(f"cannot read {str(path)!r}: {error.strerror}") from error
    with raw:
        head = raw.read(4)
        raw.seek(0)
        if head.startswith(GZIP):
            with gzip.open(raw) as text:
                yield cast("IO[bytes]", text)
        elif head == ZSTD:
            import zstandard  # noqa: PLC0415 - 60 ms

            unpack = zstandard.ZstdDecompressor().stream_reader
            with unpack(raw, read_across_frames=True, closefd=False) as text:
                yield text
        else:
            yield raw


@contextmanager
def create_text(path: Path) -> Generator[IO[bytes]]:
    """Create a file to write lines to, compressed as its suffix says: `.gz`, `.zst`, plain.

    The same lines give the same bytes: no time and no name is stored. Raises `TraceError`.
    """
    try:
        with path.open("wb") as raw:
            if path.suffix == ".gz":
                with gzip.GzipFile("", "wb", 6, raw, mtime=0) as text:
                    yield cast("IO[bytes]", text)
            elif path.suffix in ZSTD_ENDINGS:
                import zstandard  # noqa: PLC0415 - 60 ms

                with zstandard.ZstdCompressor(10).stream_writer(raw, closefd=False) as text:
                    yield text
            else:
                with io.BufferedWriter(raw.raw, CHUNK_BYTES) as text:
                    yield text
    except OSError as error:
        raise TraceError(f"cannot write {str(path)!r}: {error.strerror or error}") from error


def read_some(stream: IO[bytes], path: Path) -> bytes:
    """Return the next MiB or less of a file, b"" at its end. Raises `TraceError`."""
    try:
        return stream.read(CHUNK_BYTES)
    except EOFError as error:
        raise TraceError(
            f"{path}: the compressed data ends too early: the file is truncated"
        ) from error
    except (OSError, zlib.error) as error:
        raise TraceError(f"{path}: the compressed data is damaged: {error}") from error
    except Exception as error:
        if type(error).__name__ == "ZstdError":
            raise TraceError(f"{path}: the compressed data is damaged: {error}") from error
        raise

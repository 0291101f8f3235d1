"""The safetensors format, as far as records need it: written and read as bytes, without a tensor library.

    8 bytes   length of the JSON, little-endian
    JSON      {"__metadata__": {text: text}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}
    data      the tensors behind each other, without gaps

https://huggingface.co/docs/safetensors, section "Format". What is read is checked before it is used.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from quire.errors import RecordError, TierError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}
MAX_HEADER_BYTES = 100_000_000
"""The limit that other readers of the format have."""


class TensorEntry(msgspec.Struct, frozen=True):
    """A tensor of a file; `begin` and `end` are bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that the shape takes."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class TensorWriter:
    """A file under construction: beside its place until `finish`, then renamed.

    Raises `TierError` where it cannot be written, a full disk included: room for all is reserved first.
    """

    def __init__(
        self, path: Path, tensors: Sequence[TensorEntry], metadata: dict[str, str]
    ) -> None:
        self.path = path
        self._unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        head: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for tensor in tensors:
            begin, end = end, end + tensor.num_bytes
            head[tensor.name] = {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "data_offsets": (begin, end),
            }
        text = json.dumps(head, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % 64)
        data = 8 + len(text)
        self.entries = {
            name: TensorEntry(
                name, said["dtype"], said["shape"], *(data + at for at in said["data_offsets"])
            )
            for name, said in head.items()
            if name != "__metadata__"
        }
        self.num_bytes = data + end
        self._file = -1
        try:
            self._file = os.open(
                self._unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600
            )
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file, 0, self.num_bytes)
        except OSError as error:
            self.abandon()
            raise self._failed(error) from error
        self.write(0, len(text).to_bytes(8, "little") + text)

    def write(self, offset: int, data: bytes | bytearray) -> None:
        """Write bytes at an offset of the file."""
        view = memoryview(data)
        try:
            while view:
                count = os.pwrite(self._file, view, offset)
                view, offset = view[count:], offset + count
        except OSError as error:
            raise self._failed(error) from error

    def finish(self) -> None:
        """Put the file in its place."""
        try:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1
            self._unfinished.replace(self.path)
        except OSError as error:
            raise self._failed(error) from error

    def abandon(self) -> None:
        """Leave nothing behind, unless it was finished."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._unfinished.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def _failed(self, error: OSError) -> TierError:
        return TierError(f"cannot write {str(self.path)!r}: {error.strerror}")


class TensorReader:
    """A file that was opened and whose header makes sense. Raises `RecordError` where it does not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TierError(f"cannot read {str(path)!r}: {error.strerror}") from error
        try:
            self.metadata, self.entries = self._read_head()
        except BaseException:
            self.close()
            raise

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes of the file. Raises `RecordError` where it ends before."""
        parts: list[bytes] = []
        while num_bytes:
            try:
                part = os.pread(self._file, num_bytes, offset)
            except OSError as error:
                raise TierError(f"cannot read {str(self.path)!r}: {error.strerror}") from error
            if not part:
                raise self.wrong(f"it ends {num_bytes} bytes before it should")
            parts.append(part)
            offset, num_bytes = offset + len(part), num_bytes - len(part)
        return b"".join(parts)

    def wrong(self, reason: str) -> RecordError:
        """Return the error that says what is wrong with the file."""
        return RecordError(f"{str(self.path)!r}: {reason}")

    def close(self) -> None:
        """Close the file. Closing twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_head(self) -> tuple[dict[str, str], dict[str, TensorEntry]]:
        size = os.fstat(self._file).st_size
        length = int.from_bytes(self.read(0, 8), "little") if size > 8 else MAX_HEADER_BYTES + 1
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise self.wrong("no safetensors file: it does not begin with the length of a header")
        try:
            head: Any = json.loads(self.read(8, length))
        except (ValueError, RecursionError) as error:
            raise self.wrong(f"no safetensors file: its header is no JSON ({error})") from error
        if not isinstance(head, dict):
            raise self.wrong("no safetensors file: its header is no JSON object")
        said = cast("dict[str, Any]", head)
        try:
            metadata = msgspec.convert(said.pop("__metadata__", {}), dict[str, str])
            entries = {name: self._entry(name, each, 8 + length) for name, each in said.items()}
        except (msgspec.ValidationError, TypeError, KeyError, ValueError) as error:
            raise self.wrong(f"no safetensors file: {error}") from error
        end = 8 + length
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin != end:
                raise self.wrong(f"tensor {entry.name!r} does not begin where the one before ends")
            end = entry.end
        if end != size:
            raise self.wrong(f"it has {size} bytes; its header speaks of {end}")
        return metadata, entries

    def _entry(self, name: str, said: Any, data: int) -> TensorEntry:
        dtype, shape = said["dtype"], msgspec.convert(said["shape"], tuple[int, ...])
        begin, end = msgspec.convert(said["data_offsets"], tuple[int, int])
        if dtype not in ITEM_BYTES:
            raise ValueError(
                f"tensor {name!r} is of dtype {dtype!r}; known: {', '.join(ITEM_BYTES)}"
            )
        entry = TensorEntry(name, dtype, shape, data + begin, data + end)
        if min(shape, default=0) < 0 or begin < 0 or entry.num_bytes != end - begin:
            raise ValueError(f"tensor {name!r} of shape {list(shape)} has {end - begin} bytes")
        return entry

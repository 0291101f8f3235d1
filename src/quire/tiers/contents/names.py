"""Names of the keys of a tier's directory: a file beside the records, for people.

Keys are digests. `names.jsonl` says what they were made of, one JSON object per line, appended:

    {"namespace": {"model": ..., "dtype": ..., "block_size": ..., "layout": ..., "layers": [...], "heads": [...]}}
    {"root": "<hash>", "scope": "<label>"}         what a chain of block hashes begins with
    {"parent": "<hash>", "blocks": "<hashes>"}     blocks, each behind the one before, the first behind `parent`

Hashes are 32 bytes in base64, `blocks` are several in one. Nothing depends on this file: without it,
`quire inspect` shows no prefixes. Lines that cannot be read are left out and counted, so that several
writers, or one that was killed, do no harm.
"""

from __future__ import annotations

import binascii
import json
import os
from base64 import b64decode, b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from quire.errors import TierError
from quire.tiers.format import KEY_BYTES, Namespace, record_key

FILE_NAME = "names.jsonl"
LIMIT_BYTES = 64 << 20
"""A file of names stops growing here: the names of a million blocks."""

_BLOCKS_PER_LINE = 64


class NameBook:
    """Namespaces by their digest, labels of scopes by their root hash, the parents of blocks."""

    def __init__(self) -> None:
        self.namespaces: dict[bytes, Namespace] = {}
        self.scopes: dict[bytes, str] = {}
        self.parents: dict[bytes, bytes] = {}
        self.num_bad_lines = 0

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> NameBook:
        """Return the names beside the records of a directory; empty without them.

        Raises `TierError` where the file is there and cannot be read.
        """
        book = cls()
        try:
            with (Path(directory) / FILE_NAME).open("rb") as file:
                for line in file:
                    book.add_line(line)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise TierError(f"cannot read {error.filename!r}: {error.strerror}") from error
        return book

    def add_line(self, line: bytes | str) -> None:
        """Take over what a line says; count it where it says nothing."""
        try:
            self._take(json.loads(line))
        except (ValueError, TypeError, KeyError, RecursionError):
            self.num_bad_lines += 1

    def add_namespace(self, namespace: Namespace) -> None:
        """Name a digest."""
        self.namespaces[namespace.digest] = namespace

    def add_scope(self, root: bytes, label: str) -> None:
        """Name the root hash of a scope, `quire.exchange.hashing.root_digest`."""
        self.scopes[root] = label

    def add_blocks(self, parent: bytes, hashes: Sequence[bytes]) -> None:
        """Say that blocks stand one behind the other, the first behind `parent`."""
        for block in hashes:
            self.parents.setdefault(block, parent)
            parent = block

    def keys(self) -> dict[bytes, tuple[bytes, bytes]]:
        """Return every key that the names make: its namespace digest and its block hash."""
        return {
            record_key(digest, block): (digest, block)
            for digest in self.namespaces
            for block in self.parents
        }

    def lines(self) -> Iterator[str]:
        """Say everything as lines of the file."""
        for namespace in self.namespaces.values():
            yield _line(namespace=msgspec.to_builtins(namespace))
        for root, label in self.scopes.items():
            yield _line(root=_text(root), scope=label)
        run: list[bytes] = []
        for block, parent in self.parents.items():
            if run and (parent != run[-1] or len(run) == _BLOCKS_PER_LINE):
                yield self._blocks_line(run)
                run = []
            run.append(block)
        if run:
            yield self._blocks_line(run)

    def _blocks_line(self, run: list[bytes]) -> str:
        return _line(parent=_text(self.parents[run[0]]), blocks=_text(b"".join(run)))

    def _take(self, said: Any) -> None:
        if "namespace" in said:
            self.add_namespace(msgspec.convert(said["namespace"], Namespace))
        elif "scope" in said:
            (root,) = _hashes(said["root"])
            self.add_scope(root, str(said["scope"]))
        else:
            (parent,) = _hashes(said["parent"])
            self.add_blocks(parent, _hashes(said["blocks"]))


class NamesFile:
    """Appends names to a directory's file. What it cannot write it leaves out: names are for people.

    Each namespace and scope is written once per object; blocks are written as they are given, so
    give new ones only. A line goes out in one write.
    """

    def __init__(self, directory: str | os.PathLike[str], limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = Path(directory) / FILE_NAME
        self.limit_bytes = limit_bytes
        self._written: set[bytes] = set()

    def add(
        self,
        namespaces: Sequence[Namespace] = (),
        scope: tuple[bytes, str] | None = None,
        blocks: tuple[bytes, Sequence[bytes]] | None = None,
    ) -> bool:
        """Append what is new: namespaces, a scope as (root hash, label), blocks as (parent, hashes).

        Returns False where the file is full or cannot be written.
        """
        book = NameBook()
        for namespace in namespaces:
            if namespace.digest not in self._written:
                book.add_namespace(namespace)
        if scope is not None and scope[0] not in self._written:
            book.add_scope(*scope)
        if blocks is not None:
            book.add_blocks(*blocks)
        data = "".join(book.lines()).encode()
        is_written = not data or self._append(data)
        if is_written:
            self._written.update(book.namespaces, book.scopes)
        return is_written

    def _append(self, data: bytes) -> bool:
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                size = os.fstat(file).st_size
                return size + len(data) <= self.limit_bytes and os.write(file, data) == len(data)
            finally:
                os.close(file)
        except OSError:
            return False


def write_names(book: NameBook, directory: str | os.PathLike[str]) -> None:
    """Replace a directory's file by a book. Raises `TierError` where that fails."""
    path = Path(directory) / FILE_NAME
    unfinished = path.with_name(f"{FILE_NAME}.{os.getpid()}.tmp")
    try:
        unfinished.touch(mode=0o600)
        unfinished.write_text("".join(book.lines()), "utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise TierError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _line(**said: object) -> str:
    return json.dumps(said, separators=(",", ":")) + "\n"


def _text(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def _hashes(text: object) -> list[bytes]:
    try:
        data = b64decode(cast("str", text), validate=True)
    except binascii.Error as error:
        raise ValueError(text) from error
    if not data or len(data) % KEY_BYTES:
        raise ValueError(text)
    return [data[start : start + KEY_BYTES] for start in range(0, len(data), KEY_BYTES)]

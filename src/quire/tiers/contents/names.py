"""Names of the keys of a tier's directory: a file beside the records, for people.

Keys are digests. `names.jsonl` says what they were made of: `NamespaceName`, `ScopeName` and `ChainName`, one a line as msgspec
writes them in JSON, appended. Nothing depends on this file: without it, `quire inspect` shows no prefixes. Lines that cannot
be read are left out and counted, so that several writers, or one that was killed, do no harm. A file with a line that quire
cannot have begun is somebody else's: it is never replaced.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec

from quire.errors import TierError
from quire.exchange.hashing import tag_of
from quire.tiers.directory import Descriptor, InTheWay, access_of, open_file
from quire.tiers.format import KEY_BYTES, Namespace, record_key
from quire.tiers.purging import Purged

FILE_NAME = "names.jsonl"
LIMIT_BYTES = 64 << 20
"""A file of names stops growing here: the names of a million blocks."""

TRIES = 64
"""Keys that are tried for each key, block and namespace of a book: so many namespaces at least are all looked through."""

Hash: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]


class NamespaceName(msgspec.Struct, frozen=True, tag="namespace"):
    """A namespace, known by its digest."""

    namespace: Namespace


class ScopeName(msgspec.Struct, frozen=True, tag="scope"):
    """The label of the scope whose chains begin with a root hash, `quire.exchange.hashing.root_digest`."""

    root: Hash
    label: str


class ChainName(msgspec.Struct, frozen=True, tag="blocks"):
    """Blocks, each behind the one before, the first behind `parent`."""

    parent: Hash
    blocks: list[Hash]


Name: TypeAlias = NamespaceName | ScopeName | ChainName

_BEGINNING = b'{"type":"'
_BEGINNINGS = (
    b'{"type":"namespace","namespace":{',
    b'{"type":"scope","root":"',
    b'{"type":"blocks","parent":"',
)
_UNFINISHED = re.compile(rf"{re.escape(FILE_NAME)}\.[0-9a-f]{{16}}\.tmp")
_decoder = msgspec.json.Decoder(Name)


class NameBook:
    """Namespaces by their digest, labels of scopes by their root hash, the parents of blocks."""

    def __init__(self) -> None:
        self.namespaces: dict[bytes, Namespace] = {}
        self.scopes: dict[bytes, str] = {}
        self.parents: dict[bytes, bytes] = {}
        self.num_bad_lines = 0
        self.num_foreign_lines = 0

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> NameBook:
        """Return the names beside the records of a directory; empty without them, or where they are no file.

        Raises `TierError` where the file is there and cannot be read.
        """
        book = cls()
        try:
            with open(Path(directory) / FILE_NAME, "rb", opener=open_file) as file:
                for line in file:
                    try:
                        book.add(_decoder.decode(line))
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        book.num_bad_lines += 1
                        book.num_foreign_lines += not _may_be_torn(line)
        except FileNotFoundError:
            pass
        except InTheWay as error:
            if Path(error.filename).is_symlink():
                raise TierError(f"cannot read {error.filename!r}: links are not followed") from None
        except OSError as error:
            raise TierError(f"cannot read {error.filename!r}: {error.strerror}") from error
        return book

    def add(self, name: Name) -> None:
        """Add the contents of a name."""
        if isinstance(name, NamespaceName):
            self.namespaces[name.namespace.digest] = name.namespace
        elif isinstance(name, ScopeName):
            self.scopes[name.root] = name.label
        else:
            parent = name.parent
            for block in name.blocks:
                self.parents.setdefault(block, parent)
                parent = block

    def named(self, keys: Collection[bytes]) -> tuple[dict[bytes, tuple[bytes, bytes]], bool]:
        """Namespace digest and block hash of each of these keys that the names make, and whether all names were tried.

        A key is a digest of both, so namespaces are tried with every block, the newest first, until every key has a
        name: in all at most `TRIES` times for each key, block and namespace, so that time grows with what there is.
        """
        left = TRIES * (len(keys) + len(self.parents) + len(self.namespaces))
        found: dict[bytes, tuple[bytes, bytes]] = {}
        wanted = set(keys)
        for digest in reversed(self.namespaces):
            left -= len(self.parents)
            if left < 0 or len(found) == len(wanted):
                return found, len(found) == len(wanted)
            for block in self.parents:
                key = record_key(digest, block, tag_of(block))
                if key in wanted:
                    found[key] = digest, block
        return found, True

    def names(self) -> Iterator[Name]:
        """Say everything, each chain as long as it is."""
        yield from map(NamespaceName, self.namespaces.values())
        yield from (ScopeName(*each) for each in self.scopes.items())
        run: list[bytes] = []
        for block, parent in self.parents.items():
            if run and parent != run[-1]:
                yield ChainName(self.parents[run[0]], run)
                run = []
            run.append(block)
        if run:
            yield ChainName(self.parents[run[0]], run)


class NamesFile:
    """Appends names to a directory's file. Names that cannot be written are left out: they are for people.

    Each namespace and scope is written once per object; chains are written as they are given, so
    give new ones only. What one call gives goes out in one write.
    """

    def __init__(self, directory: str | os.PathLike[str], limit_bytes: int = LIMIT_BYTES) -> None:
        self.path = Path(directory) / FILE_NAME
        self.limit_bytes = limit_bytes
        self._written: set[Name] = set()

    def add(self, *names: Name) -> bool:
        """Append new names. Returns False where the file is full or cannot be written."""
        fresh = [each for each in names if isinstance(each, ChainName) or each not in self._written]
        data = _lines(fresh)
        try:
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
            access = access_of(self.path.parent)
            with Descriptor(open_file(os.fspath(self.path), flags, access=access)) as file:
                if not _may_be_torn(b"".join(os.pread(file, 64, 0).partition(b"\n")[:2])):
                    return False  # somebody else's
                size = os.fstat(file).st_size
                if size + len(data) > self.limit_bytes or os.write(file, data) < len(data):
                    return False
        except OSError:
            return False
        self._written.update(each for each in fresh if not isinstance(each, ChainName))
        return True

    def forget(self, tag: bytes) -> None:
        """Let scopes of a tenant, by its tag, be written again."""
        own = {each for each in self._written if isinstance(each, ScopeName)}
        self._written -= {each for each in own if tag_of(each.root) == tag}


def write_names(book: NameBook, directory: str | os.PathLike[str]) -> None:
    """Replace a directory's file by a book. Raises `TierError` where that fails."""
    path = Path(directory) / FILE_NAME
    unfinished = path.with_name(f"{FILE_NAME}.{secrets.token_hex(8)}.tmp")
    is_made = False
    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise InTheWay(os.fspath(path))
        if NameBook.read(directory).num_foreign_lines:
            raise InTheWay(os.fspath(path))
        with open(unfinished, "xb", opener=partial(open_file, access=access_of(directory))) as file:
            is_made = True
            file.write(_lines(book.names()))
        unfinished.replace(path)
    except OSError as error:
        if is_made:
            with suppress(OSError):
                unfinished.unlink()
        reason = error if isinstance(error, InTheWay) else error.strerror
        raise TierError(f"cannot write {str(path)!r}: {reason}") from error


def purge_names(directory: str | os.PathLike[str], tag: bytes) -> Purged:
    """Forget the names of a tenant's scopes and blocks, and lines that cannot be read."""
    path = Path(directory)
    try:
        for unfinished in path.iterdir():
            if _UNFINISHED.fullmatch(unfinished.name):
                status = unfinished.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_nlink == 1:
                    unfinished.unlink(missing_ok=True)
        book = NameBook.read(path)
        blocks = {block: above for block, above in book.parents.items() if tag_of(block) != tag}
        scopes = {root: label for root, label in book.scopes.items() if tag_of(root) != tag}
        is_same = len(blocks) == len(book.parents) and len(scopes) == len(book.scopes)
        if is_same and book.num_bad_lines == book.num_foreign_lines:
            return Purged()
        book.parents, book.scopes = blocks, scopes
        write_names(book, path)
    except (OSError, TierError) as error:
        return Purged(is_complete=False, reason=f"{FILE_NAME} is not purged: {error}")
    return Purged()


def _may_be_torn(line: bytes) -> bool:
    """Whether a line that cannot be read may be the beginning of one of quire's, behind zeros of a loss of power."""
    if line == b"\n":
        return False
    line = line.lstrip(b"\0").rstrip(b"\n")
    for beginning in _BEGINNINGS:
        num_same = next(
            (at for at, each in enumerate(beginning) if line[at : at + 1] != bytes([each])),
            len(beginning),
        )
        rest = line[num_same:]
        if num_same == len(beginning) or not rest or rest.startswith((b"\0", _BEGINNING)):
            return True
    return False


def _lines(names: Sequence[Name] | Iterator[Name]) -> bytes:
    return b"".join(msgspec.json.encode(each) + b"\n" for each in names)

"""The parts of a file of records: what its metadata say, and which tensors it has.

See `quire.tiers.contents.portable`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quire.tiers.contents.names import NameBook
from quire.tiers.contents.payload_words import Slice, slices_of
from quire.tiers.contents.tensor_file import TensorEntry, TensorReader
from quire.tiers.format import HEADER_BYTES, KEY_BYTES, DType, Header, Namespace, record_key

VERSION = "1"
NO_HASH = bytes(KEY_BYTES)
"""Stands for a block hash that is not known."""


class Part(msgspec.Struct, frozen=True):
    """Records of a file that share everything but their tokens. `fingerprint` in hex."""

    fingerprint: str
    group: int
    dtype: DType
    payload_bytes: int
    count: int
    namespace: Namespace | None = None

    @property
    def slices(self) -> list[Slice]:
        """The tensors of one payload."""
        return slices_of(self.namespace, self.payload_bytes)


def parts_of(
    headers: Sequence[Header], names: NameBook
) -> list[tuple[Part, list[tuple[Header, bytes]]]]:
    """Return headers with their block hashes, by part; in the order of the names, else of keys."""
    hashes = {
        record_key(digest, block): (order, block)
        for digest in {header.fingerprint for header in headers}
        for order, block in enumerate(names.parents)
    }
    unknown = (len(names.parents), NO_HASH)
    groups: dict[tuple[bytes, int, int, int], list[Header]] = {}
    for header in headers:
        share = (header.fingerprint, header.group, int(header.dtype), header.payload_bytes)
        groups.setdefault(share, []).append(header)
    found: list[tuple[Part, list[tuple[Header, bytes]]]] = []
    for share in sorted(groups):
        fingerprint, group, dtype, payload_bytes = share
        members = sorted(
            groups[share], key=lambda each: (hashes.get(each.key, unknown)[0], each.key)
        )
        part = Part(
            fingerprint.hex(),
            group,
            DType(dtype),
            payload_bytes,
            len(members),
            names.namespaces.get(fingerprint),
        )
        found.append((part, [(each, hashes.get(each.key, unknown)[1]) for each in members]))
    return found


def entries_of(parts: Sequence[tuple[Part, object]]) -> list[TensorEntry]:
    """Return the tensors of a file with these parts, in order."""
    return [entry for name, (part, _) in enumerate(parts) for entry in _tensors(f"{name}.", part)]


def _tensors(prefix: str, part: Part) -> list[TensorEntry]:
    return [
        TensorEntry(f"{prefix}headers", "U8", (part.count, HEADER_BYTES)),
        TensorEntry(f"{prefix}hashes", "U8", (part.count, KEY_BYTES)),
        *(
            TensorEntry(prefix + each.name, each.dtype, (part.count, *each.shape))
            for each in part.slices
        ),
    ]


def metadata_of(
    parts: Sequence[tuple[Part, Sequence[tuple[Header, bytes]]]], names: NameBook
) -> dict[str, str]:
    """Return what the file says of itself; of the names those that its records have to do with."""
    blocks = {block for _, members in parts for _, block in members}
    book = NameBook()
    for part, _ in parts:
        if part.namespace is not None:
            book.add_namespace(part.namespace)
    for block, parent in names.parents.items():
        if block in blocks:
            book.add_blocks(parent, [block])
            if parent in names.scopes:
                book.add_scope(parent, names.scopes[parent])
    listed = [part for part, _ in parts]
    return {
        "quire": VERSION,
        "parts": msgspec.json.encode(listed).decode(),
        "names": "\n".join(book.lines()),
    }


def read_parts(file: TensorReader) -> tuple[list[Part], NameBook]:
    """Return what the metadata say, checked against the tensors that are there."""
    version = file.metadata.get("quire")
    if version is None:
        raise file.wrong("a safetensors file, but none that quire wrote: its metadata lack 'quire'")
    if version != VERSION:
        raise file.wrong(f"written as version {version!r}; this quire reads {VERSION!r}")
    try:
        parts = msgspec.json.decode(file.metadata.get("parts", ""), type=list[Part])
    except msgspec.MsgspecError as error:
        raise file.wrong(f"its metadata are not those of an export ({error})") from error
    expected = {entry.name: entry for entry in entries_of([(part, None) for part in parts])}
    for name, entry in expected.items():
        found = file.entries.get(name)
        if found is None or (found.dtype, found.shape) != (entry.dtype, entry.shape):
            raise file.wrong(
                f"tensor {name!r} is missing, or not {entry.dtype} {list(entry.shape)}"
            )
    if len(expected) != len(file.entries):
        raise file.wrong(
            f"it has {len(file.entries)} tensors; its metadata speak of {len(expected)}"
        )
    for part in parts:
        if part.namespace is not None and part.namespace.digest.hex() != part.fingerprint:
            raise file.wrong(f"a namespace does not have the fingerprint {part.fingerprint}")
    names = NameBook()
    for line in file.metadata.get("names", "").splitlines():
        names.add_line(line)
    return parts, names

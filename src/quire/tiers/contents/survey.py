"""A count of a tier: by namespace, by scope and prefix as far as names are known, and by recency."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import msgspec

from quire.tiers.base import ListedRecord, Outcome, Tier
from quire.tiers.contents.batches import read_batches
from quire.tiers.contents.names import NameBook
from quire.tiers.format import DType, Namespace, read_header

BUCKETS = 40
READ_RECORDS = 2000
"""So many records without a name are read for what their header says; the others are counted only."""

_UNREAD = b""


class RecordTally(msgspec.Struct):
    """Records counted. `recency`: their bytes by when they were used, newest first.

    A bucket is a fortieth of the tier's records. Empty where the tier does not know.
    """

    records: int = 0
    num_bytes: int = 0
    recency: list[int] = []

    def add(self, num_bytes: int, bucket: int) -> None:
        """Count a record; bucket -1: unknown."""
        self.records += 1
        self.num_bytes += num_bytes
        if bucket >= 0:
            if not self.recency:
                self.recency = [0] * BUCKETS
            self.recency[bucket] += num_bytes

    def add_all(self, other: RecordTally) -> None:
        """Count what another one has counted."""
        self.records += other.records
        self.num_bytes += other.num_bytes
        if other.recency:
            before = self.recency or [0] * BUCKETS
            self.recency = [one + two for one, two in zip(before, other.recency, strict=True)]


class NamespaceRow(msgspec.Struct):
    """Records of one namespace. `fingerprint` in hex; "" for records that were not read."""

    fingerprint: str
    tally: RecordTally
    namespace: Namespace | None = None
    dtype: str = ""
    tokens_per_block: int = 0


class Run(msgspec.Struct):
    """Blocks one behind the other, up to where prefixes part. `below` includes all behind it.

    `depth`: how many runs stand before it, so that a list of runs can be a tree.
    """

    first_block: str
    depth: int
    start_token: int
    stop_token: int
    own: RecordTally
    below: RecordTally


_Branch: TypeAlias = "tuple[Run, list[_Branch]]"
"""A run, and those behind it."""


class ScopeRow(msgspec.Struct):
    """Prefixes that begin with the same root hash. `label` is empty where it has none.

    `runs`: each before those behind it, the largest first.
    """

    root: str
    label: str
    tally: RecordTally
    runs: list[Run]


class Survey(msgspec.Struct):
    """All that was found. `unnamed`: records of blocks that no name leads to."""

    total: RecordTally
    record_sizes: dict[int, int]
    namespaces: list[NamespaceRow]
    scopes: list[ScopeRow]
    unnamed: RecordTally
    bad_lines: int


def survey(
    tier: Tier, names: NameBook, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Survey:
    """Look at every record that a tier lists. Raises `TierError` where it cannot list them."""
    entries = list(tier.scan())
    known, _ = names.named([entry.key for entry in entries])
    scale = max(len(entries), 1)
    named: dict[bytes, RecordTally] = {}
    spaces: dict[bytes, NamespaceRow] = {}
    total, unnamed = RecordTally(), RecordTally()
    sizes: dict[int, int] = {}
    unread: list[ListedRecord] = []
    for entry in entries:
        bucket = min(entry.age * BUCKETS // scale, BUCKETS - 1)
        total.add(entry.num_bytes, bucket)
        sizes[entry.num_bytes] = sizes.get(entry.num_bytes, 0) + 1
        name = known.get(entry.key)
        if name is None:
            unnamed.add(entry.num_bytes, bucket)
            unread.append(entry)
            continue
        digest, block = name
        _row(spaces, digest, names).tally.add(entry.num_bytes, bucket)
        named.setdefault(block, RecordTally()).add(entry.num_bytes, bucket)
    for entry, digest, dtype in _looked_at(tier, unread, progress):
        row = _row(spaces, digest, names)
        row.tally.add(entry.num_bytes, min(entry.age * BUCKETS // scale, BUCKETS - 1))
        row.dtype = row.dtype or dtype
    block_size = max((space.block_size for space in names.namespaces.values()), default=0)
    rows = sorted(spaces.values(), key=lambda row: (-row.tally.num_bytes, row.fingerprint))
    scopes = list(_scopes(names, named, block_size))
    for lost in named.values():  # what is left of them stands behind no root
        unnamed.add_all(lost)
    return Survey(
        total,
        dict(sorted(sizes.items())),
        rows,
        sorted(scopes, key=lambda scope: (-scope.tally.num_bytes, scope.root)),
        unnamed,
        names.num_bad_lines,
    )


def _row(spaces: dict[bytes, NamespaceRow], digest: bytes, names: NameBook) -> NamespaceRow:
    row = spaces.get(digest)
    if row is None:
        space = names.namespaces.get(digest)
        row = spaces[digest] = NamespaceRow(digest.hex(), RecordTally(), space)
        if space is not None:
            row.dtype, row.tokens_per_block = space.dtype, space.block_size
    return row


def _looked_at(
    tier: Tier, entries: Sequence[ListedRecord], progress: Callable[[int, int], None]
) -> Iterator[tuple[ListedRecord, bytes, str]]:
    """Yield what the headers of records say: fingerprint and dtype; nothing of those not read."""
    read = entries[:READ_RECORDS]
    for done, batch in read_batches(tier, read):
        for entry, buffer, outcome in batch:
            if outcome is Outcome.HIT:
                header = read_header(buffer)
                yield entry, header.fingerprint, DType(header.dtype).name.lower()
            else:
                yield entry, _UNREAD, ""
        progress(done, len(read))
    for entry in entries[READ_RECORDS:]:
        yield entry, _UNREAD, ""


def _scopes(
    names: NameBook, named: dict[bytes, RecordTally], block_size: int
) -> Iterator[ScopeRow]:
    """Yield prefixes by root, and take what they hold out of `named`.

    Blocks whose parents lead in a circle have no root.
    """
    children: dict[bytes, list[bytes]] = {}
    for block, parent in names.parents.items():
        children.setdefault(parent, []).append(block)
    for root in [parent for parent in children if parent not in names.parents]:
        runs = _runs(root, children, named, block_size)
        tally = RecordTally()
        for run in runs:
            tally.add_all(run.own)
        if tally.records:
            yield ScopeRow(root.hex(), names.scopes.get(root, ""), tally, runs)


def _runs(
    root: bytes,
    children: dict[bytes, list[bytes]],
    named: dict[bytes, RecordTally],
    block_size: int,
) -> list[Run]:
    """Return the runs behind a root in the order of a tree. Chains may be deep: nothing recurses."""
    made: list[_Branch] = []
    top: list[_Branch] = []
    waiting = [(block, 0, 0, top) for block in children.get(root, ())]
    while waiting:
        block, blocks, depth, beside = waiting.pop()
        run = Run(block.hex(), depth, blocks * block_size, 0, RecordTally(), RecordTally())
        while True:
            blocks += 1
            if block in named:
                run.own.add_all(named.pop(block))
            after = children.get(block, [])
            if len(after) != 1:
                break
            block = after[0]
        run.stop_token = blocks * block_size
        behind: list[_Branch] = []
        made.append((run, behind))
        beside.append(made[-1])
        waiting += [(each, blocks, depth + 1, behind) for each in after]
    for run, behind in reversed(made):  # those below were made after what is above them
        for each in (run.own, *(below.below for below, _ in behind)):
            run.below.add_all(each)
    ordered: list[Run] = []
    left = sorted(top, key=_size)
    while left:
        run, behind = left.pop()
        if run.below.records:
            ordered.append(run)
            left += sorted(behind, key=_size)
    return ordered


def _size(branch: _Branch) -> tuple[int, str]:
    return branch[0].below.num_bytes, branch[0].first_block

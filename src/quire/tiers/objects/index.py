"""The index of an object store: its names, kept in memory, by the keys in them."""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager

import msgspec

from quire.errors import InvariantError
from quire.tiers.objects.names import (
    MAX_RECORDS,
    BundleName,
    BurialName,
    parse_name,
    record_size,
    short_of,
)


class Bundle(msgspec.Struct, eq=False):
    """An object of records. Bit i of `dead` says that record i is deleted."""

    number: int
    path: str
    id: str
    tag: bytes
    shorts: tuple[int, ...]
    object_bytes: int
    record_bytes: int
    dead: int = 0

    @property
    def is_dead(self) -> bool:
        """Whether every record is deleted."""
        return self.dead == (1 << len(self.shorts)) - 1


Place = tuple[Bundle, int]
"""A bundle, and the number of a record in it."""


class BundleIndex:
    """The records of all bundles whose names were learned.

    A key that two writers stored at once lies in two bundles; the first that was learned is the one
    that is read, the others are remembered so that a deletion reaches them.

    For every bundle: its records that are not dead are found by `places`, and no others. About 160 bytes
    per record. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bundles: dict[int, Bundle] = {}
        self._numbers: dict[str, int] = {}
        self._first: dict[int, int] = {}
        """60 bits of a key -> bundle number x 32 + record."""
        self._more: dict[int, list[int]] = {}
        self._burials: dict[str, dict[str, int]] = {}
        """bundle id -> path of a burial -> its mask."""
        self._gone: set[str] | None = None
        """Ids of bundles that were dropped since a listing began, which may show them still; None: nobody lists."""
        self._next = 0
        self._num_bytes = 0

    def learn(self, path: str, object_bytes: int) -> BundleName | BurialName | None:
        """Add an object's name and size; return the parsed name. Learning twice changes nothing.

        What lies in a folder below the others is none of ours, whatever its name.
        """
        name = parse_name(path.rpartition("/")[2]) if path.count("/") < 2 else None
        if isinstance(name, BundleName):
            size = record_size(object_bytes, len(name.shorts))
            if size is None:
                return None
            with self._lock:
                self._add(path, name, object_bytes, size)
        elif name is not None:
            with self._lock:
                if self._is_gone(name.bundle):
                    return name
                self._burials.setdefault(name.bundle, {})[path] = name.mask
                number = self._numbers.get(name.bundle)
                if number is not None:
                    self._bury(self._bundles[number], name.mask)
        return name

    @contextmanager
    def listed(self) -> Generator[None]:
        """While entered, what is dropped stays so whatever is learned; for one listing at a time."""
        with self._lock:
            self._gone = set()
        try:
            yield
        finally:
            with self._lock:
                self._gone = None

    def find(self, key: bytes) -> Place | None:
        """Return the bundle and record that a key is read from."""
        return next(iter(self.places(key)), None)

    def places(self, key: bytes) -> list[Place]:
        """Return everywhere a key lies."""
        short = short_of(key)
        with self._lock:
            code = self._first.get(short)
            codes = [] if code is None else [code, *self._more.get(short, [])]
            return [self._place(each) for each in codes]

    def bury(self, bundle: Bundle, mask: int) -> list[str]:
        """Forget records of a bundle; return the paths of its burials, this one not among them."""
        with self._lock:
            if bundle.number in self._bundles:
                self._bury(bundle, mask)
            return list(self._burials.get(bundle.id, {}))

    def drop(self, bundle: Bundle) -> None:
        """Forget a bundle that is gone."""
        with self._lock:
            if bundle.number in self._bundles:
                self._bury(bundle, (1 << len(bundle.shorts)) - 1)
                del self._bundles[bundle.number], self._numbers[bundle.id]
            self._burials.pop(bundle.id, None)
            if self._gone is not None:
                self._gone.add(bundle.id)

    def drop_all(self, tag: bytes, ids: Collection[str]) -> None:
        """Forget all bundles of a tenant, and those of these ids."""
        with self._lock:
            known = [each for each in self._bundles.values() if each.tag == tag or each.id in ids]
        for bundle in known:
            self.drop(bundle)

    def bundles(self) -> Iterator[Bundle]:
        """Iterate over the bundles that hold something."""
        with self._lock:
            bundles = [each for each in self._bundles.values() if not each.is_dead]
        return iter(bundles)

    @property
    def size(self) -> tuple[int, int]:
        """Records, each key once, and the bytes of all copies."""
        with self._lock:
            return len(self._first), self._num_bytes

    def mend(self) -> None:
        """Rebuild the lookup tables from the bundles after a call was cut off; `dead` is authoritative."""
        with self._lock:
            bundles = list(self._bundles.values())
            self._numbers = {bundle.id: bundle.number for bundle in bundles}
            self._first, self._more, self._num_bytes = {}, {}, 0
            for bundle in bundles:
                self._find_records(bundle)

    def check(self) -> None:
        """Recount; raises `InvariantError`."""
        with self._lock:
            alive = {
                bundle.number * 32 + position: short
                for bundle in self._bundles.values()
                for position, short in enumerate(bundle.shorts)
                if not bundle.dead >> position & 1
            }
            found = {code: short for short, code in self._first.items()}
            found |= {code: short for short, codes in self._more.items() for code in codes}
            num_bytes = sum(self._bundles[code // 32].record_bytes for code in alive)
            if found != alive:
                raise InvariantError(f"{len(found)} records are found, {len(alive)} are there")
            if num_bytes != self._num_bytes:
                raise InvariantError(f"{self._num_bytes} bytes counted, {num_bytes} are there")

    def _place(self, code: int) -> Place:
        return self._bundles[code // 32], code % 32

    def _add(self, path: str, name: BundleName, *sizes: int) -> None:
        if name.id in self._numbers or self._is_gone(name.id):
            return
        bundle = Bundle(self._next, path, name.id, name.tag, name.shorts, *sizes)
        self._next += 1
        self._bundles[bundle.number] = bundle
        self._numbers[bundle.id] = bundle.number
        self._find_records(bundle)
        for mask in self._burials.get(bundle.id, {}).values():
            self._bury(bundle, mask)

    def _find_records(self, bundle: Bundle) -> None:
        """Let the records of a bundle be found that are not dead."""
        for position, short in enumerate(bundle.shorts):
            if bundle.dead >> position & 1:
                continue
            self._num_bytes += bundle.record_bytes
            code = bundle.number * 32 + position
            if self._first.setdefault(short, code) != code:
                self._more.setdefault(short, []).append(code)

    def _is_gone(self, bundle_id: str) -> bool:
        return self._gone is not None and bundle_id in self._gone

    def _bury(self, bundle: Bundle, mask: int) -> None:
        for position, short in enumerate(bundle.shorts):
            bit = 1 << position
            if not mask & bit or bundle.dead & bit:
                continue
            bundle.dead |= bit
            self._num_bytes -= bundle.record_bytes
            code = bundle.number * 32 + position
            codes = [self._first[short], *self._more.pop(short, [])]
            codes.remove(code)
            if codes:
                self._first[short] = codes[0]
            else:
                del self._first[short]
            if codes[1:]:
                self._more[short] = codes[1:]


assert MAX_RECORDS <= 32, "a record's number takes five bits"

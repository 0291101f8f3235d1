"""Purging of an object store: all bundles of one tenant, their burials, and old versions of both."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from quire.errors import TierError
from quire.tiers.objects.client import Client
from quire.tiers.objects.index import BundleIndex
from quire.tiers.objects.listing import PREFIX
from quire.tiers.objects.names import BundleName, BurialName, parse_name
from quire.tiers.objects.versions import Versions
from quire.tiers.purging import AT_ONCE, Purge


class ObjectsPurge(msgspec.Struct):
    """One purge of an object store: a bundle holds records of one tenant only, and its name says of which."""

    _client: Client
    _index: BundleIndex
    _purge: Purge
    _wait_until: Callable[[Any, float], Any]
    _ids: set[str] = set()

    def run(self) -> None:
        """Purge. Raises `TimeoutError` and `TierError`."""
        self._purge.repeat(self._delete_listed)
        self._index.drop_all(self._purge.tag, self._ids)
        self._delete_versions()

    def _delete_listed(self) -> int:
        """Delete the objects of the tenant that a listing shows; return how many there were."""
        sizes: dict[str, int] = {}
        self._wait(partial(self._client.names, PREFIX, None, sizes.__setitem__))
        names = {path: parse_name(path.rpartition("/")[2]) for path in sizes}
        own = {
            path: name
            for path, name in names.items()
            if isinstance(name, BundleName) and name.tag == self._purge.tag
        }
        self._ids |= {name.id for name in own.values()}
        dead = dict.fromkeys(self._ids, 0)
        burials: list[str] = []
        for path, name in names.items():
            if isinstance(name, BurialName) and name.bundle in self._ids:
                burials.append(path)
                dead[name.bundle] |= name.mask
        paths = [*own, *burials]
        for start in range(0, len(paths), AT_ONCE):
            self._wait(partial(self._client.remove, paths[start : start + AT_ONCE]))
        self._purge.count += sum(
            sum(not dead[name.id] >> at & 1 for at in range(len(name.shorts)))
            for name in own.values()
        )
        self._purge.num_bytes += sum(sizes[path] for path in own)
        return len(paths)

    def _delete_versions(self) -> None:
        versions = Versions(self._client.store, PREFIX)
        if versions.reason:
            self._purge.reasons.append(versions.reason)
            return
        call = partial(versions.delete, self._is_own, self._purge)
        try:
            # Twice: of a burial the bundle may come later in the listing.
            for _ in range(2):
                if not self._wait(partial(asyncio.to_thread, call)):
                    break
        except TierError as error:
            self._purge.reasons.append(str(error))

    def _is_own(self, text: str) -> bool:
        name = parse_name(text)
        if isinstance(name, BundleName) and name.tag == self._purge.tag:
            self._ids.add(name.id)
            return True
        return isinstance(name, BurialName) and name.bundle in self._ids

    def _wait(self, call: Any) -> Any:
        return self._wait_until(call, time.monotonic() + self._purge.left_s)

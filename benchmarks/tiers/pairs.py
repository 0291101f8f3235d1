"""The tiers of `beside_raw.py`, each opened beside the raw thing that it stands on."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import TypeAlias

from measure import Pair
from raw import RawFiles, RawMemory, RawMooncake, RawObjects, RawRedis, RawSlab
from redis_here import mooncake_server, redis_server, s3_server

from quire import tiers
from quire.tiers.disk.files import takes_direct
from quire.tiers.format import record_bytes

Opened: TypeAlias = AbstractContextManager[Pair]

KEPT_ROUNDS = 6
"""Rounds that fit a tier that evicts: so many that evicting 5 % in one go is some records."""


def open_pair(name: str, folder: Path, payload_bytes: int, count: int) -> Opened:
    """Open the tier of this name for `count` records a round, in an empty folder.

    Raises `TierError` where what it needs is not there, `ConfigError` where its library is not installed.
    """
    return PAIRS[name](folder, payload_bytes, count)


def _capacity(payload_bytes: int, count: int) -> int:
    return record_bytes(payload_bytes) * KEPT_ROUNDS * count


@contextmanager
def _host(_: Path, payload_bytes: int, count: int) -> Generator[Pair]:
    with tiers.Host(_capacity(payload_bytes, count)) as tier:
        yield Pair(tier, RawMemory(payload_bytes, count), keeps=True, mode="memory")


@contextmanager
def _disk(folder: Path, payload_bytes: int, count: int) -> Generator[Pair]:
    works = takes_direct(folder)
    with tiers.Disk(folder / "disk", _capacity(payload_bytes, count), direct=works) as tier:
        direct = works and payload_bytes % 4096 == 0
        with closing(RawSlab(folder / "raw", payload_bytes, count, direct=direct)) as raw:
            yield Pair(tier, raw, keeps=True, mode="O_DIRECT" if direct else "buffered")


@contextmanager
def _files(folder: Path, payload_bytes: int, count: int) -> Generator[Pair]:
    del payload_bytes, count
    with tiers.Files(folder / "files") as tier, closing(RawFiles(folder / "raw")) as raw:
        yield Pair(tier, raw, mode="buffered, page cache warm")


@contextmanager
def _redis(_folder: Path, payload_bytes: int, count: int) -> Generator[Pair]:
    del payload_bytes, count
    with (
        redis_server() as port,
        tiers.Redis(f"redis://127.0.0.1:{port}") as tier,
        closing(RawRedis("127.0.0.1", port)) as raw,
    ):
        yield Pair(tier, raw, mode="loopback")


@contextmanager
def _objects(folder: Path, payload_bytes: int, count: int) -> Generator[Pair]:
    from obstore.store import LocalStore

    del payload_bytes, count
    (folder / "raw").mkdir()
    with tiers.Objects(LocalStore(folder / "objects", mkdir=True)) as tier:
        yield Pair(tier, RawObjects(LocalStore(folder / "raw")), mode="local directory")


@contextmanager
def _objects_s3(_folder: Path, _payload_bytes: int, _count: int) -> Generator[Pair]:
    from quire.tiers.objects.client import open_store

    keys = {"region": "us-east-1", "access_key_id": "test", "secret_access_key": "test"}
    options = {"allow_http": True}
    with s3_server() as url:
        config = keys | {"endpoint": url}
        raw = RawObjects(open_store("s3://quire/raw", config, options))
        with tiers.Objects("s3://quire/tier", config=config, client_options=options) as tier:
            yield Pair(tier, raw, mode="moto, loopback")


@contextmanager
def _mooncake(_folder: Path, payload_bytes: int, count: int) -> Generator[Pair]:
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # the library logs every connection
    num_bytes = 6 * record_bytes(payload_bytes) * count
    with (
        mooncake_server(num_bytes) as address,
        tiers.Mooncake(address) as tier,
        closing(RawMooncake(address)) as raw,
    ):
        yield Pair(tier, raw, mode="loopback")


PAIRS: dict[str, Callable[[Path, int, int], Opened]] = {
    "host": _host,
    "disk": _disk,
    "files": _files,
    "redis": _redis,
    "objects": _objects,
    "objects-s3": _objects_s3,
    "mooncake": _mooncake,
}
"""What can be measured, by name, in the order of the table."""

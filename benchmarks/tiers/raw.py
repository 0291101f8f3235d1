"""The raw media of tiers, used as plainly as possible: the baselines of `beside_raw.py`."""

from __future__ import annotations

import mmap
import os
import socket
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from measure import Raw, Views

from quire.errors import TierError
from quire.tiers.mooncake.sockets import keep_to_loopback, open_listeners
from quire.tiers.redis.server import RECEIVE_BYTES, SEND_BYTES

PLACES = 2
"""Rounds whose payloads a raw file keeps before it is overwritten from its start, as a tier keeps them."""

GET_WINDOW_BYTES = 1 << 20


class RawMemory(Raw):
    """One anonymous mapping, copied into and out of."""

    def __init__(self, payload_bytes: int, count: int) -> None:
        self._size = payload_bytes
        self._arena = memoryview(mmap.mmap(-1, payload_bytes * count))

    def put(self, numbers: range, payloads: Views) -> None:
        """Copy payloads in."""
        for number, payload in zip(numbers, payloads, strict=True):
            self._arena[number * self._size : (number + 1) * self._size] = payload

    def get(self, numbers: range, buffers: Views) -> None:
        """Copy payloads out."""
        for number, buffer in zip(numbers, buffers, strict=True):
            buffer[:] = self._arena[number * self._size : (number + 1) * self._size]


class RawSlab(Raw):
    """One file that was written before, overwritten and read by `pwritev` and `preadv`, a call per payload.

    `direct` opens it with O_DIRECT; payloads are then whole pages.
    """

    def __init__(self, path: Path, payload_bytes: int, count: int, *, direct: bool) -> None:
        self._size, self._count = payload_bytes, count
        self._round, self._last = 0, -1
        with path.open("wb") as file:
            chunk = bytes(1 << 20)
            for start in range(0, PLACES * count * payload_bytes, len(chunk)):
                file.write(chunk[: PLACES * count * payload_bytes - start])
            file.flush()
            os.fsync(file.fileno())
        self._file = os.open(path, os.O_RDWR | (os.O_DIRECT if direct else 0))

    def put(self, numbers: range, payloads: Views) -> None:
        """Overwrite places; every round goes on where the one before ended."""
        if numbers.start == 0:
            self._round += 1
        for number, payload in zip(numbers, payloads, strict=True):
            if os.pwritev(self._file, [payload], self._offset(number)) != self._size:
                raise TierError(f"a raw write of {self._size} bytes was cut short")

    def get(self, numbers: range, buffers: Views) -> None:
        """Read places of this round."""
        for number, buffer in zip(numbers, buffers, strict=True):
            if os.preadv(self._file, [buffer], self._offset(number)) != self._size:
                raise TierError(f"a raw read of {self._size} bytes was cut short")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _offset(self, number: int) -> int:
        return (self._round % PLACES * self._count + number) * self._size


class RawFiles(Raw):
    """One file per payload: open, write, close; open, read, close. Every round writes new ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()

    def put(self, numbers: range, payloads: Views) -> None:
        """Write files that are not there."""
        for number, payload in zip(numbers, payloads, strict=True):
            with (self._folder / str(number)).open("xb", buffering=0) as file:
                file.write(payload)

    def get(self, numbers: range, buffers: Views) -> None:
        """Read files."""
        for number, buffer in zip(numbers, buffers, strict=True):
            with (self._folder / str(number)).open("rb", buffering=0) as file:
                file.readinto(buffer)

    def forget(self) -> None:
        """Remove all files."""
        for path in self._folder.iterdir():
            path.unlink()


class RawRedis(Raw):
    """SET and GET over one plain socket, under names that are new in every round.

    All SETs of a batch are in flight, and GETs for up to `GET_WINDOW_BYTES`: the server slows down where more
    answers wait to be read.
    """

    def __init__(self, host: str, port: int) -> None:
        self._socket = raw_socket(host, port)
        self._round = 0
        self._written: list[bytes] = []

    def put(self, numbers: range, payloads: Views) -> None:
        """SET all, then read the answers."""
        names = self._names(numbers)
        self._written += names
        raw_put(self._socket, names, payloads)

    def get(self, numbers: range, buffers: Views) -> None:
        """GET a window's values, read the answers, and go on."""
        names = self._names(numbers)
        window = max(1, GET_WINDOW_BYTES // len(buffers[0]))
        for start in range(0, len(names), window):
            part = slice(start, start + window)
            raw_get(self._socket, names[part], buffers[part])

    def forget(self) -> None:
        """UNLINK what was written."""
        words = b"".join(b"$%d\r\n%b\r\n" % (len(name), name) for name in self._written)
        self._socket.sendall(b"*%d\r\n$6\r\nUNLINK\r\n%b" % (1 + len(self._written), words))
        self._socket.recv(64)
        self._round += 1
        self._written = []

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _names(self, numbers: range) -> list[bytes]:
        return [b"raw:%032d%032d" % (self._round, number) for number in numbers]


class RawObjects(Raw):
    """An obstore store, one object per payload, one call after another."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, numbers: range, payloads: Views) -> None:
        """Put objects."""
        for number, payload in zip(numbers, payloads, strict=True):
            self._store.put(f"raw/{number}", payload)

    def get(self, numbers: range, buffers: Views) -> None:
        """Get objects, and copy each where it is wanted."""
        for number, buffer in zip(numbers, buffers, strict=True):
            buffer[:] = memoryview(self._store.get(f"raw/{number}").bytes())


class RawMooncake(Raw):
    """A Mooncake Store's own client, from and into memory that it knows; one batch a call."""

    def __init__(self, master: str) -> None:
        library: Any = import_module("mooncake.store")
        listeners = open_listeners()
        self._store = library.MooncakeDistributedStore()
        self._config = library.ReplicateConfig()
        settings = ("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", master)
        if code := self._store.setup(*settings):
            raise TierError(f"a raw client of Mooncake cannot be set up: error {code}")
        keep_to_loopback(listeners)
        self._known: set[int] = set()
        self._round, self._written = 0, list[str]()

    def put(self, numbers: range, payloads: Views) -> None:
        """Put a batch."""
        names = self._names(numbers)
        self._written += names
        codes = self._store.batch_put_from(names, *self._places(payloads), self._config)
        if min(codes) < 0:
            raise TierError(f"a raw put into Mooncake failed: error {min(codes)}")

    def get(self, numbers: range, buffers: Views) -> None:
        """Get a batch."""
        codes = self._store.batch_get_into(self._names(numbers), *self._places(buffers))
        if min(codes) < 0:
            raise TierError(f"a raw get from Mooncake failed: error {min(codes)}")

    def forget(self) -> None:
        """Remove what was written."""
        self._store.batch_remove(self._written, True)
        self._round, self._written = self._round + 1, []

    def close(self) -> None:
        """Leave the store."""
        self._store.close()

    def _names(self, numbers: range) -> list[str]:
        return [f"raw:{self._round}:{number}" for number in numbers]

    def _places(self, views: Views) -> tuple[list[int], list[int]]:
        addresses = [int(np.frombuffer(view, np.uint8).ctypes.data) for view in views]
        for address, view in zip(addresses, views, strict=True):
            if address not in self._known:
                self._store.register_buffer(address, len(view))
                self._known.add(address)
        return addresses, [len(view) for view in views]


def raw_socket(host: str, port: int) -> socket.socket:
    """Return a connected TCP socket whose buffers are as large as the tier's."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    raw.connect((host, port))
    return raw


def raw_put(raw: socket.socket, keys: list[bytes], values: Views) -> None:
    """SET all values, every command sent before the first answer is read.

    Raises `TierError` where an answer is not `+OK`.
    """
    for key, value in zip(keys, values, strict=True):
        head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, len(value))
        size = len(head) + len(value) + 2
        # One call for all; what a signal cut off follows.
        sent = raw.sendmsg((head, value, b"\r\n"))
        if sent < size:
            raw.sendall((head + bytes(value) + b"\r\n")[sent:])
    expected = b"+OK\r\n" * len(keys)
    answer = bytearray(len(expected))
    _fill(raw, memoryview(answer))
    if not answer.startswith(expected):
        raise TierError(f"the server answered SET with {bytes(answer[:80])!r}, not with +OK")


def raw_get(raw: socket.socket, keys: list[bytes], buffers: Views) -> None:
    """GET values of exactly the buffers' sizes, every command sent before the first answer is read.

    Raises `TierError` where a value has another size or is not there.
    """
    raw.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key) for key in keys))
    end = bytearray(2)
    for buffer in buffers:
        expected = b"$%d\r\n" % len(buffer)
        head = bytearray(len(expected))
        _fill(raw, memoryview(head))
        if not head.startswith(expected):
            raise TierError(f"the server answered GET with {bytes(head)!r}, not with {expected!r}")
        _fill(raw, buffer)
        _fill(raw, memoryview(end))


def _fill(raw: socket.socket, target: memoryview) -> None:
    while target:
        count = raw.recv_into(target)
        if not count:
            raise TierError("the server closed the connection")
        target = target[count:]

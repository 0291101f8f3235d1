"""Records in a Mooncake Store: the memory of many machines behind one master."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from quire.config import check_count, parse_bytes
from quire.errors import ConfigError, TierError
from quire.extras import lacking
from quire.tiers.addresses import described
from quire.tiers.base import Answers, Buffers, Keys, ListedRecord, Outcome, Tier
from quire.tiers.contents.batches import batches
from quire.tiers.format import TENANT_AT
from quire.tiers.mooncake.calls import Caller, Callers
from quire.tiers.mooncake.sockets import (
    Settings,
    address_of,
    check_master,
    is_loopback,
    keep_to_loopback,
    open_listeners,
)
from quire.tiers.purging import Purge

_OUTCOMES = {
    -200: Outcome.FULL,
    -600: Outcome.FOREIGN,
    -702: Outcome.ABSENT,
    -703: Outcome.ABSENT,
    -704: Outcome.ABSENT,
    -707: Outcome.TIMEOUT,
}
"""Of its error codes: no room; larger than the buffer; no replica, none that is whole; no such key;
reading took longer than the master's lease. Others: `ERROR`."""

_CLOSE_TIMEOUT_S = 2.0

Where: TypeAlias = tuple[list[str], list[int], list[int]]
"""Names, addresses and sizes of records, as the library takes them."""


class Mooncake(Tier):
    """A client of a Mooncake Store. A record is an object named `prefix` + the key in hex.

    `master`     host:port of `mooncake_master`
    `host`       this machine's address, under which other clients reach it
    `memory`     what this client adds to the store; None: nothing, it only reads and writes. Records in it end with it
    `buffer`     bytes of one native call, registered with the library once; each caller has that much
    `callers`    calls that run at once, and that may hang: the library has no timeouts, so a call whose deadline passes is left
                 behind on its thread; where all hang, further calls are `TIMEOUT` at once, until one ends
    `replicas`   copies of each record, on different clients
    `metadata`   the metadata server; without one, clients find each other by the master ("P2PHANDSHAKE")
    `protocol`   "tcp", or "rdma" with `devices`, names of its network cards
    `store`      a `MooncakeDistributedStore` that is set up already and stays the caller's; the settings above that say
                 how to join a store are not used then

    The store's master makes room by itself, so records disappear (`ABSENT`); where there is no room yet, `put` is `FULL`. A key that is
    there is not written again (`PRESENT`). The store cannot list its keys, so `scan` raises.

    **Security.** The library listens on all interfaces, on two ports between 15000 and 17000, and asks nobody who they are: over TCP, whoever
    reaches them may read and write memory of this process. Where `host` is a loopback address (the default), the listeners that came
    while it was opened are bound to the loopback device. With any other `host`, keep the network closed to all but the store's machines.

    Opening connects, after a process of its own has tried it: the library stops all of Python until the master answers. Raises `ConfigError` for bad arguments and where the package or a system library is missing,
    `TierError` where the master cannot be reached.
    """

    is_local = False

    def __init__(
        self,
        master: str = "127.0.0.1:50051",
        *,
        host: str = "127.0.0.1",
        memory: str | int | None = None,
        buffer: str | int = "16MiB",
        callers: int = 4,
        prefix: str = "quire:",
        replicas: int = 1,
        metadata: str = "P2PHANDSHAKE",
        protocol: str = "tcp",
        devices: str = "",
        open_timeout_s: float = 10.0,
        store: Any = None,
        name: str = "mooncake",
    ) -> None:
        super().__init__()
        self.name = name
        self._prefix = prefix
        self._buffer_bytes = parse_bytes(buffer)
        segment = 0 if memory is None else parse_bytes(memory)
        check_count("callers", callers)
        check_count("replicas", replicas)
        if protocol not in ("tcp", "rdma"):
            raise ConfigError(f"protocol {described('protocol', protocol)}; known: 'tcp', 'rdma'")
        if store is None:
            address_of(master)
        library = _load()
        self._replicas = library.ReplicateConfig()
        self._replicas.replica_num = replicas
        self._lock = threading.Lock()
        self._deletions_begun = self._deletions_ended = 0
        self._is_owner = store is None
        self._store: Any = library.MooncakeDistributedStore() if store is None else store
        self._callers = Callers(callers, self._store.register_buffer)
        if store is None:
            # The library's own buffer is not used: all transfers are from and to registered memory.
            settings = (host, metadata, segment, 1 << 20, protocol, devices, master)
            try:
                self._join(settings, open_timeout_s)
            except BaseException:
                self._callers.close(lambda _: True, time.monotonic())
                raise

    def _join(self, settings: Settings, timeout_s: float) -> None:
        """Set the store up. Raises `TierError`."""
        host, master = settings[0], settings[-1]
        check_master(settings, timeout_s)
        listeners = open_listeners()
        if code := self._store.setup(*settings):
            raise TierError(f"Mooncake cannot join {master} as {host!r}: error {code}")
        try:
            if is_loopback(host):
                keep_to_loopback(listeners)
        except OSError as error:
            self.close()
            raise TierError(
                f"Mooncake listens on all interfaces, and the kernel does not let it be kept to the loopback device ({error}); "
                "where that is meant, give this machine's address as `host`"
            ) from error

    def scan(self) -> Iterator[ListedRecord]:
        """Raise `TierError`: the store cannot list its keys."""
        raise TierError("a Mooncake Store cannot list its keys")

    def close(self) -> None:
        """Leave the store. The library stops all of Python for about a second meanwhile.

        With a master that does not answer that would be much longer: then the store is left as it is until the process ends.
        """
        last = self._leave if self._is_owner else self._unregister
        self._callers.close(last, time.monotonic() + _CLOSE_TIMEOUT_S)

    def _leave(self, callers: list[Caller]) -> bool:
        """Leave the store; return False where the master does not answer: the library's destructor would stop all of Python."""
        callers[0].deadline = time.monotonic() + min(_CLOSE_TIMEOUT_S, 0.5)
        try:
            answers = self._exist(callers[0], [bytes(32)])[0] >= 0
        except (TimeoutError, TierError):
            answers = False
        if answers:
            self._unregister(callers)
            self._store.close()
        return answers

    def _unregister(self, callers: list[Caller]) -> bool:
        for caller in callers:
            for address in caller.registered:
                self._store.unregister_buffer(address)
        return True

    def _size(self) -> tuple[int, int, int]:
        return -1, -1, -1

    def _get(self, keys: Keys, buffers: Buffers, timeout_s: float, answers: Answers) -> None:
        ended = self._deletions_ended

        def read(caller: Caller) -> None:
            for batch, views, where in self._parts(caller, keys, buffers, range(len(keys))):
                codes = caller.call(partial(self._store.batch_get_into, *where))
                for index, view, code in zip(batch, views, codes, strict=True):
                    if code == len(view):
                        buffers[index][:] = view
                        answers.settle(index, Outcome.HIT)
                    else:
                        answers.settle(index, _outcome_of(code, Outcome.FOREIGN))

        self._callers.use(timeout_s, read)
        if self._deletions_begun != ended:
            # Room of a record that was deleted meanwhile may have been written again while it was read.
            for index in list(answers.damaged):
                answers.settle(index, Outcome.ABSENT)

    def _put(self, keys: Keys, records: Buffers, timeout_s: float, done: list[Outcome]) -> None:
        def write(caller: Caller) -> None:
            for index, size in self._sizes(caller, keys).items():
                if size == len(records[index]):
                    done[index] = Outcome.PRESENT
                else:
                    self._remove(caller, [keys[index]])
            new = [index for index, outcome in enumerate(done) if outcome is Outcome.SKIPPED]
            for batch, views, where in self._parts(caller, keys, records, new):
                for index, view in zip(batch, views, strict=True):
                    view[:] = records[index]
                codes = caller.call(partial(self._store.batch_put_from, *where, self._replicas))
                for index, code in zip(batch, codes, strict=True):
                    done[index] = _outcome_of(code, Outcome.STORED)

        self._callers.use(timeout_s, write)

    def _contains(self, keys: Keys, timeout_s: float) -> list[bool]:
        codes = self._callers.use(timeout_s, lambda caller: self._exist(caller, keys))
        if any(code < 0 for code in codes):
            raise TierError(f"Mooncake does not know whether keys are there: error {min(codes)}")
        return [code == 1 for code in codes]

    def _delete(self, keys: Keys, timeout_s: float) -> None:
        self._callers.use(timeout_s, lambda caller: self._remove(caller, keys))

    def _purge_found(self, purge: Purge) -> int:
        own = f"^{re.escape(self._prefix)}[0-9a-f]{{{2 * TENANT_AT}}}{purge.tag.hex()}$"

        def remove(caller: Caller) -> int:
            return caller.call(lambda: self._store.remove_by_regex(own, True))

        count = self._callers.use(purge.left_s, remove)
        if count < 0:
            raise TierError(f"Mooncake does not remove by name: error {count}")
        purge.count += count
        return count

    def _remove(self, caller: Caller, keys: Keys) -> None:
        names = self._names(keys)

        def remove() -> list[int]:
            # Counted on the caller's thread, where no signal comes between.
            with self._lock:
                self._deletions_begun += 1
            try:
                # By force: a read or a lookup of late leases a record, and would keep a bad one.
                return self._store.batch_remove(names, True)
            finally:
                with self._lock:
                    self._deletions_ended += 1

        failed = [code for code in caller.call(remove) if code < 0 and code != -704]
        if failed:
            raise TierError(f"Mooncake does not remove {len(failed)} keys: error {failed[0]}")

    def _exist(self, caller: Caller, keys: Keys) -> list[int]:
        names = self._names(keys)
        return caller.call(lambda: self._store.batch_is_exist(names)) if names else []

    def _sizes(self, caller: Caller, keys: Keys) -> dict[int, int]:
        """Return the size of each record that is there, by its index."""
        there = [index for index, code in enumerate(self._exist(caller, keys)) if code == 1]
        names = self._names([keys[index] for index in there])
        sizes = caller.call(lambda: [self._store.get_size(name) for name in names])
        # One that another thread deletes or writes at this moment has none.
        return {index: size for index, size in zip(there, sizes, strict=True) if size >= 0}

    def _parts(
        self, caller: Caller, keys: Keys, records: Buffers, indices: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], list[memoryview], Where]]:
        """Split a call so that each part fits the buffer; a record larger than it is a part of its own.

        Yields the indices of a part, the place of each in the caller's memory, and these as the library takes them.
        """
        sizes = [len(records[index]) for index in indices]
        for part in batches(indices, sizes, self._buffer_bytes):
            lengths = [len(records[index]) for index in part]
            starts = [0, *accumulate(lengths)]
            caller.reserve(max(self._buffer_bytes, starts[-1]))
            views = [caller.memory[start:end] for start, end in pairwise(starts)]
            addresses = [caller.address + start for start in starts[:-1]]
            yield part, views, (self._names([keys[index] for index in part]), addresses, lengths)

    def _names(self, keys: Keys) -> list[str]:
        return [self._prefix + key.hex() for key in keys]


def _outcome_of(code: int, success: Outcome) -> Outcome:
    return success if code >= 0 else _OUTCOMES.get(code, Outcome.ERROR)


def _load() -> Any:
    """Return the library. Raises `ConfigError`."""
    try:
        return import_module("mooncake.store")
    except ImportError as error:
        if str(error).startswith("No module named 'mooncake"):
            raise ConfigError(lacking("the Mooncake tier", "mooncake", "mooncake")) from error
        raise ConfigError(
            f"Mooncake's package lacks a system library: {error}; on Debian: apt-get install "
            "libibverbs1 libnuma1 libcurl4"
        ) from error

"""Mooncake Store keeps to the contract of tiers: a master and a second process over TCP on loopback."""

import ctypes
import itertools
import mmap
import os
import socket
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from mooncake_server import MooncakeServer
from processes import SOON_S, free_port, standing_still

import quire.tiers.mooncake.tier as module
from quire.errors import ConfigError, TierError
from quire.tiers.base import Outcome
from quire.tiers.contract import TierContract
from quire.tiers.contract.samples import buffers_like, name_of, names_of, record_of, records_of
from quire.tiers.format import record_bytes
from quire.tiers.mooncake import Mooncake
from quire.tiers.mooncake.calls import Callers
from quire.tiers.mooncake.sockets import keep_to_loopback, open_listeners

HIT, STORED, PRESENT, ABSENT = Outcome.HIT, Outcome.STORED, Outcome.PRESENT, Outcome.ABSENT
TIMEOUT, ERROR, FULL = Outcome.TIMEOUT, Outcome.ERROR, Outcome.FULL

NUMBERS = itertools.count()

needs_mooncake = pytest.mark.system("mooncake")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = MooncakeServer(tmp_path_factory.mktemp("mooncake") / "log")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def client(server):
    """Join once: leaving takes the library a second, in which no Python runs."""
    with Mooncake(server.address) as tier:
        yield tier._store


def open_tier(client, **settings):
    settings.setdefault("prefix", f"test{next(NUMBERS)}:")
    return Mooncake(store=client, **settings)


@needs_mooncake
class TestMooncake(TierContract):
    drops_what_it_read = tells_what_is_there = False

    @pytest.fixture
    def make_tier(self, server, client):
        self.server = server
        return lambda: open_tier(client)

    def search(self, tier, needle):
        """Ask the store itself, which finds names by pattern only where it removes them."""
        pattern = f"^{tier._prefix}.*{needle.hex()}.*$"
        return [pattern] * tier._store.remove_by_regex(pattern, True)

    def tamper(self, tier, key, record):
        tier.delete([key])
        memory = mmap.mmap(-1, max(len(record), 1))
        memory[: len(record)] = record
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert tier._store.register_buffer(address, len(memory)) == 0
        tier._store.put_from(tier._prefix + key.hex(), address, len(record), tier._replicas)
        tier._store.unregister_buffer(address)

    def reopen(self, tier):
        tier.close()
        return open_tier(tier._store, prefix=tier._prefix)

    def stalled(self, tier):
        return standing_still(self.server.master)

    @contextmanager
    def broken(self, tier):
        """No peer can be reached: the library's calls fail."""
        whole = tier._store
        tier._store = FailingStore()
        yield
        tier._store = whole


class FailingStore:
    """Answers as the library does when its master is gone."""

    def batch_is_exist(self, keys):
        return [-900] * len(keys)

    def batch_remove(self, keys, force):
        return [-900] * len(keys)

    def batch_get_into(self, keys, buffers, sizes):
        return [-900] * len(keys)

    def batch_put_from(self, keys, buffers, sizes, config):
        return [-900] * len(keys)


@needs_mooncake
def test_two_clients_share_records_that_lie_in_a_third_process(server, client):
    keys = names_of(range(40))
    records = records_of(keys, 300_000)
    with Mooncake(server.address, prefix="s:") as one, open_tier(client, prefix="s:") as other:
        assert one.put(keys, records, timeout_s=10) == [STORED] * 40
        assert other.put(keys, records, timeout_s=10) == [PRESENT] * 40
        buffers = buffers_like(records)
        assert other.get(keys, buffers, timeout_s=10) == [HIT] * 40
        assert buffers == records
        other.delete(keys, timeout_s=10)
        assert one.contains(keys, timeout_s=10) == [False] * 40


@needs_mooncake
def test_a_memory_process_that_hangs_costs_the_timeout_and_never_gives_wrong_bytes(server, client):
    keys = names_of(range(4))
    records = records_of(keys, 1_000_000)
    with open_tier(client) as tier:
        assert tier.put(keys, records, timeout_s=10) == [STORED] * 4
        buffers = buffers_like(records)
        with standing_still(server.memory):
            began = time.monotonic()
            assert set(tier.get(keys, buffers, timeout_s=0.3)) <= {TIMEOUT, ERROR}
            assert time.monotonic() - began < SOON_S
            assert all(not any(buffer[:200]) for buffer in buffers)
        time.sleep(0.3)
        assert all(not any(buffer[:200]) for buffer in buffers), "a late answer is dropped"
        deadline = time.monotonic() + 60
        while tier.get(keys, buffers, timeout_s=5) != [HIT] * 4:
            assert time.monotonic() < deadline
        assert buffers == records


@pytest.mark.ci
@needs_mooncake
def test_a_master_that_is_killed_and_started_again_is_a_run_of_misses(tmp_path):
    server = MooncakeServer(tmp_path / "log", memory=32 << 20)
    keys = names_of(range(3))
    records = records_of(keys)
    try:
        with Mooncake(server.address) as tier:
            assert tier.put(keys, records, timeout_s=10) == [STORED] * 3
            server.kill()
            for call in (
                lambda: tier.get(keys, buffers_like(records), timeout_s=0.2),
                lambda: tier.put(keys, records, timeout_s=0.2),
                lambda: [TIMEOUT] if not any(tier.contains(keys, timeout_s=0.2)) else [],
            ):
                began = time.monotonic()
                assert set(call()) <= {TIMEOUT, ERROR}
                assert time.monotonic() - began < SOON_S
            server.start()
            deadline = time.monotonic() + 60
            while tier.put(keys, records, timeout_s=1) != [STORED] * 3:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            buffers = buffers_like(records)
            assert tier.get(keys, buffers, timeout_s=10) == [HIT] * 3
            assert buffers == records
    finally:
        server.kill()


@needs_mooncake
def test_a_store_that_is_full_says_so_or_makes_room_and_keeps_no_wrong_record(tmp_path):
    server = MooncakeServer(tmp_path / "log", memory=32 << 20)
    try:
        with Mooncake(server.address) as tier:
            keys = names_of(range(60))
            records = records_of(keys, 1_000_000)
            assert set(tier.put(keys, records, timeout_s=20)) == {STORED, FULL}
            buffers = buffers_like(records)
            got = tier.get(keys, buffers, timeout_s=20)
            assert set(got) <= {HIT, ABSENT}
            assert got.count(HIT) >= 10
            for outcome, buffer, record in zip(got, buffers, records, strict=True):
                assert outcome is not HIT or buffer == record
    finally:
        server.kill()


@needs_mooncake
def test_a_record_larger_than_the_buffer_of_a_call_is_taken(client):
    key, size = name_of(1), 3_000_000
    with open_tier(client, buffer="1MiB") as tier:
        assert tier.put([key], [record_of(key, size)], timeout_s=10) == [STORED]
        buffer = memoryview(bytearray(record_bytes(size)))
        assert tier.get([key], [buffer], timeout_s=10) == [HIT]
        assert buffer == record_of(key, size)


class OverwrittenStore(FailingStore):
    """While a record is read for the first time, it is deleted and its room is written again."""

    def __init__(self, record):
        self.record, self.tier, self.num_reads, self.deleted = record, None, 0, []

    def batch_get_into(self, keys, buffers, sizes):
        self.num_reads += 1
        torn = bytearray(self.record)
        if self.num_reads == 1:
            self.tier.delete([name_of(2)], timeout_s=10)
            torn[-100:] = bytes(100)
        ctypes.memmove(buffers[0], bytes(torn), sizes[0])
        return sizes

    def batch_remove(self, keys, force):
        self.deleted += [key.rpartition(":")[2] for key in keys]
        return [0] * len(keys)


@needs_mooncake
def test_a_record_torn_by_a_deletion_during_its_read_is_absent(client):
    record = record_of(name_of(1), 1000)
    with open_tier(client) as tier:
        joined, tier._store = tier._store, OverwrittenStore(record)
        tier._store.tier = tier
        buffer = memoryview(bytearray(len(record)))
        assert tier.get([name_of(1)], [buffer], timeout_s=10) == [ABSENT]
        assert tier._store.deleted == [name_of(2).hex()]
        assert tier.get([name_of(1)], [buffer], timeout_s=10) == [HIT]
        assert buffer == record
        tier._store = joined


# what hangs


def until_hanging(callers, number):
    deadline = time.monotonic() + 60
    while callers.num_hanging != number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def calling(callers, timeout_s, job):
    return callers.use(timeout_s, lambda caller: caller.call(job))


def test_calls_that_hang_are_bounded_and_further_ones_return_at_once():
    release = threading.Event()
    callers = Callers(2, lambda address, size: 0)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            calling(callers, 0.05, lambda: release.wait(60))
    until_hanging(callers, 2)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="2 calls hang"):
        calling(callers, 30, lambda: None)
    assert time.monotonic() - began < SOON_S
    release.set()
    until_hanging(callers, 0)
    assert calling(callers, 5, lambda: "fresh") == "fresh"
    callers.close(lambda _: True, time.monotonic() + 5)


def slowly(number):
    time.sleep(0.002)
    return number


def test_a_late_answer_is_never_taken_for_the_next_calls_answer():
    callers = Callers(1, lambda address, size: 0)
    for number in range(40):
        with suppress(TimeoutError):
            assert calling(callers, 0.002, partial(slowly, number)) == number
        until_hanging(callers, 0)
    callers.close(lambda _: True, time.monotonic() + 5)


def test_a_caller_is_reused_only_after_its_call_has_ended():
    release = threading.Event()
    callers = Callers(1, lambda address, size: 0)

    def left(caller):
        with pytest.raises(TimeoutError):
            caller.call(lambda: release.wait(60))
        with pytest.raises(TimeoutError, match="busy"):
            calling(callers, 0.02, lambda: None)

    callers.use(0.02, left)
    until_hanging(callers, 1)
    with pytest.raises(TimeoutError, match="1 calls hang"):
        calling(callers, 5, lambda: None)
    release.set()
    until_hanging(callers, 0)

    def used(caller):
        with pytest.raises(TimeoutError, match="busy"):
            calling(callers, 0.02, lambda: None)
        return caller.call(lambda: "fresh")

    assert callers.use(5, used) == "fresh"
    callers.close(lambda _: True, time.monotonic() + 5)


@needs_mooncake
def test_closing_while_calls_hang_returns_in_time(server, client, monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_TIMEOUT_S", 0.3)
    joined = Mooncake(server.address, callers=1)
    for tier in (joined, open_tier(client, callers=1)):
        with standing_still(server.master):
            assert tier.contains([name_of(1)], timeout_s=0.1) == [False]
            began = time.monotonic()
            tier.close()
            assert time.monotonic() - began < SOON_S
            assert tier.contains([name_of(1)], timeout_s=0.1) == [False]


# who may reach it


@needs_mooncake
def test_the_librarys_listeners_answer_on_the_loopback_device_only(server):
    before = open_listeners()
    with Mooncake(server.address) as tier:
        new = {name: fd for name, fd in open_listeners().items() if name not in before}
        assert len(new) == 2
        for fd in new.values():
            with socket.socket(fileno=os.dup(fd)) as listener:
                device = listener.getsockopt(socket.SOL_SOCKET, 25, 16)
                assert device.rstrip(b"\0") == b"lo"
        assert tier.contains([name_of(1)], timeout_s=10) == [False]


def test_a_listener_kept_to_loopback_is_not_reached_by_another_address_of_this_machine():
    before = open_listeners()
    with socket.socket() as listener:
        listener.bind(("0.0.0.0", 0))  # noqa: S104 - what is to be undone
        listener.listen()
        assert keep_to_loopback(before) == 1
        address = ("127.0.0.1", listener.getsockname()[1])
        socket.create_connection(address, timeout=1).close()


# opening


@pytest.mark.parametrize(
    ("master", "settings", "reason"),
    [
        ("nowhere", {}, "give host:port"),
        ("host:port", {}, "give host:port"),
        ("127.0.0.1:1", {"buffer": "some"}, "not a size"),
        ("127.0.0.1:1", {"callers": 0}, "callers must be from 1"),
        ("127.0.0.1:1", {"replicas": 0}, "replicas must be from 1"),
        ("127.0.0.1:1", {"protocol": "carrier pigeon"}, "carrier pigeon"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_reason(master, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        Mooncake(master, **settings)


@needs_mooncake
def test_a_master_that_is_not_there_is_refused_with_its_address():
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(TierError, match=f"no Mooncake master at {address}"):
        Mooncake(address)


@needs_mooncake
def test_a_server_that_is_no_master_is_given_up_in_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        began = time.monotonic()
        with pytest.raises(TierError, match="does not answer as a Mooncake master within"):
            Mooncake(f"127.0.0.1:{silent.getsockname()[1]}", open_timeout_s=0.5)
        assert time.monotonic() - began < SOON_S


def test_a_missing_system_library_is_named_with_what_to_install(monkeypatch):
    def missing(name):
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.setattr(module, "import_module", missing)
    with pytest.raises(ConfigError, match=r"libibverbs\.so\.1.*apt-get install libibverbs1"):
        Mooncake("127.0.0.1:1")

"""A purge leaves no byte of a tenant, whatever became of its records before: evicted, moved, torn, deleted, written over."""

import os
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from searching import found_in_files, found_in_memory

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, names_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.files import Files
from quire.tiers.format import Header, new_buffer, payload_of, record_bytes, seal
from quire.tiers.host import Host

TENANTS = [b"tenant-%d" % number for number in range(3)]
SIZES = [900, 5_000, 70_000]
CAPACITY = 1 << 20


def needle_of(tag):
    return b"needle of " + tag + b"!" * 6


def record_with(key, payload_bytes):
    """Return a record that is full of its tenant's needle."""
    record = new_buffer(record_bytes(payload_bytes))
    needle = needle_of(key[24:])
    payload_of(record, payload_bytes)[:] = (needle * (payload_bytes // 24 + 1))[:payload_bytes]
    seal(record, Header(key, bytes(32), payload_bytes, 16))
    return record


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("put"),
            st.sampled_from(TENANTS),
            st.sampled_from(SIZES),
            st.integers(0, 15),
            st.integers(1, 12),
        ),
        st.tuples(st.just("delete"), st.sampled_from(TENANTS), st.integers(0, 15)),
        st.tuples(st.just("touch"), st.sampled_from(TENANTS), st.integers(0, 15)),
        st.tuples(st.just("reopen")),
        st.tuples(st.just("tear"), st.sampled_from(TENANTS), st.integers(0, 15)),
        st.tuples(st.just("flush")),
    ),
    min_size=1,
    max_size=25,
)
FILLING = [("put", tenant, size, 0, 12) for size in SIZES for tenant in TENANTS]
"""Each size takes room from the one before: records are evicted and moved."""


class Kind:
    """A kind of tier in a folder of its own."""

    def __init__(self, kind):
        self._kind = kind
        self._folder = Path(tempfile.mkdtemp(prefix="quire-purge-"))

    def open(self):
        if self._kind == "host":
            return Host(CAPACITY)
        if self._kind == "files":
            return Files(self._folder / "kv", CAPACITY)
        return Disk(
            self._folder / "kv", CAPACITY, direct={"disk": None, "cached": False}[self._kind]
        )

    def reopened(self, tier):
        if self._kind == "host":
            return tier
        tier.close()
        return self.open()

    def search(self, tier, needle):
        if self._kind == "host":
            return found_in_memory(tier, needle)
        return found_in_files(self._folder, needle)


def key_of(tenant, size, number):
    return name_of(SIZES.index(size) * 100 + number, tenant)


def tear(tier, key):
    """Leave half of a record where it lay, and no header, as a writer does that dies."""
    if not isinstance(tier, Disk):
        return
    spot = tier._records.find([key])[0]
    if spot is not None:
        tier.delete([key])
        size = spot.slab.record_bytes
        junk = new_buffer(size)
        junk[size // 2 :] = (needle_of(key[24:]) * (size // 24 + 1))[: size - size // 2]
        with tier._records.lock:
            (place,) = spot.slab.index.reserve_within(spot.place, spot.place + 1, 1).tolist()
        spot.slab.write(place, junk)
        with tier._records.lock:
            spot.slab.index.release(place)


def play(kind, tier, steps):
    """Do all steps; return the tier and all keys that were ever put."""
    keys = set()
    for what, *facts in steps:
        if what == "put":
            tenant, size, first, count = facts
            some = [key_of(tenant, size, (first + at) % 16) for at in range(count)]
            tier.put(some, [record_with(key, size) for key in some], timeout_s=10)
            keys.update(some)
        elif what == "reopen":
            tier = kind.reopened(tier)
        elif what == "flush":
            tier.flush()
        else:
            tenant, number = facts
            some = [key_of(tenant, size, number) for size in SIZES]
            if what == "tear":
                for key in some:
                    tear(tier, key)
            else:
                getattr(tier, what)(some)
    return tier, keys


def is_whole(tier, keys):
    """Return the keys of those records that are found, byte for byte."""
    found = set()
    for key in keys:
        for size in SIZES:
            buffer = new_buffer(record_bytes(size))
            if tier.get([key], [buffer], timeout_s=10) == [Outcome.HIT]:
                assert buffer == record_with(key, size)
                found.add(key)
    return found


@pytest.mark.cases(2)
@pytest.mark.parametrize("name", ["host", "files", "disk", "cached"])
@given(steps=STEPS, tenant=st.sampled_from(TENANTS))
@example(steps=[*FILLING, ("reopen",), ("delete", TENANTS[0], 3)], tenant=TENANTS[0])
@example(steps=[FILLING[0], ("tear", TENANTS[0], 3), ("delete", TENANTS[0], 1)], tenant=TENANTS[0])
@example(
    steps=[FILLING[0], FILLING[3], ("put", TENANTS[1], SIZES[2], 0, 1)],  # leaves chunks free
    tenant=TENANTS[0],
)
@example(
    steps=[FILLING[6], *[("put", each, SIZES[1], at, 12) for each in TENANTS[1:] for at in (0, 4)]],
    tenant=TENANTS[0],
)
@settings(max_examples=15)
def test_a_purge_leaves_no_byte_of_its_tenant_whatever_went_before(name, steps, tenant):
    kind = Kind(name)
    tier, keys = play(kind, kind.open(), steps)
    others = [key for key in sorted(keys) if key[24:] != tenant]
    before = {key for key, there in zip(others, tier.contains(others), strict=True) if there}
    told = tier.purge(tenant, 30)
    assert told.is_complete, told.reason
    assert kind.search(tier, needle_of(tenant)) == []
    assert kind.search(tier, tenant) == []
    assert not any(tier.contains([key for key in keys if key[24:] == tenant]))
    assert is_whole(tier, others) == before
    tier.check()
    tier = kind.reopened(tier)
    assert is_whole(tier, others) == before
    assert tier.purge(tenant, 30).count == 0
    tier.close()


@pytest.mark.parametrize("direct", [None, False])
def test_a_reader_beside_a_purged_disk_misses(tmp_path, direct):
    keys = [*names_of(range(9), TENANTS[0]), *names_of(range(9), TENANTS[1])]
    records = records_of(keys, 70_000)
    with Disk(tmp_path, "8MiB", direct=direct) as tier:
        tier.put(keys, records, timeout_s=10)
        tier.flush()
        with Disk(tmp_path, read_only=True) as reader:
            tier.purge(TENANTS[0], 30)
            outcomes = reader.get(keys, buffers_like(records), timeout_s=10)
            assert outcomes == [Outcome.ABSENT] * 9 + [Outcome.HIT] * 9
            told = reader.purge(TENANTS[1], 30)
            assert (told.count, told.is_complete) == (0, False)
            assert "read only" in told.reason


def test_a_place_that_is_read_during_a_purge_is_wiped_when_the_reader_is_done(tmp_path):
    (key,) = names_of(range(1), TENANTS[0])
    with Disk(tmp_path, "8MiB") as tier:
        tier.put([key], [record_with(key, 70_000)], timeout_s=10)
        purger = threading.Thread(target=tier.purge, args=(TENANTS[0], 30))

        def read():
            (spot,) = tier._records.pinned([key])
            purger.start()
            purger.join(0.2)
            assert purger.is_alive(), "the bytes are there as long as the reader needs them"
            tier._records.unpin([spot])

        tier._in_call(read)
        purger.join()
        assert found_in_files(tmp_path, needle_of(TENANTS[0])) == []


def test_a_writer_in_another_process_takes_back_what_it_began_before_a_purge(tmp_path):
    """Two tiers on one directory stand for two processes: only files tell one of the other."""
    (mine,), (other,) = names_of(range(1), TENANTS[0]), names_of(range(1), TENANTS[1])
    writer, purger = Files(tmp_path), Files(tmp_path)
    put = writer._put

    def put_beside_a_purge(*given):
        assert purger.purge(TENANTS[0], 30).is_complete
        put(*given)

    writer._put = put_beside_a_purge
    assert writer.put([mine, other], records_of([mine, other])) == [Outcome.SKIPPED, Outcome.STORED]
    assert found_in_files(tmp_path, TENANTS[0]) == []
    writer._put = put
    assert writer.put([mine], records_of([mine])) == [Outcome.STORED]


def test_unfinished_files_of_a_tenant_go(tmp_path):
    mine, other = name_of(1, TENANTS[0]), name_of(1, TENANTS[1])
    with Files(tmp_path) as tier:
        for key in (mine, other):
            (tmp_path / "unfinished" / f"{key.hex()}.{os.urandom(8).hex()}").write_bytes(b"half")
        assert tier.purge(TENANTS[0], 30).is_complete
        assert [
            path.name[:64] for path in (tmp_path / "unfinished").glob("*.????????????????")
        ] == [other.hex()]


def test_memory_that_was_lent_and_comes_back_without_a_record_is_zeroed():
    with Host(CAPACITY) as tier:
        keys = names_of(range(3), TENANTS[0])
        tier.put(keys, [record_with(key, 5_000) for key in keys])
        lent = tier.lend([record_bytes(5_000)] * 2)
        for record, key in zip(lent, names_of(range(10, 12), TENANTS[0]), strict=True):
            record[:] = record_with(key, 5_000)
        tier.put(names_of([10], TENANTS[0]), lent[:1])
        assert tier.purge(TENANTS[0], 30).count == 4
        tier.take_back(lent)
        assert found_in_memory(tier, needle_of(TENANTS[0])) == []

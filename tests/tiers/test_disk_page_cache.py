"""Reads and writes of a disk tier through the page cache, and those that go past it."""

import errno
import os

import pytest
from disk_help import get, put

from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import names_of, record_of
from quire.tiers.disk import Disk
from quire.tiers.disk import files as disk_files
from quire.tiers.disk.files import O_DIRECT, DiskFiles, takes_direct
from quire.tiers.disk.page_cache import PageCache

HIT, STORED, CORRUPT = Outcome.HIT, Outcome.STORED, Outcome.CORRUPT
PAYLOAD = 100_000
RECORD = len(record_of(names_of([0])[0], PAYLOAD))


class NotingFiles(DiskFiles):
    """Notes which way each access to a slab took, `direct` or `cached`, and fails syncs of those in `failing`."""

    def __init__(self):
        self.ways = {}
        self.reads, self.writes, self.syncs = [], [], []
        self.failing = ()

    def open(self, path, flags):
        descriptor = super().open(path, flags)
        if path.name.startswith("slab"):
            self.ways[descriptor] = "direct" if flags & O_DIRECT else "cached"
        return descriptor

    def read_at(self, descriptor, buffer, offset):
        if descriptor in self.ways:
            self.reads.append(self.ways[descriptor])
        return super().read_at(descriptor, buffer, offset)

    def read_run(self, descriptor, buffers, offset):
        self.reads += [self.ways[descriptor]] * len(buffers)
        return super().read_run(descriptor, buffers, offset)

    def write_run(self, descriptor, parts, offset):
        self.writes += [self.ways[descriptor]] * len(parts)
        super().write_run(descriptor, parts, offset)

    def write_at(self, descriptor, data, offset):
        if len(data) == RECORD and descriptor in self.ways:
            self.writes.append(self.ways[descriptor])
        super().write_at(descriptor, data, offset)

    def sync(self, descriptor):
        way = self.ways.get(descriptor)
        self.syncs.append(way)
        if way in self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().sync(descriptor)


@pytest.fixture
def files(tmp_path):
    files = NotingFiles()
    probe = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    os.write(probe, bytes(4096))
    tells = files.is_cached(probe, 0, 4096)
    os.close(probe)
    if not takes_direct(tmp_path) or not tells:
        pytest.skip("this system has no O_DIRECT, or does not say what it has in memory")
    return files


@pytest.fixture
def disk(tmp_path, files):
    with Disk(tmp_path / "tier", "64MiB", ahead=1, files=files) as disk:
        disk._cache.limit_bytes = 20 * RECORD
        yield disk


def store(disk, numbers):
    assert put(disk, numbers, PAYLOAD) == [STORED] * len(numbers)


def load(disk, numbers):
    return get(disk, numbers, PAYLOAD)


def forget(disk):
    """Take the slabs out of the page cache."""
    disk.flush()
    for path in disk.path.glob("slab-*"):
        file = os.open(path, os.O_RDONLY)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def test_a_record_is_read_from_the_page_cache_while_it_is_there_and_past_it_when_not(disk, files):
    store(disk, range(8))
    assert load(disk, range(8)) == [HIT] * 8
    assert files.reads == ["cached"] * 8
    forget(disk)
    files.reads.clear()
    assert load(disk, range(8)) == [HIT] * 8
    assert files.reads == ["direct"] * 8


def test_a_record_of_which_a_page_is_missing_is_read_past_the_page_cache(disk, files):
    store(disk, [0])
    disk.flush()
    (path,) = disk.path.glob("slab-*")
    file = os.open(path, os.O_RDONLY)
    os.posix_fadvise(file, RECORD - 4096, 4096, os.POSIX_FADV_DONTNEED)
    os.close(file)
    assert load(disk, [0]) == [HIT]
    assert files.reads == ["direct"]


def test_no_more_than_the_limit_waits_in_the_page_cache(disk, files):
    store(disk, range(10))
    assert files.writes == ["cached"] * 10
    disk._background.stop()  # nothing is written out from here on
    store(disk, range(100, 110))
    store(disk, range(200, 205))
    assert files.writes == ["cached"] * 20 + ["direct"] * 5
    assert load(disk, [*range(10), *range(100, 110), *range(200, 205)]) == [HIT] * 25
    disk.check()


def test_dirty_pages_are_written_out_from_half_of_the_limit_on(disk, files):
    store(disk, range(10))
    assert disk.settle(10)
    assert not files.syncs
    store(disk, [100])
    assert disk.settle(10)
    assert files.syncs == ["cached"]
    assert disk._cache.waiting(RECORD) == 0


def test_after_a_flush_nothing_waits(disk):
    store(disk, range(5))
    assert disk._cache.waiting(RECORD) == 5 * RECORD
    disk.flush()
    assert disk._cache.waiting(RECORD) == 0


def test_two_that_write_out_at_once_take_what_waited_off_once(disk, files):
    store(disk, range(5))
    slab = disk._records.slabs[RECORD]
    real = files.sync

    def sync(descriptor):
        files.sync = real
        slab.write_out()  # as the background thread does while `flush` is at it
        real(descriptor)

    files.sync = sync
    disk.flush()
    assert disk._cache.waiting(RECORD) == 0


def test_a_record_written_during_a_write_out_stays_dirty(disk, files):
    store(disk, range(5))
    slab = disk._records.slabs[RECORD]
    real = files.write_at

    def write_at(*args):
        files.write_at = real
        slab.write_out()
        real(*args)

    files.write_at = write_at
    store(disk, [5])
    assert disk._cache.waiting(RECORD) == RECORD


def test_a_failed_write_out_is_raised_by_the_next_flush_alone(disk, files):
    files.failing = ("cached", "direct")
    store(disk, range(12))
    assert disk.settle(10)
    assert disk._cache.waiting(RECORD) == 0
    with pytest.raises(TierError, match="cannot be synced"):
        disk.flush()


def test_places_given_to_other_records_are_never_read_as_they_were(tmp_path, files):
    with Disk(tmp_path / "tier", 8 * RECORD, ahead=1, files=files) as disk:
        for turn in range(12):
            # In turn by the page cache and past it, over what the other way has just written.
            disk._cache.limit_bytes = (turn % 3) * 4 * RECORD
            numbers = range(10 * turn, 10 * turn + 6)
            store(disk, numbers)
            assert load(disk, numbers) == [HIT] * 6
        disk.check()
    assert {"cached", "direct"} <= set(files.writes)


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_flipped_bit_is_found_in_the_page_cache_and_behind_it(disk, files, is_cached):
    store(disk, range(4))
    (path,) = disk.path.glob("slab-*")
    place = disk._records.find([names_of([2])[0]])[0].place
    with path.open("r+b", buffering=0) as file:
        file.seek(place * RECORD + 70_000)
        byte = file.read(1)[0]
        file.seek(place * RECORD + 70_000)
        file.write(bytes([byte ^ 16]))
    if not is_cached:
        forget(disk)
    assert load(disk, range(4)) == [HIT, HIT, CORRUPT, HIT]
    assert set(files.reads) == {"cached" if is_cached else "direct"}


def test_a_tier_that_is_to_go_past_the_page_cache_does_so(tmp_path, files):
    with Disk(tmp_path / "tier", "64MiB", ahead=1, direct=True, files=files) as disk:
        store(disk, range(4))
        assert load(disk, range(4)) == [HIT] * 4
        assert {*files.reads, *files.writes, *files.ways.values()} == {"direct"}


def test_records_are_read_past_a_page_cache_that_the_system_does_not_report(
    disk, files, monkeypatch
):
    monkeypatch.setattr(disk_files, "_call_system", lambda *_: -1)
    store(disk, range(4))
    assert load(disk, range(4)) == [HIT] * 4
    assert files.reads == ["direct"] * 4


def test_direct_reads_are_off_where_they_see_stale_bytes(tmp_path, monkeypatch):
    assert takes_direct(tmp_path)
    real = os.preadv

    def stale(descriptor, buffers, offset):
        count = real(descriptor, buffers, offset)
        buffers[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", stale)
    assert not takes_direct(tmp_path)


def test_records_of_all_sizes_share_one_limit():
    cache = PageCache(1000)
    assert cache.takes(100, 6)
    assert cache.takes(200, 2)
    assert not cache.takes(100, 1)
    assert cache.is_behind
    cache.wrote(100, 6)
    cache.wrote_out(100, cache.written(100))
    assert (cache.waiting(100), cache.waiting(200)) == (0, 400)
    assert not cache.is_behind
    assert cache.takes(300, 2)

"""A disk that is full, fails or is slow, and what is kept then."""

import errno
import os
import shutil
import threading

import pytest
from disk_help import FaultyFiles, filled, get, put

from quire.errors import TierBusy
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, names_of, record_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.disk.files import DiskFiles
from quire.tiers.format import HEADER_BYTES

HIT, ABSENT, CORRUPT, ERROR = Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT, Outcome.ERROR
STORED, PRESENT, FULL, TIMEOUT = Outcome.STORED, Outcome.PRESENT, Outcome.FULL, Outcome.TIMEOUT


@pytest.mark.parametrize("prefix", ["slab", "index"])
@pytest.mark.parametrize(
    ("error", "outcome"), [(errno.ENOSPC, FULL), (errno.EDQUOT, FULL), (errno.EIO, ERROR)]
)
def test_a_full_or_failing_disk_is_an_outcome_and_no_record_is_found_by_halves(
    disk, files, prefix, error, outcome
):
    put(disk, range(5))
    files.prefix, files.error = prefix, error
    assert set(put(disk, range(10, 13))) == {outcome}
    assert get(disk, range(10, 13)) == [ABSENT] * 3
    assert get(disk, range(5)) == [HIT] * 5
    assert disk._records.slabs[1216].index.num_reserved == 0
    disk.check()
    files.error = None
    assert put(disk, range(10, 13)) == [STORED] * 3
    assert get(disk, range(10, 13)) == [HIT] * 3


def test_records_are_evicted_when_the_disk_is_full_below_its_capacity(tmp_path):
    files = FaultyFiles()
    with Disk(tmp_path, "64MiB", ahead=1, files=files) as disk:
        disk.put([name_of(0)], [record_of(name_of(0), 500_000)], 10)
        disk.put([name_of(1)], [record_of(name_of(1), 1_000_000)], 10)
        files.full = True
        keys = names_of(range(10, 20))
        assert disk.put(keys, records_of(keys, 1_000_000), 10) == [STORED] * 4 + [FULL] * 6
        assert disk.contains(names_of(range(2))) == [True, False]
        other = names_of([30])
        assert disk.put(other, records_of(other, 3_000_000), 10) == [FULL], "no slab of its size"
        assert disk.stats().num_records >= 1, "and not everything goes for nothing"
        disk.check()


def test_records_are_forgotten_though_the_index_cannot_be_written(disk, files, tmp_path):
    put(disk, range(5))
    files.prefix, files.error = "index", errno.ENOSPC
    disk.delete(names_of(range(2)))
    assert get(disk, range(5)) == [ABSENT] * 2 + [HIT] * 3


def test_entries_whose_writing_failed_in_part_name_nothing_and_are_written_over(tmp_path):
    class Torn(FaultyFiles):
        def write_at(self, descriptor, data, offset):
            if self.error and self.names[descriptor].startswith("index"):
                super(FaultyFiles, self).write_at(descriptor, data[:30], offset)
            super().write_at(descriptor, data, offset)

    files = Torn()
    files.prefix = "index"
    disk = Disk(tmp_path, "1MiB", ahead=1, files=files)
    put(disk, range(3))
    for start, error in ((10, errno.ENOSPC), (20, errno.EIO)):
        files.error = error
        assert STORED not in put(disk, range(start, start + 3))
        files.error = None
        assert put(disk, range(start, start + 3)) == [STORED] * 3
    files.error = errno.EIO  # closing writes nothing that helps
    disk.close()
    with Disk(tmp_path, "1MiB") as disk:
        disk.check()
        assert get(disk, [*range(3), *range(10, 13), *range(20, 23)]) == [HIT] * 9


def test_uses_that_cannot_be_written_down_cost_no_record_and_are_tried_again_rarely(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("quire.tiers.disk.tier._USES_KEPT", 100)

    class Counting(FaultyFiles):
        num_failed = 0

        def fail(self, descriptor):
            try:
                super().fail(descriptor)
            except OSError:
                self.num_failed += 1
                raise

    files = Counting()
    with Disk(tmp_path, "1MiB", ahead=1, files=files) as disk:
        put(disk, range(5))
        files.prefix, files.error = "index", errno.ENOSPC
        for _ in range(100):
            disk.touch(names_of(range(4, -1, -1)))
            disk.delete(names_of([100]))
            disk.settle(10)
        assert 1 <= files.num_failed <= 6, "not again with every call"
        shutil.copytree(tmp_path, tmp_path.with_name("left"))
        files.error = None
    for path, newest in ((tmp_path, 4), (tmp_path.with_name("left"), 0)):
        with Disk(path, "1MiB") as disk:
            assert {entry.key: entry.age for entry in disk.scan()}[name_of(newest)] == 0
            assert get(disk, range(5)) == [HIT] * 5
            assert disk.stats().num_records == 5


def test_a_read_that_fails_costs_its_own_record_only(disk, files):
    put(disk, range(3))
    good, place = files.read_at, disk._records.find([name_of(1)])[0].place

    def fails_there(descriptor, buffer, offset):
        if offset == place * len(buffer):
            raise OSError(errno.EIO, "Input/output error")
        return good(descriptor, buffer, offset)

    files.read_at = fails_there
    assert get(disk, range(3)) == [HIT, ERROR, HIT]
    files.read_at = good
    assert get(disk, range(3)) == [HIT] * 3


@pytest.mark.parametrize("direct", [None, False])
def test_neighbours_are_read_by_one_call_and_one_that_stops_early_is_made_good(tmp_path, direct):
    class StopsEarly(DiskFiles):
        runs, share = [], 1

        def read_run(self, descriptor, buffers, offset):
            self.runs.append(len(buffers))
            return super().read_run(descriptor, buffers[: len(buffers) // self.share], offset)

    files = StopsEarly()
    with Disk(tmp_path, "16MiB", direct=direct, files=files) as disk:
        assert put(disk, range(8), 30_000) == [STORED] * 8
        for files.share in (1, 2):
            assert get(disk, range(8), 30_000) == [HIT] * 8
            assert (
                get(disk, [*range(4), 9, *range(4, 8)], 30_000) == [HIT] * 4 + [ABSENT] + [HIT] * 4
            )
            assert get(disk, [3, 3, 0, 1], 30_000) == [HIT] * 4
        assert files.runs == [8, 8, 2] * 2


def test_a_place_with_an_earlier_writing_of_its_key_is_a_miss(disk, tmp_path):
    put(disk, [1])
    with (tmp_path / "slab-1216.quire").open("r+b") as file:
        file.write(record_of(name_of(1), generation=5))
    assert get(disk, [1]) == [CORRUPT]
    assert get(disk, [1]) == [ABSENT]


def test_a_call_ends_when_its_time_is_over_and_says_what_it_did(tmp_path):
    now = [0.0]

    class Slow(DiskFiles):
        def write_at(self, descriptor, data, offset):
            now[0] += len(data) >= 1 << 20
            super().write_at(descriptor, data, offset)

        def read_at(self, descriptor, buffer, offset):
            now[0] += 1.0
            return super().read_at(descriptor, buffer, offset)

    with Disk(tmp_path, "16MiB", ahead=1, files=Slow(), clock=lambda: now[0]) as disk:
        keys = names_of(range(6))
        records = records_of(keys, 1 << 20)  # each is a run of its own
        disk._crew.each = lambda count, work, _: [work(number) for number in range(count)]
        outcomes = disk.put(keys, records, timeout_s=3.5)
        assert outcomes == [STORED] * 4 + [TIMEOUT] * 2
        assert (
            disk.get(keys, buffers_like(records), 1.5) == [HIT] * 2 + [TIMEOUT] * 2 + [ABSENT] * 2
        )


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize(("error", "outcome"), [(errno.ENOSPC, FULL), (errno.EIO, ERROR)])
def test_a_failed_write_keeps_the_records_before_it_and_none_behind_it(
    tmp_path, direct, error, outcome
):
    class FailsAt(FaultyFiles):
        at = None

        def write_at(self, descriptor, data, offset):
            if (
                self.at is not None
                and len(data) > 100_000
                and name_of(self.at) in bytes(data[:HEADER_BYTES])
            ):
                raise OSError(error, os.strerror(error))
            super().write_at(descriptor, data, offset)

    keys = names_of(range(12))
    records = records_of(keys, 200_000)
    files = FailsAt()
    with Disk(tmp_path, "16MiB", direct=direct, files=files) as disk:
        for at in (0, 5, 11):
            files.at = at
            assert disk.put(keys, records, 60) == [STORED] * at + [outcome] * (12 - at)
            assert disk.contains(keys) == [True] * at + [False] * (12 - at)
            buffers = buffers_like(records)
            assert disk.get(keys, buffers, 60) == [HIT] * at + [ABSENT] * (12 - at)
            assert buffers[:at] == records[:at]
            disk.check()
            assert disk._records.slabs[len(records[0])].index.num_reserved == 0
            disk.delete(keys)


def test_records_left_unwritten_by_a_failed_run_of_writes_are_not_found(tmp_path):
    keys = names_of(range(6))
    files = FaultyFiles()
    with Disk(tmp_path, "16MiB", files=files) as disk:
        disk._crew.each = lambda count, work, _: [work(at) for at in reversed(range(count))]
        good, calls = files.write_at, []

        def fails_first(descriptor, data, offset):
            calls.append(len(data))
            if calls.count(len(data)) == 1 and len(data) > 100_000:
                raise OSError(errno.EIO, "Input/output error")
            good(descriptor, data, offset)

        files.write_at = fails_first
        assert disk.put(keys, records_of(keys, 1 << 20), 60) == [ERROR] * 6
        assert disk.contains(keys) == [False] * 6


def test_a_call_of_many_large_records_is_found_in_groups_and_in_order(tmp_path):
    keys = names_of(range(48))
    records = records_of(keys, 1 << 20)
    with Disk(tmp_path, "24MiB") as disk:
        outcomes = disk.put(keys, records, 60)
        stored = outcomes.count(STORED)
        assert stored >= 20
        assert outcomes == [STORED] * stored + [FULL] * (48 - stored)
        buffers = buffers_like(records)
        assert disk.get(keys, buffers, 60) == [HIT] * stored + [ABSENT] * (48 - stored)
        assert buffers[:stored] == records[:stored]


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize("most", [None, 100_000, 1])
def test_neighbouring_places_are_written_by_one_call_and_to_the_end(
    tmp_path, monkeypatch, direct, most
):
    calls, pwritev = [], os.pwritev

    def some(descriptor, parts, offset):
        calls.append(len(parts))
        if most is None:
            return pwritev(descriptor, parts, offset)
        head = memoryview(parts[0])[: most if most == 1 else most // 4096 * 4096]
        return 0 if most == 1 else pwritev(descriptor, [head], offset)

    monkeypatch.setattr(os, "pwritev", some)
    keys = names_of(range(12))
    records = records_of(keys, 200_000)
    with Disk(tmp_path, "16MiB", direct=direct) as disk:
        assert disk.put(keys, records, 60) == [STORED] * 12
        assert sum(calls) == 12
        assert len(calls) <= 3
        buffers = buffers_like(records)
        assert disk.get(keys, buffers, 60) == [HIT] * 12
        assert buffers == records


def test_a_call_that_hangs_while_the_tier_is_closed_keeps_its_files(tmp_path, monkeypatch):
    """A file that is opened meanwhile must not get their numbers, nor another process the directory."""
    monkeypatch.setattr("quire.tiers.disk.tier._CLOSE_S", 0.05)
    files, found = FaultyFiles(), []
    disk = filled(tmp_path / "tier", files=files)
    files.go_on.clear()
    reader = threading.Thread(target=lambda: found.extend(get(disk, [7])), name="reader")
    reader.start()
    assert files.reading.wait(10)
    disk.close()
    with pytest.raises(TierBusy):
        Disk(tmp_path / "tier", "1MiB")
    files.go_on.set()
    reader.join()
    assert found == [Outcome.HIT]

"""A disk that is full, fails, is slow, or is used by many at once; and what makes room when."""

import errno
import os
import shutil
import threading

import pytest

from quire.tiers.base import Outcome
from quire.tiers.disk import Disk
from quire.tiers.disk_files import DiskFiles
from quire.tiers.format import new_buffer, record_bytes
from quire.tiers.samples import buffers_like, name_of, names_of, record_of, records_of

HIT, ABSENT, CORRUPT, ERROR = Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT, Outcome.ERROR
STORED, PRESENT, FULL, TIMEOUT = Outcome.STORED, Outcome.PRESENT, Outcome.FULL, Outcome.TIMEOUT


class FaultyFiles(DiskFiles):
    """Fails writes to files whose name begins so, with an error number; None: works."""

    def __init__(self):
        self.prefix = "slab"
        self.error = None
        self.full = False
        self.names = {}
        self.reading = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def open(self, path, flags):
        descriptor = super().open(path, flags)
        self.names[descriptor] = path.name
        return descriptor

    def fail(self, descriptor):
        if self.error is not None and self.names[descriptor].startswith(self.prefix):
            raise OSError(self.error, os.strerror(self.error))

    def write_at(self, descriptor, data, offset):
        self.fail(descriptor)
        super().write_at(descriptor, data, offset)

    def allocate(self, descriptor, offset, num_bytes):
        self.fail(descriptor)
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super().allocate(descriptor, offset, num_bytes)

    def read_at(self, descriptor, buffer, offset):
        if threading.current_thread().name == "reader":
            self.reading.set()
            self.go_on.wait(10)
        return super().read_at(descriptor, buffer, offset)


@pytest.fixture
def files():
    return FaultyFiles()


@pytest.fixture
def disk(tmp_path, files):
    with Disk(tmp_path, 1152 * 100, ahead=1, files=files) as disk:
        yield disk
        disk.check()


def put(disk, numbers, **options):
    keys = names_of(numbers)
    return disk.put(keys, records_of(keys), 10, **options)


def get(disk, numbers):
    keys = names_of(numbers)
    buffers = buffers_like(records_of(keys))
    outcomes = disk.get(keys, buffers, 10)
    for key, outcome, buffer in zip(keys, outcomes, buffers, strict=True):
        assert outcome is not HIT or buffer == record_of(key)
    return outcomes


@pytest.mark.parametrize("prefix", ["slab", "log"])
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
    assert disk._records.slabs[1152].index.num_reserved == 0
    disk.check()
    files.error = None
    assert put(disk, range(10, 13)) == [STORED] * 3
    assert get(disk, range(10, 13)) == [HIT] * 3


def test_where_the_disk_is_full_below_the_capacity_records_make_room(tmp_path):
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


def test_records_are_forgotten_though_the_log_cannot_be_written(disk, files, tmp_path):
    put(disk, range(5))
    files.prefix, files.error = "log", errno.ENOSPC
    disk.delete(names_of(range(2)))
    assert get(disk, range(5)) == [ABSENT] * 2 + [HIT] * 3
    assert disk._records.failed_appends == 1


def test_a_log_goes_on_behind_a_write_that_failed_in_part(tmp_path):
    class Torn(FaultyFiles):
        def write_at(self, descriptor, data, offset):
            if self.error and self.names[descriptor].startswith("log"):
                super(FaultyFiles, self).write_at(descriptor, data[:30], offset)
            super().write_at(descriptor, data, offset)

        def truncate(self, descriptor, num_bytes):
            if self.error == errno.EIO:
                raise OSError(errno.EIO, "not even that")
            super().truncate(descriptor, num_bytes)

    files = Torn()
    files.prefix = "log"
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
        assert get(disk, [*range(3), *range(10, 13), *range(20, 23)]) == [HIT] * 9


def test_a_read_that_fails_costs_its_own_record_only(disk, files):
    put(disk, range(3))
    good = files.read_at
    count = iter(range(3))

    def fails_once(*args):
        if next(count) == 1:
            raise OSError(errno.EIO, "Input/output error")
        return good(*args)

    files.read_at = fails_once
    assert get(disk, range(3)) == [HIT, ERROR, HIT]
    files.read_at = good
    assert get(disk, range(3)) == [HIT] * 3


def test_five_of_a_hundred_records_go_at_once_the_oldest_first(disk):
    gone = []
    disk.evicting = lambda keys, _: gone.append(keys)
    put(disk, range(100))
    put(disk, [200])
    assert gone == [names_of(range(99, 94, -1))]
    assert len(put(disk, range(201, 205))) == 4
    assert len(gone) == 1


def test_a_slot_is_not_given_away_while_it_is_read(disk, files):
    put(disk, range(100))
    files.go_on.clear()
    found = []
    reader = threading.Thread(target=lambda: found.extend(get(disk, [7])), name="reader")
    files.reading.clear()
    reader.start()
    assert files.reading.wait(10)
    disk.delete(names_of(range(100)))
    assert put(disk, range(200, 300)) == [STORED] * 99 + [FULL]
    files.go_on.set()
    reader.join()
    assert found == [HIT]
    assert put(disk, [300]) == [STORED]
    disk.check()


def test_a_slot_with_an_earlier_writing_of_its_key_is_a_miss(disk, tmp_path):
    put(disk, [1])
    with (tmp_path / "slab-1152.quire").open("r+b") as file:
        file.write(record_of(name_of(1), generation=5))
    assert get(disk, [1]) == [CORRUPT]
    assert get(disk, [1]) == [ABSENT]


def test_a_call_ends_when_its_time_is_over_and_says_what_it_did(tmp_path):
    now = [0.0]

    class Slow(DiskFiles):
        def write_at(self, descriptor, data, offset):
            now[0] += 1.0
            super().write_at(descriptor, data, offset)

        def read_at(self, descriptor, buffer, offset):
            now[0] += 1.0
            return super().read_at(descriptor, buffer, offset)

    with Disk(tmp_path, "1MiB", ahead=1, files=Slow(), clock=lambda: now[0]) as disk:
        keys = names_of(range(6))
        outcomes = disk.put(keys, records_of(keys), timeout_s=3.5)
        assert outcomes == [STORED] * 4 + [TIMEOUT] * 2
        assert disk.get(keys, buffers_like(records_of(keys)), 1.5) == [HIT] * 2 + [TIMEOUT] * 4


def test_nobody_waits_longer_than_asked_for_room_that_another_makes(disk):
    put(disk, range(100))
    with disk._room.lock:
        assert disk.put([name_of(200)], [record_of(name_of(200))], 0.05) == [TIMEOUT]


def test_slots_are_written_ahead_in_the_background_up_to_a_bound(tmp_path):
    with Disk(tmp_path, "64MiB", ahead="2MiB") as disk:
        key = name_of(1)
        disk.put([key], [record_of(key, 100_000)], 10)
        assert disk.settle(10)
        slab = disk._records.slabs[record_bytes(100_000)]
        assert 2 << 20 <= slab.free_bytes <= 8 << 20
        assert (tmp_path / slab.path.name).stat().st_size == slab.num_bytes
        assert disk.get([key], [new_buffer(record_bytes(100_000))]) == [HIT]


def test_room_moves_between_sizes_and_records_move_with_it(tmp_path):
    with Disk(tmp_path, 1 << 20, ahead=1) as disk:
        small = names_of(range(800))
        disk.put(small, records_of(small), 10)
        disk.delete(small[:400:2])
        disk.touch(small)
        kept = small[1:400:2]
        large = names_of(range(1000, 1003))
        assert disk.put(large, records_of(large, 70_000), 10) == [STORED] * 3
        disk.check()
        assert disk.get(kept, buffers_like(records_of(kept)), 10) == [HIT] * 200
    with Disk(tmp_path, 1 << 20) as disk:
        assert disk.get(kept, buffers_like(records_of(kept)), 10) == [HIT] * 200
        assert disk.get(large, buffers_like(records_of(large, 70_000)), 10) == [HIT] * 3


def moved(path):
    """Return a disk where the last records have just moved to make room for a larger one."""
    disk = Disk(path, 1 << 20, ahead=1)
    put(disk, range(800))
    disk.delete(names_of(range(400)))
    large = name_of(1000)
    assert disk.put([large], [record_of(large, 200_000)], 10) == [STORED]
    assert disk._records.slabs[1152].index.num_slots < 800
    return disk


def test_a_record_that_moved_and_was_deleted_does_not_come_back(tmp_path):
    with moved(tmp_path / "open") as disk:
        disk.delete(names_of(range(400, 800)))
        shutil.copytree(tmp_path / "open", tmp_path / "left")
    with Disk(tmp_path / "left", 1 << 20) as disk:
        assert [entry.key for entry in disk.scan()] == [name_of(1000)]
        assert disk.recovered.is_clean


def test_a_record_may_move_while_it_is_read(tmp_path, files):
    found = []
    disk = Disk(tmp_path, 1 << 20, ahead=1, files=files)
    put(disk, range(800))
    files.go_on.clear()
    reader = threading.Thread(target=lambda: found.extend(get(disk, [799])), name="reader")
    reader.start()
    assert files.reading.wait(10)
    disk.delete(names_of(range(600)))
    slab = disk._records.slabs[1152]
    before = disk._records.find(name_of(799)).slot
    assert disk._room._shrinks(slab, 300)
    assert slab.index.num_slots == 800, "the last of them is being read"
    assert disk._records.find(name_of(799)).slot < before
    disk.check()
    assert before not in slab.index.reserve_within(0, 2000, 2000).tolist()
    files.go_on.set()
    reader.join()
    assert found == [HIT]
    disk.close()


def test_two_threads_that_put_one_key_keep_one_record(disk, files):
    barrier = threading.Barrier(4)
    outcomes = []

    def work():
        barrier.wait()
        outcomes.extend(put(disk, range(40)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count(STORED) == 40
    assert outcomes.count(PRESENT) == 120
    assert disk.stats().num_records == 40


def test_threads_that_put_get_and_delete_while_room_is_made_never_get_wrong_bytes(tmp_path):
    errors = []
    with Disk(tmp_path, 400_000, ahead=20_000, compact_lines=30) as disk:

        def work(seed):
            try:
                for step in range(30):
                    numbers = [(seed * 7 + step * 3 + i) % 60 for i in range(4)]
                    keys = names_of(numbers)
                    payloads = [(1000, 5000, 70_000)[number % 3] for number in numbers]
                    records = [
                        record_of(key, size) for key, size in zip(keys, payloads, strict=True)
                    ]
                    disk.put(keys, records, 10)
                    buffers = buffers_like(records)
                    for outcome, buffer, record in zip(
                        disk.get(keys, buffers, 10), buffers, records, strict=True
                    ):
                        if outcome not in (HIT, ABSENT) or (outcome is HIT and buffer != record):
                            errors.append((outcome, seed, step))
                    disk.delete(keys[:1])
            except Exception as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        disk.check()
        disk.settle(10)
        held = {entry.key: entry.num_bytes for entry in disk.scan()}
    with Disk(tmp_path, 400_000) as disk:
        assert {entry.key: entry.num_bytes for entry in disk.scan()} == held


@pytest.mark.parametrize("direct", [None, False])
@pytest.mark.parametrize(("error", "outcome"), [(errno.ENOSPC, FULL), (errno.EIO, ERROR)])
def test_of_a_call_all_before_the_first_failed_write_is_kept_and_nothing_after(
    tmp_path, direct, error, outcome
):
    class FailsAt(FaultyFiles):
        at = None

        def write_at(self, descriptor, data, offset):
            if (
                self.at is not None
                and len(data) > 100_000
                and name_of(self.at) in bytes(data[:128])
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


def test_what_others_left_unwritten_when_one_write_failed_is_not_found(tmp_path):
    class LastFirst:
        def help_with(self, count, work):
            for number in reversed(range(count)):
                work(number)

        def close(self):
            pass

    keys = names_of(range(6))
    files = FaultyFiles()
    with Disk(tmp_path, "16MiB", files=files) as disk:
        disk._each = lambda size, count, work: LastFirst().help_with(count, work)
        good, calls = files.write_at, []

        def fails_first(descriptor, data, offset):
            calls.append(len(data))
            if calls.count(len(data)) == 1 and len(data) > 100_000:
                raise OSError(errno.EIO, "Input/output error")
            good(descriptor, data, offset)

        files.write_at = fails_first
        assert disk.put(keys, records_of(keys, 200_000), 60) == [ERROR] * 6
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

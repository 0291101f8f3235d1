"""Eviction in a disk tier, room that moves between sizes, and threads that share the tier."""

import errno
import shutil
import threading

import pytest
from disk_help import get, put

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, names_of, record_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.disk.files import DiskFiles
from quire.tiers.format import new_buffer, record_bytes

HIT, ABSENT, CORRUPT, ERROR = Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT, Outcome.ERROR
STORED, PRESENT, FULL, TIMEOUT = Outcome.STORED, Outcome.PRESENT, Outcome.FULL, Outcome.TIMEOUT


def test_five_of_a_hundred_records_go_at_once_the_oldest_first(disk):
    gone = []
    disk.evicting = lambda keys, _: gone.append(keys)
    put(disk, range(100))
    put(disk, [200])
    assert gone == [names_of(range(99, 94, -1))]
    assert len(put(disk, range(201, 205))) == 4
    assert len(gone) == 1


def test_a_victim_that_no_listener_wants_is_not_read(disk, files):
    told = []
    disk.evicting = lambda keys, _: told.extend(keys)
    disk.evicting_of = lambda keys: [index for index, key in enumerate(keys) if key == name_of(97)]
    put(disk, range(100))
    files.num_reads = 0
    put(disk, [200])
    assert told == [name_of(97)]
    assert files.num_reads == 1


def test_a_place_is_not_given_away_while_it_is_read(disk, files):
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


def test_a_put_waits_for_anothers_eviction_no_longer_than_its_timeout(disk):
    put(disk, range(100))
    found = []

    def store():
        found.extend(disk.put([name_of(200)], [record_of(name_of(200))], 0.05))

    def make_room():
        other = threading.Thread(target=store)
        other.start()
        other.join()

    disk._room.lock.run(make_room)
    assert found == [TIMEOUT]


def test_places_are_written_ahead_in_the_background_up_to_a_bound(tmp_path):
    with Disk(tmp_path, "64MiB", ahead="2MiB") as disk:
        key = name_of(1)
        disk.put([key], [record_of(key, 100_000)], 10)
        assert disk.settle(10)
        slab = disk._records.slabs[record_bytes(100_000)]
        assert 2 << 20 <= slab.free_bytes <= 8 << 20
        assert (tmp_path / slab.path.name).stat().st_size == slab.num_bytes
        assert disk.get([key], [new_buffer(record_bytes(100_000))]) == [HIT]


def test_a_slab_is_written_ahead_again_when_half_is_used(tmp_path):
    with Disk(tmp_path, "64MiB", ahead="8MiB") as disk:
        disk.put([name_of(0)], [record_of(name_of(0), 1_000_000)], 10)
        assert disk.settle(10)
        slab = disk._records.slabs[record_bytes(1_000_000)]
        num_places, free = slab.index.num_places, slab.index.num_free
        grown = []
        for number in range(1, free + 1):
            disk.put([name_of(number)], [record_of(name_of(number), 1_000_000)], 10)
            assert disk.settle(10)
            grown.append(slab.index.num_places > num_places)
        first = grown.index(True)
        assert 2 <= first < free - 1
        assert (
            2 * (free - first) * slab.record_bytes
            >= 8 << 20
            > 2 * (free - first - 1) * slab.record_bytes
        )


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
    assert disk._records.slabs[1216].index.num_places < 800
    return disk


def test_a_record_that_moved_and_was_deleted_does_not_come_back(tmp_path):
    with moved(tmp_path / "open") as disk:
        disk.delete(names_of(range(400, 800)))
        shutil.copytree(tmp_path / "open", tmp_path / "left")
    with Disk(tmp_path / "left", 1 << 20) as disk:
        assert [entry.key for entry in disk.scan()] == [name_of(1000)]
        assert disk.recovered.is_clean


@pytest.mark.cases(1)
@pytest.mark.parametrize("change", ["deleted", "replaced"])
def test_a_record_that_is_being_moved_can_be(tmp_path, change):
    """A lookup of a moving record waits for the move, and must not drop the place that the record left."""

    class Files(DiskFiles):
        at_sync = None

        def sync(self, descriptor):
            super().sync(descriptor)
            if self.at_sync and is_moving():
                self.at_sync()

    def is_moving():
        return disk._records._changes.locked()

    def change_it():
        files.at_sync = None
        changing.start()
        changing.join(0.1)  # it looks for the records, and waits

    files = Files()
    moving = names_of(range(700, 800))
    others = records_of(moving, 500)
    with Disk(tmp_path, 1 << 20, ahead=1, files=files) as disk:
        put(disk, range(800))
        disk.delete(names_of(range(400)))
        changes = {
            "deleted": lambda: disk.delete(moving),
            "replaced": lambda: disk.put(moving, others, 10),
        }
        changing = threading.Thread(target=changes[change])
        files.at_sync = change_it
        assert disk._room._shrinks(disk._records.slabs[1216], 300)
        changing.join()
        disk.check()
        expected = [ABSENT] if change == "deleted" else [HIT]
        assert disk.get(moving, buffers_like(others), 10) == expected * 100
        assert get(disk, range(400, 700)) == [HIT] * 300


def test_a_record_may_move_while_it_is_read(tmp_path, files):
    found = []
    disk = Disk(tmp_path, 1 << 20, ahead=1, files=files)
    put(disk, range(800))
    files.go_on.clear()
    reader = threading.Thread(target=lambda: found.extend(get(disk, [799])), name="reader")
    reader.start()
    assert files.reading.wait(10)
    disk.delete(names_of(range(600)))
    slab = disk._records.slabs[1216]
    before = disk._records.find([name_of(799)])[0].place
    assert disk._room._shrinks(slab, 300)
    assert slab.index.num_places == 800, "the last of them is being read"
    assert disk._records.find([name_of(799)])[0].place < before
    disk.check()
    assert before not in slab.index.reserve_within(0, 2000, 2000).tolist()
    files.go_on.set()
    reader.join()
    assert found == [HIT]
    disk.close()


def test_a_damaged_record_that_moves_while_it_is_read_is_dropped_where_it_is_then(tmp_path, files):
    found = []
    with Disk(tmp_path, 1 << 20, ahead=1, files=files) as disk:
        put(disk, range(800))
        slab, place = disk._records.slabs[1216], disk._records.find([name_of(799)])[0].place
        slab.write(place, memoryview(bytes(1216)))
        files.go_on.clear()
        reader = threading.Thread(target=lambda: found.extend(get(disk, [799])), name="reader")
        reader.start()
        assert files.reading.wait(10)
        disk.delete(names_of(range(600)))
        assert disk._room._shrinks(slab, 300)
        disk.check()
        files.go_on.set()
        reader.join()
        assert found == [CORRUPT]
        assert get(disk, range(600, 800)) == [HIT] * 199 + [ABSENT]
        assert not slab.moved


def test_a_slab_that_is_wanted_again_while_it_is_looked_at_is_looked_at_again(tmp_path):
    with Disk(tmp_path, 1 << 20) as disk:
        put(disk, range(10))
        assert disk.settle(10)
        room = disk._room
        room.wanted.add(1216)
        room._ahead = 1 << 20
        # A put on another thread wants it meanwhile.
        room._adds = lambda slab, _prepare: bool(room.wanted.add(slab.record_bytes))
        assert not room.prewrite()
        assert room.wanted == {1216}


def test_two_threads_that_put_one_key_keep_one_record(tmp_path):
    disk = Disk(tmp_path, "1MiB")
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
    disk.close()


def test_threads_that_put_get_and_delete_while_room_is_made_never_get_wrong_bytes(tmp_path):
    errors = []
    with Disk(tmp_path, 400_000, ahead=20_000) as disk:

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


def test_a_move_that_cannot_be_written_down_leaves_every_record_where_it_is(tmp_path, files):
    disk = Disk(tmp_path, 1 << 20, ahead=1, files=files)
    put(disk, range(800))
    disk.delete(names_of(range(400)))
    slab = disk._records.slabs[1216]
    files.prefix, files.error = "index", errno.EIO
    disk._room._shrinks(slab, 300)
    before = slab.index.num_places
    assert before >= 800
    files.error = None
    disk.check()
    assert slab.index.num_reserved == 0
    assert get(disk, range(400, 800)) == [HIT] * 400
    assert disk._room._shrinks(slab, 300)
    assert slab.index.num_places < before
    assert get(disk, range(400, 800)) == [HIT] * 400
    disk.close()

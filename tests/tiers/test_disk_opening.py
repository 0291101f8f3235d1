"""Opening a disk tier on a directory that was left, damaged, taken or written by others."""

import errno
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from disk_help import filled, found, get, left

from quire.errors import ConfigError, TierBusy, TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, names_of, record_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.disk.files import DiskFiles
from quire.tiers.disk.index_file import ENTRY, ROW_BYTES, checksums
from quire.tiers.format import new_buffer, record_bytes

HIT, ABSENT, CORRUPT, STORED = Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT, Outcome.STORED


def index_of(path):
    return path / "index-1216.quire"


def test_a_directory_that_another_process_has_open_is_refused_with_its_number(tmp_path):
    code = "import sys, time; from quire.tiers.disk.tier import Disk; d = Disk(sys.argv[1], '1MiB'); print('open', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(TierBusy, match=f"in process {other.pid};"):
            Disk(tmp_path, "1MiB")
        other.kill()
    Disk(tmp_path, "1MiB").close()


def test_a_directory_is_free_again_after_close_and_after_a_failed_opening(tmp_path):
    filled(tmp_path).close()
    later = index_of(tmp_path)
    good = later.read_bytes()
    later.write_bytes(later_version(good))
    for _ in range(2):
        with pytest.raises(TierError, match="version 2 of the index format"):
            Disk(tmp_path, "1MiB")
    later.write_bytes(good)
    assert found(tmp_path) == [HIT] * 20


def later_version(index):
    rows = np.frombuffer(bytearray(index), ENTRY)
    rows.view("<u2")[8] = 2
    rows["checksum"] = checksums(rows)
    return rows.tobytes()


def test_a_later_version_is_refused_and_nothing_of_it_is_changed(tmp_path):
    path = left(tmp_path)
    index_of(path).write_bytes(later_version(index_of(path).read_bytes()))
    before = {each.name: each.read_bytes() for each in path.iterdir() if each.name != "lock"}
    for opens in (lambda: Disk(path, "1MiB"), lambda: Disk(path, read_only=True)):
        with pytest.raises(TierError, match="use another directory"):
            opens()
    assert before == {
        each.name: each.read_bytes() for each in path.iterdir() if each.name != "lock"
    }


def test_a_path_that_is_no_directory_is_an_error_of_the_tier(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(TierError, match="file"):
            Disk(path, "1MiB")
    with pytest.raises(TierError, match="cannot be opened"):
        Disk(tmp_path / "nothing", read_only=True)
    with pytest.raises(ConfigError, match="size"):
        Disk(tmp_path, "plenty")


def test_a_directory_that_cannot_be_written_is_read_and_says_so(tmp_path, caplog):
    class Forbidden(DiskFiles):
        def open(self, path, flags):
            if flags & (os.O_RDWR | os.O_WRONLY):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return super().open(path, flags)

    filled(tmp_path).close()
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    keys, more = names_of(range(20)), names_of(range(50, 52))
    with Disk(tmp_path, "1MiB", files=Forbidden()) as disk:
        assert disk.is_read_only
        assert disk.get(keys, buffers_like(records_of(keys)), 10) == [HIT] * 20
        assert disk.put(more, records_of(more), 10) == [Outcome.SKIPPED] * 2
        disk.touch(keys)
        disk.delete(keys[:3])
        disk.flush()
        disk.check()
        assert disk.contains(keys) == [True] * 20
    assert "opened to read only" in caplog.text
    assert before == {each.name: each.read_bytes() for each in tmp_path.iterdir()}


def test_a_directory_that_cannot_be_read_is_an_error_of_the_tier(tmp_path):
    class Forbidden(DiskFiles):
        def open(self, path, flags):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    filled(tmp_path).close()
    with pytest.raises(TierError, match="Permission denied"):
        Disk(tmp_path, "1MiB", files=Forbidden())
    assert found(tmp_path) == [HIT] * 20


def test_records_of_a_killed_process_are_found(tmp_path):
    assert found(left(tmp_path)) == [HIT] * 20


@pytest.mark.ci
def test_an_index_that_was_cut_anywhere_or_is_gone_is_made_anew_from_the_records(tmp_path):
    path = left(tmp_path)
    data = index_of(path).read_bytes()
    assert len(data) % ROW_BYTES == 0
    for length in (*range(0, ROW_BYTES * 21, 24), None):
        copy = tmp_path / "copy"
        shutil.copytree(path, copy)
        if length is None:
            index_of(copy).unlink()
        else:
            index_of(copy).write_bytes(data[:length])
        whole = max(0, (length or 0) // ROW_BYTES - 1)
        for opens in (lambda: Disk(copy, read_only=True), lambda: Disk(copy, "1MiB", ahead=1)):  # noqa: B023
            with opens() as disk:
                disk.check()
                assert (disk.recovered.num_records, disk.recovered.num_rebuilt) == (20, 20 - whole)
                assert disk.recovered.num_lost == 0
        assert found(copy) == [HIT] * 20
        with Disk(copy, "1MiB") as disk:
            assert disk.recovered.is_clean
        shutil.rmtree(copy)


def test_a_bit_flipped_anywhere_in_an_index_costs_no_record(tmp_path):
    path = left(tmp_path, 4)
    data = index_of(path).read_bytes()
    for offset in range(ROW_BYTES * 6):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << offset % 8
        index_of(path).write_bytes(flipped)
        with Disk(path, read_only=True) as reader:
            keys = names_of(range(4))
            assert reader.get(keys, buffers_like(records_of(keys)), 10) == [HIT] * 4
            is_of_record = ROW_BYTES <= offset < ROW_BYTES * 5
            assert reader.recovered.num_rebuilt == is_of_record
            assert reader.recovered.num_lost == 0


@pytest.mark.ci
def test_a_bit_flipped_anywhere_in_a_slab_costs_its_record_and_is_noticed(tmp_path):
    path = left(tmp_path, 4)
    slab = path / "slab-1216.quire"
    data = slab.read_bytes()
    keys = names_of(range(4))
    for offset in range(0, 4 * 1216, 11):
        flipped = bytearray(data)
        flipped[offset] ^= 1 << offset % 8
        slab.write_bytes(flipped)
        with Disk(path, "1MiB", ahead=1) as disk:
            outcomes = disk.get(keys, buffers_like(records_of(keys)), 10)
            assert outcomes == [CORRUPT if at == offset // 1216 else HIT for at in range(4)]
            disk.put(keys, records_of(keys), 10)


def test_a_damaged_entry_whose_record_is_damaged_too_is_said_to_be_lost(tmp_path, caplog):
    path = left(tmp_path)
    for file, offset in (
        (index_of(path), ROW_BYTES * 5 + 40),
        (path / "slab-1216.quire", 1216 * 4),
    ):
        data = bytearray(file.read_bytes())
        data[offset] ^= 1
        file.write_bytes(data)
    with Disk(path, "1MiB") as disk:
        assert (disk.recovered.num_records, disk.recovered.num_lost) == (19, 1)
        assert not disk.recovered.is_clean
    assert "1 were lost" in caplog.text
    assert found(path) == [HIT] * 4 + [ABSENT] + [HIT] * 15


def test_a_key_in_two_places_counts_where_it_was_used_last(tmp_path, caplog):
    path = left(tmp_path)
    slab = path / "slab-1216.quire"
    data, rows = bytearray(slab.read_bytes()), np.frombuffer(index_of(path).read_bytes(), ENTRY)
    data[1216 * 7 : 1216 * 8] = data[1216 * 3 : 1216 * 4]
    slab.write_bytes(data)
    rows = rows.copy()
    for field in ("key", "tag"):
        rows[8][field] = rows[4][field]
    rows["stamp"][8] = 1000
    rows["checksum"] = checksums(rows)
    index_of(path).write_bytes(rows.tobytes())
    with Disk(path, "1MiB") as disk:
        assert (disk.recovered.num_records, disk.recovered.num_repeated) == (19, 1)
        assert disk._records.find([name_of(3)])[0].place == 7
    assert not caplog.text, "as a move leaves it that was cut short: nothing is damaged"
    with Disk(path, "1MiB") as disk:
        assert disk.recovered.is_clean


def test_a_record_that_had_moved_when_the_power_went_counts_where_it_moved_to(tmp_path):
    filled(tmp_path, 600).close()
    rows = np.frombuffer(bytearray(index_of(tmp_path).read_bytes()), ENTRY)
    taken = rows[1:301].copy()  # places 300 to 599 were given to others, which no entry says yet
    taken["place"] += 300
    rows[301:601] = taken
    rows["checksum"][301:601] = checksums(rows[301:601].copy())
    index_of(tmp_path).write_bytes(rows.tobytes())
    assert found(tmp_path, 600) == [HIT] * 300 + [ABSENT] * 300


def test_a_slab_that_was_cut_loses_the_records_behind_the_cut(tmp_path):
    path = left(tmp_path)
    os.truncate(path / "slab-1216.quire", 1216 * 12 + 100)
    with Disk(path, read_only=True) as reader:
        assert reader.recovered.num_lost == 8
    assert found(path) == [HIT] * 12 + [ABSENT] * 8
    with Disk(path, "1MiB") as disk:
        assert disk.recovered.is_clean, "what was named in vain is forgotten for good"


def test_empty_and_missing_files_are_misses(tmp_path):
    path = left(tmp_path)
    os.truncate(path / "slab-1216.quire", 0)
    assert found(path) == [ABSENT] * 20
    assert found(path) == [ABSENT] * 20
    (tmp_path / "again").mkdir()
    path = left(tmp_path / "again")
    (path / "slab-1216.quire").unlink()
    (path / "slab-nonsense.quire").touch()
    (path / "slab-100.quire").touch()
    assert found(path) == [ABSENT] * 20


def test_recency_outlives_a_restart(tmp_path):
    keys = names_of(range(20))
    filled(tmp_path).close()
    with Disk(tmp_path, "1MiB", ahead=1) as disk:
        disk.touch(keys[15:])
    with Disk(tmp_path, 1216 * 20, ahead=1) as disk:
        assert {entry.key: entry.age for entry in disk.scan()}[keys[15]] == 0
        more = names_of(range(100, 115))
        assert disk.put(more, records_of(more), 10) == [STORED] * 15
        assert disk.contains(keys) == [False] * 15 + [True] * 5


def test_a_smaller_capacity_keeps_the_newest_and_gives_the_rest_back(tmp_path):
    keys = names_of(range(20))
    with filled(tmp_path) as disk:
        disk.touch(keys[::-1])
    with Disk(tmp_path, 1216 * 10, ahead=1) as disk:
        disk.check()
        there = disk.contains(keys)
        assert 8 <= sum(there) <= 10
        assert there == sorted(there)
    assert (tmp_path / "slab-1216.quire").stat().st_size <= 1216 * 10


def test_an_opening_without_changes_leaves_the_directory_as_it_was(tmp_path):
    filled(tmp_path).close()
    before = sorted((path.name, path.stat().st_size) for path in tmp_path.iterdir())
    for _ in range(3):
        Disk(tmp_path, "1MiB", ahead=1).close()
    assert sorted((path.name, path.stat().st_size) for path in tmp_path.iterdir()) == before


def test_a_reader_sees_what_was_there_while_another_process_writes(tmp_path):
    keys = names_of(range(20))
    with filled(tmp_path) as disk, Disk(tmp_path, read_only=True) as reader:
        assert reader.contains(keys) == [True] * 20
        assert reader.get(keys, buffers_like(records_of(keys)), 10) == [HIT] * 20
        assert {entry.key for entry in reader.scan()} == set(keys)
        disk.delete(keys[:10])
        more = names_of(range(100, 105))
        disk.put(more, records_of(more), 10)
        outcomes = reader.get(keys, buffers_like(records_of(keys)), 10)
        assert outcomes.count(ABSENT) == 5, "their places have other records now"
        assert outcomes.count(HIT) == 15
        assert reader.put(keys[:1], records_of(keys[:1])) == [Outcome.SKIPPED]
        reader.delete(keys)
        assert disk.contains(keys[10:]) == [True] * 10
        reader.check()
    assert reader.get(keys[:1], [new_buffer(1216)]) == [Outcome.ERROR]


def test_a_reader_opens_while_entries_are_written(tmp_path):
    with filled(tmp_path) as disk:
        more = names_of(range(50, 60))
        for _ in range(30):
            disk.put(more, records_of(more), 10)
            disk.delete(more)
            with Disk(tmp_path, read_only=True) as reader:
                assert sum(reader.contains(names_of(range(20)))) == 20


def test_small_records_go_through_the_page_cache_and_large_ones_past_it(tmp_path):
    with Disk(tmp_path, "16MiB") as disk:
        for number, payload_bytes in enumerate((1000, 100_000)):
            key = name_of(number)
            assert disk.put([key], [record_of(key, payload_bytes)], 10) == [STORED]
        slabs = disk._records.slabs
        assert not slabs[record_bytes(1000)].is_direct
        assert slabs[record_bytes(100_000)].is_direct == disk.is_direct
    with Disk(tmp_path, "16MiB", direct=False) as disk:
        assert not disk.is_direct
        assert disk.get([key], [new_buffer(record_bytes(100_000))]) == [HIT]


def test_a_slab_that_was_removed_costs_its_records_which_are_counted_once(tmp_path, caplog):
    filled(tmp_path, 20).close()
    next(tmp_path.glob("slab-*")).unlink()
    with Disk(tmp_path, read_only=True) as reader:
        assert reader.recovered.num_lost == 20
    assert set(found(tmp_path)) == {Outcome.ABSENT}
    assert "20 were lost" in caplog.text
    filled(tmp_path, 20).close()
    with Disk(tmp_path, "1MiB") as disk:
        assert disk.recovered.is_clean
        assert len(list(disk.scan())) == 20


@pytest.mark.parametrize("size", [0, 1, 99, 2**32 * 64, 2**62, 2**70])
def test_files_with_names_that_no_slab_has_are_left_alone(tmp_path, size):
    for kind in ("slab", "index"):
        (tmp_path / f"{kind}-{size}.quire").write_bytes(b"mine")
    with Disk(tmp_path, "1MiB") as disk:
        assert not disk.recovered.num_lost
    assert (tmp_path / f"slab-{size}.quire").read_bytes() == b"mine"


def test_a_relative_directory_stays_where_it_was(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name / "kv").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with Disk("kv", "1MiB") as disk:
        monkeypatch.chdir(tmp_path / "there")
        key = name_of(1)
        assert disk.put([key], [record_of(key)]) == [Outcome.STORED]
        disk.flush()
    assert not list((tmp_path / "there" / "kv").iterdir())
    assert list((tmp_path / "here" / "kv").glob("slab-*"))


def test_a_damaged_record_that_is_asked_for_twice_is_damaged_for_both(tmp_path):
    disk = filled(tmp_path, 2)
    slab = next(tmp_path.glob("slab-*"))
    content = bytearray(slab.read_bytes())
    content[600] ^= 1  # in the payload of the first
    slab.write_bytes(content)
    outcomes = get(disk, [0, 0, 1])
    assert outcomes.count(Outcome.HIT) == 1
    assert outcomes.count(Outcome.CORRUPT) == 2
    assert get(disk, [0, 1]) == [Outcome.ABSENT, Outcome.HIT]
    disk.check()
    disk.close()


@pytest.mark.parametrize("what", ["directory", "link", "pipe"])
@pytest.mark.parametrize(
    "opening", [lambda path: Disk(path, "1MiB"), lambda path: Disk(path, read_only=True)]
)
def test_an_obstacle_at_the_place_of_an_index_is_named_and_nothing_is_lost(tmp_path, what, opening):
    path, index = left(tmp_path), index_of(tmp_path / "left")
    moved = index.rename(tmp_path / "moved")
    if what == "directory":
        index.mkdir()
    elif what == "link":
        index.symlink_to(moved)
    else:
        os.mkfifo(index)
    with pytest.raises(
        TierError, match=f"{index} is in the way of a file of the tier: move it elsewhere"
    ):
        opening(path)
    index.rename(tmp_path / "elsewhere")
    assert found(path) == [HIT] * 20

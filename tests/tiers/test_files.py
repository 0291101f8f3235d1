"""Requirements of a directory of files alone: other processes, crashes, disks that say no."""

import itertools
import os
import resource
import signal
import threading
import time
from contextlib import contextmanager
from itertools import takewhile

import numpy as np
import pytest
from processes import SOON_S

from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, names_of, record_of, records_of
from quire.tiers.files import Files, room
from quire.tiers.files import tier as files
from quire.tiers.format import HEADER_BYTES, new_buffer, record_bytes, verify

HIT, STORED, ABSENT = Outcome.HIT, Outcome.STORED, Outcome.ABSENT
NOBODY = 65534


@contextmanager
def without_rights(folder):
    """Deny this process to write a folder, whoever it is."""
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.fixture
def folder(tmp_path):
    """Give a folder that any user can reach."""
    above = takewhile(lambda each: each.name.startswith(("pytest-", "popen-")), tmp_path.parents)
    for parent in (tmp_path, *above):
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(0o755)
    made = tmp_path / "kv"
    made.mkdir()
    return made


def in_a_process(work):
    """Fork; run; leave without cleaning up. Returns the process id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
    finally:
        os._exit(0)


def file_of(tier, key):
    return tier.path / key.hex()[:2] / f"{key.hex()}.quire"


def verified(tier):
    """Read every file of a tier; return how many there are."""
    count = 0
    for entry in tier.scan():
        buffer = new_buffer(entry.num_bytes)
        assert tier.get([entry.key], [buffer]) == [HIT]
        assert verify(buffer).key == entry.key
        count += 1
    return count


def unfinished(tier):
    return sorted((tier.path / "unfinished").iterdir())


def test_a_file_bears_the_name_of_its_key_and_holds_the_record_as_it_is(tmp_path):
    key = name_of(1)
    with Files(tmp_path) as tier:
        tier.put([key], [record_of(key)])
        assert file_of(tier, key).read_bytes() == bytes(record_of(key))
        assert unfinished(tier) == []


def test_two_that_share_a_directory_find_each_others_records(tmp_path):
    keys = names_of(range(4))
    with Files(tmp_path) as one, Files(tmp_path) as other:
        one.put(keys[:2], records_of(keys[:2]))
        assert other.put(keys, records_of(keys)) == [Outcome.PRESENT] * 2 + [STORED] * 2
        assert one.get(keys, buffers_like(records_of(keys))) == [HIT] * 4
        one.delete(keys[:1])
        assert other.contains(keys) == [False, True, True, True]


def test_a_place_that_is_no_directory_is_refused_with_its_reason(tmp_path):
    (tmp_path / "file").write_text("here first")
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/quire-kv"):
        with pytest.raises(TierError, match=f"cannot keep files in {path}: "):
            Files(path)


def test_a_directory_without_rights_is_refused_when_it_is_opened(folder):
    with without_rights(folder), pytest.raises(TierError, match="Permission denied"):
        Files(folder)


@contextmanager
def as_nobody(folder):
    """Be a user whom modes bind, and who owns the folder."""
    is_root = os.geteuid() == 0
    if is_root:
        os.chown(folder, NOBODY, -1)
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_rights_that_are_taken_away_are_errors_of_single_calls(folder):
    keys = names_of(range(3))
    with as_nobody(folder), Files(folder) as tier:
        tier.put(keys[:1], records_of(keys[:1]))
        (folder / "unfinished").chmod(0o500)
        assert tier.put(keys, records_of(keys)) == [Outcome.PRESENT] + [Outcome.ERROR] * 2
        assert "Permission denied" in tier.last_failure
        assert tier.get(keys, buffers_like(records_of(keys))) == [HIT, ABSENT, ABSENT]
        tier.delete(keys[:1])
        (folder / "unfinished").chmod(0o700)
        assert tier.put(keys[1:], records_of(keys[1:])) == [STORED] * 2
        folder.chmod(0o000)
        assert tier.put(keys[:1], records_of(keys[:1])) == [Outcome.ERROR]
        assert tier.get(keys[1:], buffers_like(records_of(keys[1:]))) == [Outcome.ERROR] * 2
        folder.chmod(0o700)
        assert tier.get(keys[1:], buffers_like(records_of(keys[1:]))) == [HIT] * 2


def test_a_disk_that_is_full_refuses_a_record_and_keeps_no_part_of_it(tmp_path):
    keys = names_of(range(3))
    records = [record_of(key, size) for key, size in zip(keys, (1000, 300_000, 2000), strict=True)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Files(tmp_path) as tier, Files(tmp_path, "1GiB") as bounded:
        resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
        try:
            assert tier.put(keys, records) == [STORED, Outcome.FULL, STORED]
            assert bounded.put(keys[1:2], records[1:2]) == [Outcome.FULL]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert unfinished(tier) == []
        assert bounded.stats().num_bytes == 0
        assert tier.contains(keys) == [True, False, True]


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, 700])
def test_a_file_that_was_cut_off_goes_when_it_is_read(tmp_path, length):
    key, record = name_of(1), record_of(name_of(1))
    with Files(tmp_path, "1MiB") as tier:
        tier.put([key], [record])
        os.truncate(file_of(tier, key), length)
        expected = Outcome.CORRUPT if length < HEADER_BYTES else Outcome.FOREIGN
        assert tier.get([key], [new_buffer(len(record))]) == [expected]
        assert file_of(tier, key).exists() == (expected is Outcome.FOREIGN)
        assert tier.put([key], [record]) == [STORED]
        assert tier.get([key], [new_buffer(len(record))]) == [HIT]


def die_at(num_calls):
    """Make this process end as by a power switch at that call of the system, a write half done."""
    remaining = itertools.count(num_calls, -1)

    def dying(call):
        def counted(*args, **words):
            if next(remaining) <= 0:
                if call is write:
                    write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **words)

        return counted

    write = os.write
    for name in ("stat", "open", "write", "utime", "close", "rename", "unlink", "mkdir"):
        setattr(os, name, dying(getattr(os, name)))


@pytest.mark.cases(1)
@pytest.mark.parametrize("capacity", [None, "1MiB"])
def test_a_writer_killed_at_any_call_leaves_whole_records_only(tmp_path, capacity):
    keys = names_of(range(5))
    records = [record_of(key, 100_000) for key in keys]
    with Files(tmp_path, capacity) as tier:
        tier.put(keys, records)

    def write(num_calls):
        with Files(tmp_path, capacity) as tier:
            if capacity is not None:
                tier._room.close()  # no sweep calls the system between two calls of the put
            die_at(num_calls)
            tier.delete(keys[:1])
            tier.put(keys[:1], records[:1])

    parts = set()
    for num_calls in range(100):
        child = in_a_process(lambda num_calls=num_calls: write(num_calls))
        died = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        with Files(tmp_path, capacity) as tier:
            assert verified(tier) in (4, 5)
            assert tier.contains(keys[1:]) == [True] * 4
            parts.update(each.stat().st_size for each in unfinished(tier))
            assert tier.put(keys[:1], records[:1]) in ([STORED], [Outcome.PRESENT])
            assert verified(tier) == 5
        if not died:
            break
    assert not died
    assert parts == {len(records[0]) // 2, len(records[0])}


def test_unfinished_files_of_dead_writers_are_deleted_after_an_hour(tmp_path):
    with Files(tmp_path) as tier:
        names = (f"{name_of(number).hex()}.{number:016x}" for number in range(2))
        old, young = (tier.path / "unfinished" / name for name in names)
        for path in (old, young):
            path.write_bytes(b"part")
        hour_ago = time.time() - files.STALE_S - 60
        os.utime(old, (hour_ago, hour_ago))
    with Files(tmp_path) as tier:
        assert unfinished(tier) == [young]


def test_other_files_in_the_directory_are_left_alone(tmp_path):
    key = name_of(1)
    others = [tmp_path / "README", tmp_path / "ab" / "notes.quire", tmp_path / "ab" / "cd" / "x"]
    (tmp_path / "ab" / "cd").mkdir(parents=True)
    for path in others:
        path.write_bytes(bytes(5000))
    with Files(tmp_path, 4 * record_bytes(1000)) as tier:
        assert tier.stats().num_records == 0
        for each in names_of(range(20)):
            assert tier.put([each], [record_of(each)]) == [STORED]
        tier.put([key], [record_of(key)])
        assert len(list(tier.scan())) <= 4
    assert all(path.exists() for path in others)


def test_uses_by_one_process_hold_records_when_another_makes_room(tmp_path):
    old, used = names_of(range(10)), names_of(range(10, 20))
    capacity = 24 * record_bytes(1000)
    with Files(tmp_path, capacity) as one, Files(tmp_path, capacity) as other:
        one.put(used, records_of(used))
        one.put(old, records_of(old))
        one.touch(used)
        for key in names_of(range(100, 112)):
            other.put([key], [record_of(key)])
        assert other.contains(used) == [True] * 10
        assert sum(other.contains(old)) < 5


def test_a_clock_that_jumps_back_leaves_the_order_of_uses(tmp_path):
    now = [1e9]
    keys = names_of(range(12))
    with Files(tmp_path, 12 * record_bytes(1000), clock=lambda: now[0]) as tier:
        for key in keys:
            tier.put([key], [record_of(key)])
            now[0] -= 1000.0
        assert [entry.key for entry in tier.scan()] == keys[::-1]


def test_processes_share_a_capacity_and_what_they_keep_is_whole(tmp_path):
    capacity, writers = 40 * record_bytes(50_000), 3

    def write(seed):
        numbers = np.random.default_rng(seed)
        with Files(tmp_path, capacity) as tier:
            for _ in range(40):
                key = name_of(int(numbers.integers(150)))
                tier.put([key], [record_of(key, 50_000)], timeout_s=5)
                tier.get([key], [new_buffer(record_bytes(50_000))])

    children = [in_a_process(lambda seed=seed: write(seed)) for seed in range(writers)]
    for child in children:
        os.waitpid(child, 0)
    with Files(tmp_path, capacity) as tier:
        assert verified(tier) >= 20
        # Each other writer adds 10 % and a record, here five, before it lists again.
        assert tier.stats().num_bytes <= capacity + (writers - 1) * 5 * record_bytes(50_000)


def test_a_put_waits_for_a_slow_listing_no_longer_than_it_may(tmp_path, monkeypatch):
    keys = names_of(range(9))
    go_on = threading.Event()
    with Files(tmp_path, 8 * record_bytes(1000)) as tier:
        tier.put(keys[:8], records_of(keys[:8]))
        tier.close()
    listing = room.walk

    def slow(root):
        go_on.wait(20)
        yield from listing(root)

    with Files(tmp_path, 8 * record_bytes(1000)) as tier:
        monkeypatch.setattr(room, "walk", slow)
        began = time.monotonic()
        assert tier.put(keys[8:], records_of(keys[8:]), timeout_s=0.1) == [Outcome.TIMEOUT]
        assert time.monotonic() - began < SOON_S
        assert tier.get(keys[:1], [new_buffer(record_bytes(1000))]) == [HIT]
        go_on.set()
        assert tier.put(keys[8:], records_of(keys[8:]), timeout_s=10) == [STORED]


def test_a_record_used_between_listing_and_deleting_stays(tmp_path, monkeypatch):
    keys, new = names_of(range(8)), name_of(99)
    listing = room.walk

    def walk_and_use(root):
        listed = list(listing(root))
        os.utime(file_of(tier, keys[-1]))
        yield from listed

    with Files(tmp_path, 8 * record_bytes(1000)) as tier:
        tier.put(keys, records_of(keys))
        tier.close()
    with Files(tmp_path, 8 * record_bytes(1000)) as tier:
        monkeypatch.setattr(room, "walk", walk_and_use)
        assert tier.put([new], [record_of(new)], timeout_s=10) == [STORED]
        assert tier.contains([*keys, new]) == [True] * 6 + [False] + [True] * 2


def test_a_pipe_in_the_place_of_a_record_stays_and_nobody_waits_for_it(tmp_path):
    key = name_of(1)
    with Files(tmp_path) as tier:
        tier.put([key], [record_of(key)])
        file_of(tier, key).unlink()
        os.mkfifo(file_of(tier, key))
        outcomes = []
        reading = threading.Thread(
            target=lambda: outcomes.extend(tier.get([key], buffers_like([record_of(key)]))),
            daemon=True,
        )
        reading.start()
        reading.join(5)
        assert outcomes == [ABSENT]
        assert tier.put([key], [record_of(key)]) == [Outcome.ERROR]
        assert f"{file_of(tier, key)} is in the way" in tier.last_failure
        assert file_of(tier, key).is_fifo()
        file_of(tier, key).unlink()
        assert tier.put([key], [record_of(key)]) == [STORED]
        assert verified(tier) == 1


def test_a_file_that_goes_to_make_room_for_its_own_replacement_is_counted_once(tmp_path):
    small, large = record_of(name_of(0), 1000), record_of(name_of(0), 60_000)
    with Files(tmp_path, capacity=100_000) as tier:
        tier.put([name_of(0)], [small])
        others = names_of(range(1, 4))
        for key in others:
            tier.put([key], [record_of(key, 30_000)])
        room = tier._room
        reserve = room.reserve

        def reserve_once_it_is_gone(num_bytes, deadline):
            tier.delete([name_of(0)])
            return reserve(num_bytes, deadline)

        room.reserve = reserve_once_it_is_gone
        assert tier.put([name_of(0)], [large]) == [STORED]
        room._sweeper.settle(5)
        sizes = [each.num_bytes for each in tier.scan()]
        assert (tier.stats().num_records, tier.stats().num_bytes) == (len(sizes), sum(sizes))


def test_a_directory_that_holds_more_than_the_capacity_fits_once_it_is_open(tmp_path):
    keys, size = names_of(range(20)), record_bytes(1000)
    with Files(tmp_path, 20 * size) as tier:
        assert tier.put(keys, records_of(keys)) == [STORED] * 20
    with Files(tmp_path, 10 * size) as tier:
        assert tier.stats().num_bytes <= 10 * size
        assert verified(tier) == tier.stats().num_records >= 9
        assert tier.contains(keys[:9]) == [True] * 9, "the head of the prompt stays"


def test_a_file_that_is_just_being_deleted_to_make_room_is_not_called_present(
    tmp_path, monkeypatch
):
    key, record = name_of(1), record_of(name_of(1))
    told = []
    unlink = os.unlink

    def delete(path, **words):
        if str(path).endswith(f"{key.hex()}.quire"):
            monkeypatch.undo()
            putting.start()
            putting.join(0.1)
        unlink(path, **words)

    with Files(tmp_path, "1MiB") as tier:
        assert tier.put([key], [record]) == [STORED]
        putting = threading.Thread(target=lambda: told.extend(tier.put([key], [record])))
        monkeypatch.setattr(os, "unlink", delete)
        tier._room.remove(key)
        putting.join(10)
        assert told == [STORED]
        assert tier.contains([key]) == [True]

"""Other users of a disk tier's directory: links, deletion, files without end, forks."""

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
import warnings

import pytest
from disk_help import filled, found, get, put
from file_systems import mounted_at, unmounted
from processes import forked, wait_until
from upheavals import emptied, removed, replaced

from quire.errors import TierBusy, TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, names_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.files import Files

HIT, STORED = Outcome.HIT, Outcome.STORED


@pytest.mark.parametrize("name", ["lock", "slab-1216.quire", "index-1216.quire"])
def test_a_link_that_somebody_planted_is_not_followed(tmp_path, name):
    victim, path = tmp_path / "victim", tmp_path / "tier"
    victim.write_bytes(b"precious" * 1000)
    path.mkdir()
    (path / name).symlink_to(victim)
    keys = names_of(range(3))
    try:
        with Disk(path, "1MiB") as disk:
            assert disk.put(keys, records_of(keys), 10) == [Outcome.ERROR] * 3
            assert disk.put(keys, records_of(keys, 5000), 10) == [STORED] * 3
    except TierError as error:
        assert name == "lock"
        assert "lock" in str(error)  # noqa: PT017 - raised for one of the names only
    assert victim.read_bytes() == b"precious" * 1000


def test_the_probe_for_direct_writes_follows_no_link(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "tier"
    victim.write_bytes(b"precious")
    path.mkdir()
    (path / f"probe-{os.getpid()}").symlink_to(victim)
    Disk(path, "1MiB").close()
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("upheaval", [emptied, removed, replaced])
def test_a_directory_that_was_emptied_or_removed_is_begun_anew_and_says_so(
    tmp_path, upheaval, caplog
):
    with filled(tmp_path / "tier") as disk:
        for times in (1, 2):
            upheaval(tmp_path / "tier")
            keys = names_of(range(30, 33))
            assert put(disk, range(20, 23)) == [STORED] * 3
            assert disk.put(keys, records_of(keys, 5000), 10) == [STORED] * 3
            assert disk.get(keys, buffers_like(records_of(keys, 5000)), 10) == [HIT] * 3
            assert get(disk, range(20)) == [Outcome.ABSENT] * 20
            assert disk.num_renewed == times
            assert "it is a new, empty tier" in disk.last_failure
            disk.check()
            disk.flush()
        with pytest.raises(TierBusy):
            Disk(tmp_path / "tier", "1MiB")
    assert caplog.text.count("it is a new, empty tier") == 2, (
        "the first time, and when twice as many"
    )
    assert found(tmp_path / "tier", 23)[20:] == [HIT] * 3


@pytest.mark.parametrize("name", ["slab-1216.quire", "index-1216.quire"])
def test_a_file_that_was_removed_costs_its_own_records_and_puts_go_on(tmp_path, name):
    with filled(tmp_path) as disk:
        large = names_of(range(30, 33))
        assert disk.put(large, records_of(large, 5000), 10) == [STORED] * 3
        (tmp_path / name).unlink()
        assert put(disk, range(20, 23)) == [STORED] * 3
        assert get(disk, range(23)) == [Outcome.ABSENT] * 20 + [HIT] * 3
        assert disk.get(large, buffers_like(records_of(large, 5000)), 10) == [HIT] * 3
        disk.check()
    assert found(tmp_path, 23) == [Outcome.ABSENT] * 20 + [HIT] * 3


@pytest.mark.parametrize("name", ["slab-1216.quire", "index-1216.quire"])
@pytest.mark.parametrize("length", [0, 700, 1216 * 7 + 100])
def test_a_file_that_was_cut_while_it_is_open_gives_no_wrong_record_and_puts_go_on(
    tmp_path, name, length
):
    with filled(tmp_path) as disk:
        os.truncate(tmp_path / name, length)
        outcomes = get(disk, range(20))
        assert set(outcomes) <= {HIT, Outcome.CORRUPT, Outcome.ABSENT}
        assert put(disk, range(40)).count(STORED) >= 20
        assert get(disk, range(40)) == [HIT] * 40
        disk.check()
    assert found(tmp_path, 40) == [HIT] * 40


def test_a_disk_that_lost_its_lock_file_keeps_others_out(tmp_path):
    with filled(tmp_path) as disk:
        for _ in range(2):
            (tmp_path / "lock").unlink(missing_ok=True)
            with pytest.raises(TierBusy):
                Disk(tmp_path, "1MiB")
        assert put(disk, range(20, 25)) == [STORED] * 5
    assert found(tmp_path, 25) == [HIT] * 25


def test_where_no_directory_can_be_locked_a_disk_stops_once_another_has_the_file(
    tmp_path, monkeypatch
):
    flock = fcntl.flock

    def files_only(descriptor, operation):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", files_only)
    with filled(tmp_path) as disk:
        with pytest.raises(TierBusy):
            Disk(tmp_path, "1MiB")
        (tmp_path / "lock").unlink()
        with Disk(tmp_path, "1MiB", ahead=1) as other:
            assert put(disk, range(20, 25)) == [Outcome.ERROR] * 5
            assert f"in process {os.getpid()};" in disk.last_failure
            disk.delete(names_of(range(5)))
            disk.check()
            assert put(other, range(30, 35)) == [STORED] * 5
            assert get(other, range(20)) == [HIT] * 20
        assert put(disk, range(20, 25)) == [STORED] * 5
        disk.check()


def test_a_mount_that_went_is_not_filled_from_below(tmp_path):
    path = tmp_path / "kv"
    keys = names_of(range(3))
    for opens in (lambda: filled(path / "disk", 3), lambda: Files(path / "files")):
        path.mkdir(exist_ok=True)
        with mounted_at(path), opens() as tier:
            tier.put(keys, records_of(keys), 10)
            with unmounted(path):
                outcomes = tier.put(
                    names_of(range(50, 53)), records_of(names_of(range(50, 53)), 3000), 10
                )
                assert outcomes == [Outcome.ERROR] * 3
                assert "mount what was mounted" in tier.last_failure
                assert not any(path.iterdir())
            outcomes = tier.put(
                names_of(range(50, 53)), records_of(names_of(range(50, 53)), 3000), 10
            )
            assert outcomes == [STORED] * 3
            assert tier.get(keys, buffers_like(records_of(keys)), 10) == [HIT] * 3


def test_a_directory_that_was_moved_is_used_where_it_is_and_nothing_is_made_in_its_successor(
    tmp_path,
):
    disk = filled(tmp_path / "kv")
    (tmp_path / "kv").rename(tmp_path / "moved")
    assert put(disk, range(20, 25)) == [STORED] * 5
    large = names_of([50])
    with Disk(tmp_path / "kv", "1MiB", ahead=1) as other:
        assert disk.put(large, records_of(large, 9000), 10) == [Outcome.ERROR]
        assert other.put(large, records_of(large, 9000), 10) == [STORED]
        with pytest.raises(TierError, match="cannot be synced"):
            disk.flush()
        buffers = buffers_like(records_of(large, 9000))
        assert other.get(large, buffers, 10) == [HIT]
        assert get(disk, range(25)) == [HIT] * 25
    disk.close()
    assert found(tmp_path / "moved", 25) == [HIT] * 25


def test_an_index_that_is_left_without_its_slab_says_nothing_of_the_next_one(tmp_path):
    filled(tmp_path).close()
    (tmp_path / "slab-1216.quire").unlink()
    with Disk(tmp_path, "1MiB", ahead=1) as disk:
        more = names_of([50])
        assert disk.put(more, records_of(more), 10) == [STORED]
    with Disk(tmp_path, read_only=True) as reader:
        assert reader.recovered.is_clean
        assert reader.recovered.num_records == 1


def test_a_slab_that_is_long_and_empty_takes_neither_memory_nor_time(tmp_path):
    filled(tmp_path).close()
    for size in (1216, 5248):
        with (tmp_path / f"slab-{size}.quire").open("ab") as file:
            file.truncate(512 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for opens in (lambda: Disk(tmp_path, read_only=True), lambda: Disk(tmp_path, "1MiB", ahead=1)):
        with opens() as disk:
            assert disk.recovered.num_records == 20
            disk.check()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000, "KiB"
    assert sum(path.stat().st_size for path in tmp_path.glob("slab-*")) <= 1 << 20
    assert found(tmp_path) == [HIT] * 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_has_no_part_in_the_tier_and_leaves_it_as_it_is(tmp_path):
    keys = names_of(range(20))
    with filled(tmp_path) as disk:

        def use_and_close():
            buffers = buffers_like(records_of(keys))
            assert disk.get(keys, buffers, 1) == [Outcome.ERROR] * 20
            assert disk.put(keys, records_of(keys), 1) == [Outcome.ERROR] * 20
            disk.delete(keys)
            disk.touch(keys)
            with pytest.raises(TierError, match=f"process {os.getppid()}, from which this one"):
                disk.flush()
            assert disk.stats().num_records == 20
            disk.close()
            disk.close()

        with disk._records.lock:  # as a thread may hold it when another one forks
            assert forked(use_and_close) == 0
        with pytest.raises(TierBusy):
            Disk(tmp_path, "1MiB")
        assert disk.get(keys, buffers_like(records_of(keys)), 10) == [HIT] * 20
        more = names_of([50])
        assert disk.put(more, records_of(more), 10) == [STORED]
    assert found(tmp_path) == [HIT] * 20


HELD = """
import os, sys, time
from quire.tiers.disk import Disk

disk = Disk(sys.argv[1], "1MiB")
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_a_directory_is_free_after_close_though_a_forked_process_lives_on(tmp_path):
    disk = filled(tmp_path)
    told, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.read(told, 1)
        disk.close()
        os._exit(0)
    disk.close()
    assert found(tmp_path) == [HIT] * 20
    with Disk(tmp_path, "1MiB"):
        os.write(tell, b"-")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(TierBusy):
            Disk(tmp_path, "1MiB")


def test_a_directory_is_free_when_its_process_was_killed_though_one_forked_from_it_lives_on(
    tmp_path,
):
    words = [sys.executable, "-c", HELD, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        child = int(process.stdout.readline())
        try:
            with pytest.raises(TierBusy):
                Disk(tmp_path, "1MiB")
            process.kill()
            process.wait()
            wait_until(lambda: opens(tmp_path), "the directory is free")
        finally:
            os.kill(child, 9)


def opens(path):
    try:
        Disk(path, "1MiB").close()
    except TierBusy:
        return False
    return True

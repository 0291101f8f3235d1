"""What others do to a directory while a disk tier has it: links, deletion, files without end, forks."""

import os
import resource
import shutil
import subprocess
import sys
import warnings

import pytest
from disk_help import filled, found, get, put
from processes import forked, wait_until

from quire.errors import TierBusy, TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, names_of, records_of
from quire.tiers.disk import Disk, DiskReader

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


def test_what_is_put_into_a_directory_that_was_deleted_is_not_stored(tmp_path):
    with filled(tmp_path / "tier") as disk:
        shutil.rmtree(tmp_path / "tier")
        keys = names_of(range(30, 33))
        assert disk.put(keys, records_of(keys), 10) == [Outcome.ERROR] * 3
        assert disk.put(keys, records_of(keys, 5000), 10) == [Outcome.ERROR] * 3
        assert disk.contains(keys) == [False] * 3
        disk.check()


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
    with DiskReader(tmp_path) as reader:
        assert reader.recovered.is_clean
        assert reader.recovered.num_records == 1


def test_a_slab_that_is_long_and_empty_takes_neither_memory_nor_time(tmp_path):
    filled(tmp_path).close()
    for size in (1216, 5248):
        with (tmp_path / f"slab-{size}.quire").open("ab") as file:
            file.truncate(512 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for opens in (lambda: DiskReader(tmp_path), lambda: Disk(tmp_path, "1MiB", ahead=1)):
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

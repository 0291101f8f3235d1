"""A disk tier on file systems that are full, may not be written or limit the size of files: real ones, small."""

import resource
import shutil

import pytest
from disk_help import get, put
from file_systems import command, fill, mounted
from prefixes_help import FULL as NAMESPACE
from prefixes_help import book_of, hashes_of
from prefixes_help import store as store_blocks
from typer.testing import CliRunner

from quire.cli.app import app
from quire.tiers.base import Outcome
from quire.tiers.contents.names import NameBook, write_names
from quire.tiers.contract.samples import names_of, record_of
from quire.tiers.disk import Disk

HIT, ABSENT, STORED, FULL = Outcome.HIT, Outcome.ABSENT, Outcome.STORED, Outcome.FULL
PAYLOAD = 100_000
RECORD = len(record_of(names_of([0])[0], PAYLOAD))


@pytest.fixture(params=["tmpfs", "ext4"])
def system(request, tmp_path):
    with mounted(tmp_path, request.param) as path:
        yield path


def store(disk, numbers):
    return put(disk, numbers, PAYLOAD)


def load(disk, numbers):
    return get(disk, numbers, PAYLOAD)


def test_writing_ahead_leaves_room_for_others(system):
    with Disk(system / "tier", "1GiB", ahead="256MiB") as disk:
        assert store(disk, [0]) == [STORED]
        assert disk.settle(60)
        assert shutil.disk_usage(system).free > 4 << 20


@pytest.mark.cases(2)
@pytest.mark.parametrize("direct", [None, False])
def test_a_file_system_that_others_fill_costs_new_places_and_nothing_else(system, direct):
    path = system / "tier"
    disk = Disk(path, "1GiB", ahead="8MiB", direct=direct)
    assert store(disk, range(40)) == [STORED] * 40
    assert disk.settle(60)
    free = disk._records.slabs[RECORD].index.num_free
    assert free >= 8
    fill(system)
    assert store(disk, range(1000, 1000 + free)) == [STORED] * free, "places that are there"
    assert store(disk, [2000]) == [STORED], "and then the oldest make room"
    assert load(disk, [2000]) == [HIT]
    keys = names_of(range(5000, 5004))
    assert put(disk, range(5000, 5004)) == [FULL] * 4 or set(disk.contains(keys)) == {True}
    there = [number for number in range(40) if load(disk, [number]) == [HIT]]
    assert len(there) > 30
    disk.delete(names_of(there[:10]))
    assert store(disk, range(3000, 3010)) == [STORED] * 10
    disk.flush()
    disk.check()
    disk.close()
    for capacity in ("1GiB", "2MiB"):
        with Disk(path, capacity, direct=direct) as disk:
            assert not disk.is_read_only
            assert disk.recovered.is_clean
            assert load(disk, [3009]) == [HIT]
            assert store(disk, [400]) in ([STORED], [Outcome.PRESENT])
            disk.check()
            assert disk._room.used <= disk._room.capacity


@pytest.mark.cases(1)
def test_a_tier_that_fills_a_file_system_by_itself_goes_on_and_opens_again(system):
    path = system / "tier"
    with Disk(path, "1GiB") as disk:
        outcomes = [store(disk, [number])[0] for number in range(400)]
        assert outcomes == [STORED] * 400, "the oldest make room"
        assert load(disk, [399]) == [HIT]
        assert disk.settle(60)
        held = disk.stats().num_records
        assert held * RECORD > 12 << 20
    with Disk(path, "1GiB") as disk:
        assert disk.recovered.num_records == held
        assert store(disk, range(400, 410)) == [STORED] * 10
        disk.check()


def test_on_a_full_file_system_a_tier_without_files_stores_nothing_and_says_so(system):
    path = system / "tier"
    path.mkdir()
    fill(system)
    with Disk(path, "1GiB") as disk:
        assert set(put(disk, range(3))) <= {FULL, Outcome.SKIPPED}
        assert get(disk, range(3)) == [ABSENT] * 3
        (system / "other").unlink()
        if not disk.is_read_only:
            assert put(disk, range(3)) == [STORED] * 3


def test_a_full_file_system_can_be_evicted_from(system):
    path = system / "tier"
    with Disk(path, "1MiB", ahead=1) as disk:
        tokens = list(range(80))
        store_blocks(disk, NAMESPACE, hashes_of(tokens))
    write_names(book_of([NAMESPACE], [(tokens, None)]), path)
    fill(system)
    for words in (["verify"], ["evict", "--to", "4KiB"], ["verify"], ["evict", "--all"]):
        done = CliRunner().invoke(app, ["cache", words[0], str(path), *words[1:]])
        assert done.exit_code == 0, done.output
    assert not NameBook.read(path).parents


def test_on_a_read_only_file_system_records_are_found(system):
    path = system / "tier"
    with Disk(path, "8MiB", ahead=1) as disk:
        store(disk, range(5))
    assert command("mount", "-o", "remount,ro", str(system))
    with Disk(path, "8MiB") as disk:
        assert disk.is_read_only
        assert load(disk, range(5)) == [HIT] * 5
        assert store(disk, [7]) == [Outcome.SKIPPED]


def test_where_files_may_not_grow_further_the_oldest_records_make_room(tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Disk(tmp_path, "64MiB", ahead=1) as disk:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, limits[1]))
        try:
            for number in range(200):
                assert store(disk, [number]) == [STORED]
            assert load(disk, [199]) == [HIT]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        disk.check()
    with Disk(tmp_path, "64MiB", ahead=1) as disk:
        assert disk.recovered.is_clean
        assert load(disk, [199]) == [HIT]

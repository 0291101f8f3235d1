"""Prefetch, closing, statistics, and the same stack in real threads."""

import subprocess
import sys
import threading
import time

import pytest
from dict_tier import DictTier
from stack_help import KEYS, RECORDS, SIZE, Stacked, load, put, store, wanted

from quire.errors import ConfigError
from quire.tiers.disk import Disk
from quire.tiers.faults import FaultPlan, Faulty
from quire.tiers.host import Host
from quire.tiers.stack.settings import StackSettings, TierSettings
from quire.tiers.stack.stack import TierStack

TEN = list(range(10))


def prefetch(stack, numbers):
    keys = [KEYS[i] for i in numbers]
    return stack.prefetch(keys, [SIZE] * len(keys))


def test_a_prefetch_brings_records_into_the_fastest_tier_and_leases_them():
    stacked = Stacked("host", "disk")

    def scenario(stack, host, disk):
        put(host, [0])
        put(disk, TEN)
        disk.get_s = 0.5
        begun, took_s = stacked.timed(lambda: prefetch(stack, TEN))
        assert took_s == 0.0
        assert stacked.timed(lambda: begun.finish(30.0)) == (10, 0.5)
        assert set(host.leased) == set(KEYS[:10])
        disk.calls.clear()
        assert load(stack, TEN) == ["hit"] * 10
        assert disk.calls == []

    stacked.run(scenario)


@pytest.mark.parametrize(("waits_s", "num_ready"), [(0.0, 4), (0.7, 8)])
def test_a_request_takes_the_part_of_a_prefetch_that_is_there(waits_s, num_ready):
    """Four batches of one record are read at a time, by one thread, in 0.125 s each."""
    stacked = Stacked("host", "disk", batch_bytes=SIZE, threads=1)

    def scenario(stack, host, disk):
        put(disk, range(40))
        disk.get_s = 0.125
        begun = prefetch(stack, range(40))
        stacked.lanes.sleep(0.55)
        assert stacked.timed(lambda: begun.finish(waits_s)) == (num_ready, waits_s)
        assert begun.done
        stacked.lanes.sleep(5)
        assert len(disk.asked("get")) <= 2 + (0.55 + waits_s) / 0.125

    stacked.run(scenario)


def test_finish_of_a_prefetch_waits_no_longer_than_its_timeout():
    stacked = Stacked("host", "disk")

    def scenario(stack, host, disk):
        put(disk, TEN)
        disk.get_s = 100.0
        begun = prefetch(stack, TEN)
        assert stacked.timed(lambda: begun.finish(2.0)) == (0, 2.0)

    stacked.run(scenario)


def test_a_prefetch_ends_at_the_first_key_that_no_tier_has():
    def scenario(stack, host, disk, remote):
        put(disk, range(5))
        put(remote, [5, 7])
        assert prefetch(stack, TEN).finish(30.0) == 6

    Stacked("host", "disk", "remote").run(scenario)


def test_a_prefetch_ends_where_the_fastest_tier_is_full_of_leased_records():
    disk = DictTier("disk")
    disk.in_memory = False
    put(disk, range(1000))
    stack = TierStack([Host("64KiB"), disk], StackSettings(batch_bytes=10 * SIZE))
    ready = prefetch(stack, range(1000)).finish(30.0)
    assert 100 < ready < 256
    assert all(stack.tiers[0].contains(KEYS[:ready]))
    stack.close()


def test_a_prefetch_that_is_cancelled_leaves_nothing_in_flight():
    stacked = Stacked("host", "disk")

    def scenario(stack, host, disk):
        put(disk, TEN)
        disk.get_s = 1.0
        begun = prefetch(stack, TEN)
        begun.cancel()
        begun.cancel()
        assert begun.done
        stacked.lanes.sleep(2)
        assert sum(map(len, stack._reader._flights)) == len(stack._prefetching.active) == 0

    stacked.run(scenario)


def test_many_prefetches_take_turns():
    stacked = Stacked("host", "disk", threads=1)

    def scenario(stack, host, disk):
        put(disk, range(300))
        disk.get_s = 1.0
        begun = [prefetch(stack, range(10 * i, 10 * i + 10)) for i in range(30)]
        assert len(stack._prefetching.active) == 30
        assert [each.finish(1000.0) for each in begun] == [10] * 30
        assert stack._prefetching.active == {}

    stacked.run(scenario)


def test_closing_writes_what_is_queued_and_closes_the_tiers():
    stacked = Stacked("host", "disk", close_timeout_s=2.0)

    def scenario(stack, host, disk):
        disk.put_s = 1.0
        store(stack, TEN)
        stack.close()
        assert len(disk.records) == 10
        assert host.is_closed
        assert disk.is_closed
        assert stack.find(KEYS[:2]) == [-1, -1]
        assert load(stack, [0]) == ["skipped"]
        assert store(stack, [0]) == ["skipped"]
        assert wanted(stack, KEYS[:1]) == [False]

    stacked.run(scenario)


def test_closing_does_not_wait_for_a_tier_that_hangs_which_is_closed_when_it_comes_back():
    stacked = Stacked("host", "disk", "remote", close_timeout_s=2.0)

    def scenario(stack, host, disk, remote):
        put(disk, [0])
        disk.get_s = 100.0
        load(stack, [0], 0.1)
        assert stacked.timed(stack.close) == (None, 2.0)
        assert (host.is_closed, disk.is_closed, remote.is_closed) == (False, False, True)
        stacked.lanes.sleep(200)
        assert (host.is_closed, disk.is_closed) == (True, True)

    stacked.run(scenario)


def test_closing_takes_a_second_unless_told_otherwise_and_says_what_was_not_written(caplog):
    stacked = Stacked("host", "disk")

    def scenario(stack, host, disk):
        disk.put_s = 100.0
        store(stack, TEN)
        assert stacked.timed(stack.close) == (None, 1.0)

    stacked.run(scenario)
    (warning,) = (each.getMessage() for each in caplog.records if each.name.startswith("quire"))
    assert warning.endswith(f"{10 * SIZE} bytes waited")


def test_statistics_say_what_was_asked_of_each_tier():
    stacked = Stacked("host", "disk")

    def scenario(stack, host, disk):
        put(disk, TEN)
        disk.get_s = 0.5
        load(stack, range(12))
        host_report, disk_report = stack.stats().tiers
        assert host_report.loads == {"absent": 12}
        assert host_report.stores == {"stored": 10}
        assert disk_report.loads == {"absent": 2, "hit": 10}
        assert (disk_report.loaded_bytes, disk_report.load_s) == (10 * SIZE, 0.5)
        assert disk_report.load_mb_s == pytest.approx(10 * SIZE / 0.5e6)
        assert stack.stats().loads == {"absent": 2, "hit": 10}
        lines = str(stack).splitlines()
        assert [line.split()[0] for line in lines] == ["tier", "host", "disk"]
        assert repr(stack) == "<TierStack host > disk>"

    stacked.run(scenario)


def test_tiers_of_one_name_are_numbered():
    stacked = Stacked("disk", "disk", "disk")
    assert stacked.stack.names == ("disk", "disk-2", "disk-3")


@pytest.mark.parametrize(
    "make",
    [
        lambda: TierStack([]),
        lambda: TierStack([DictTier() for _ in range(9)]),
        lambda: TierStack([DictTier()], StackSettings(tiers={"disc": TierSettings()})),
        lambda: StackSettings(load_timeout_s=0.0),
        lambda: StackSettings(cool_down_s=float("nan")),
        lambda: StackSettings(threads=0),
        lambda: StackSettings(threads=1.5),
        lambda: StackSettings(write="x"),
        lambda: StackSettings(read_only="no"),
        lambda: StackSettings(load_timeout_s="5"),
        lambda: TierSettings(write="never"),
        lambda: StackSettings(queue_bytes="many"),
        lambda: TierSettings(threads=-1),
    ],
)
def test_settings_that_cannot_work_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_stack_settings_read_sizes_with_units():
    assert StackSettings(queue_bytes="1MiB").queue_bytes == 1 << 20


def test_in_real_threads_clients_read_what_was_written_while_a_tier_misbehaves():
    before = threading.active_count()
    disk = Faulty(
        DictTier("disk"),
        FaultPlan(latency_s=0.001, errors=0.05, corruption=0.05, short_reads=0.05),
        seed=1,
    )
    settings = StackSettings(failures=1000, batch_bytes=8 * SIZE, gate=False)
    stack = TierStack([Host("64KiB"), disk], settings)
    hits, errors = [], []

    def client(number):
        try:
            for turn in range(15):
                numbers = [(20 * (number + turn) + i) % 300 for i in range(30)]
                keys = [KEYS[i] for i in numbers]
                stack.store(keys, [RECORDS[i] for i in numbers])
                stack.find(keys)
                timeout_s = 0.05 if turn % 5 == 0 else 2.0
                outcomes, buffers = stack.load(keys, [SIZE] * 30, timeout_s)
                for i, outcome, buffer in zip(numbers, outcomes, buffers, strict=True):
                    if outcome == "hit":
                        hits.append(i)
                        assert buffer == RECORDS[i]
                stack.give_back(buffers)
        except BaseException as error:
            errors.append(error)
            raise

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for each in clients:
        each.start()
    for each in clients:
        each.join(60)
    assert not errors
    assert len(hits) > 1000
    assert stack.drain(10)
    stack.check()
    stack.close()
    deadline = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_in_real_threads_a_hung_tier_delays_nobody_beyond_the_deadline():
    release = threading.Event()
    disk = Faulty(DictTier("disk"), FaultPlan(), sleep=lambda _: release.wait(60))
    remote = DictTier("remote")
    remote.in_memory = False
    put(disk.tier, TEN)
    put(remote, TEN)
    disk.plan = FaultPlan(hangs=1.0)
    settings = StackSettings(lookup_timeout_s=1.0, load_timeout_s=5.0, close_timeout_s=0.3)
    stack = TierStack([disk, remote], settings)
    began_s = time.monotonic()
    assert stack.find(KEYS[:10]) == [1] * 10
    assert load(stack, TEN) == ["hit"] * 10
    assert time.monotonic() - began_s < 20
    stack.close()
    assert time.monotonic() - began_s < 40
    release.set()


def test_trials_of_a_tier_whose_calls_never_return_do_not_pile_up():
    stacked = Stacked("disk", failures=1, cool_down_s=0.03, threads=2)

    def scenario(stack, disk):
        put(disk, TEN)
        disk.get_s = disk.contains_s = 1e9
        for _ in range(200):
            load(stack, [0], 0.1)
            stacked.lanes.sleep(1)
        assert stack._levels[0].loads.num_waiting <= 2

    stacked.run(scenario)


def test_a_large_read_from_memory_has_all_the_time_that_its_caller_gives():
    stacked = Stacked("host", "disk")

    def scenario(stack, host, disk):
        given = []
        host._get = lambda keys, buffers, timeout_s, answers: given.append(timeout_s)
        load(stack, [0], 3.0)
        assert given == [3.0]

    stacked.run(scenario)


LEFT_OPEN = """
import os, sys
from quire.tiers.contract.samples import names_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

keys = names_of(range(3))
records = records_of(keys)
stack = TierStack([Disk(sys.argv[1], "1MiB")], StackSettings(close_timeout_s=3600))
stack.store(keys[:1], records[:1])
if os.fork() == 0:
    sys.exit()  # a forked process has no thread to wait for
os.wait()
stack.feeding.begin(keys[1:], lambda: stack.store(keys[1:], records[1:]), 100)
"""


def test_queued_records_are_written_at_the_end_of_a_process(tmp_path):
    subprocess.run([sys.executable, "-c", LEFT_OPEN, str(tmp_path)], check=True, timeout=300)
    with Disk(tmp_path, "1MiB") as disk:
        assert disk.contains(KEYS[:3]) == [True] * 3


FORKED = """
import os, sys, time
from quire.tiers.contract.samples import names_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.stack.stack import TierStack

keys = names_of(range(3))
records = records_of(keys)
stack = TierStack([Disk(sys.argv[1], "1MiB")])
stack.store(keys[:1], records[:1])
job = stack.feeding.begin(keys[1:2], lambda: time.sleep(0.5), 100)
shared, levels = stack._shared, stack._levels
with shared.lock, levels[0].loads._lock, levels[0].stores._lock, shared.pool._lock:
    child = os.fork()
    if not child:
        assert len(stack.buffers([len(records[0])])) == 1
        assert stack.find(keys[:1]) == [-1]
        assert stack.load(keys[:1], [len(records[0])]) == (["skipped"], [None])
        assert stack.store(keys[1:2], records[1:2]) == ["skipped"]
        assert not stack.wanted(keys).any()
        assert not stack.feeding.has_room(1 << 20)
        assert stack.choose(keys[:1], [0], [1], float) == 0
        assert stack.prefetch(keys[:1], [len(records[0])]).finish() == 0
        assert job.wait() and stack.drain(60) and stack.stats()
        stack.count_use(keys)
        stack.delete(keys[:1])
        stack.flush()
        stack.close()
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
stack.store(keys[2:], records[2:])
assert stack.drain(10)
assert stack.find(keys, contiguous=False) == [0, -1, 0]
stack.close()
"""


def test_in_a_forked_process_a_stack_does_nothing_and_the_one_it_was_forked_from_goes_on(tmp_path):
    subprocess.run([sys.executable, "-c", FORKED, str(tmp_path)], check=True, timeout=60)
    with Disk(tmp_path, "1MiB") as disk:
        assert disk.contains(KEYS[:3]) == [True, False, True]


@pytest.mark.parametrize("size", [-1, 0, 127, 2**50])
def test_sizes_that_no_record_has_are_refused(size):
    with TierStack([DictTier()], StackSettings(gate=False)) as stack:
        for call in (stack.load, stack.prefetch):
            with pytest.raises(ConfigError, match=r"192 to 4294967296 bytes, got"):
                call(KEYS[:1], [size])

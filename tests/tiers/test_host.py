"""Requirements of the host tier alone: its memory, its sizes, its hook, its lock."""

import os
import threading
import time
from functools import partial

import numpy as np
import pytest

from cpu_time import cpu_s
from quire.errors import ConfigError, InvariantError, TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, names_of, record_of, records_of
from quire.tiers.format import HEADER_BYTES, PAGE_BYTES, new_buffer, record_bytes, verify
from quire.tiers.host import Host

HIT, STORED, FULL, PRESENT = Outcome.HIT, Outcome.STORED, Outcome.FULL, Outcome.PRESENT
ERROR = Outcome.ERROR
SIZE = record_bytes(1000)


def fill(tier, numbers, payload_bytes=1000):
    """Put records one by one, as separate prompts; return their keys."""
    keys = names_of(numbers)
    for key in keys:
        assert tier.put([key], [record_of(key, payload_bytes)]) == [STORED]
    return keys


@pytest.mark.parametrize("capacity", ["1 lightyear", 0, -1, True, None])
def test_a_capacity_that_is_no_size_is_refused(capacity):
    with pytest.raises(ConfigError):
        Host(capacity)


def test_more_memory_than_there_can_be_is_refused():
    with pytest.raises(TierError, match="give it less"):
        Host(1 << 60)


@pytest.mark.cases(2)
@pytest.mark.parametrize("payload_bytes", [1000, 60_000, 200_000, 1 << 20])
def test_records_of_one_size_fill_the_capacity_to_the_last_place(payload_bytes):
    size = record_bytes(payload_bytes)
    for capacity in (64 * size, 37 * size + size // 2):
        with Host(capacity) as tier:
            fill(tier, range(capacity // size), payload_bytes)
            assert tier.stats().num_records == capacity // size


def test_records_of_whole_pages_lie_at_the_start_of_pages_beside_small_ones():
    with Host("64MiB") as tier:
        fill(tier, range(10))
        fill(tier, range(10, 20), 100_000)
        seen = []

        def evicting(keys, records):
            seen.extend(
                np.frombuffer(record, np.uint8).ctypes.data
                for record in records
                if len(record) >= 65536
            )

        tier.evicting = evicting
        fill(tier, range(100, 900), 200_000)
        assert len(seen) >= 10
        assert not any(address % PAGE_BYTES for address in seen)


def test_a_twentieth_goes_in_one_go_the_oldest_first():
    told = []
    with Host(100 * SIZE) as tier:
        tier.evicting = lambda keys, _: told.append(keys)
        keys = fill(tier, range(100))
        fill(tier, [100])
        assert told == [keys[:5]]
        fill(tier, range(101, 105))
        assert len(told) == 1
        fill(tier, [105])
        assert told[1] == keys[5:10]


def test_the_head_of_a_prompt_that_is_there_does_not_go_for_its_tail():
    with Host(20 * SIZE) as tier:
        head = fill(tier, range(3))
        fill(tier, range(10, 27))
        tail = names_of(range(100, 110))
        outcomes = tier.put([*head, *tail], records_of([*head, *tail]))
        assert outcomes == [PRESENT] * 3 + [STORED] * 10
        assert tier.contains([*head, *tail]) == [True] * 13


def test_the_size_with_the_oldest_records_gives_room_and_keeps_its_newest():
    with Host(1 << 20) as tier:
        small = fill(tier, range(800))
        tier.touch(small[::-1])
        held = sum(tier.contains(small))
        large = fill(tier, range(10_000, 10_020), 20_000)
        assert all(tier.contains(large))
        there = tier.contains(small)
        assert 0 < sum(there) < held
        assert there == sorted(there), "the oldest went"
        kept = [key for key, found in zip(small, there, strict=True) if found]
        assert tier.get(kept, buffers_like(records_of(kept))) == [HIT] * len(kept)
        tier.check()


def test_room_that_one_size_no_longer_takes_goes_to_another_and_nothing_is_evicted():
    told = []
    with Host(1 << 20) as tier:
        tier.evicting = lambda keys, _: told.extend(keys)
        small = fill(tier, range(700))
        tier.delete(small[::2])
        fill(tier, range(10_000, 10_016), 20_000)
        assert told == []
        left = small[1::2]
        buffers = buffers_like(records_of(left))
        assert tier.get(left, buffers) == [HIT] * len(left)
        assert buffers == records_of(left)


def test_a_lease_moves_with_its_record():
    now = [0.0]
    with Host(1 << 20, clock=lambda: now[0]) as tier:
        small = fill(tier, range(900))
        tier.lease(small[100:], 10.0)
        fill(tier, range(10_000, 10_003), 20_000)
        assert all(tier.contains(small[120:]))
        now[0] = 11.0
        fill(tier, range(20_000, 20_100), 20_000)
        assert not any(tier.contains(small))


def test_a_lease_that_has_ended_counts_at_once():
    now = [0.0]
    with Host(20 * SIZE, clock=lambda: now[0]) as tier:
        keys = fill(tier, range(20))
        tier.lease(keys[:1], 10.0)
        fill(tier, [100])
        assert tier.contains(keys[:3]) == [True, False, True]
        now[0] = 11.0
        fill(tier, [101])
        assert tier.contains(keys[:3]) == [False, False, True]


def test_a_record_larger_than_any_before_makes_everything_go_once():
    told = []
    with Host("4MiB") as tier:
        tier.evicting = lambda keys, _: told.extend(keys)
        small = fill(tier, range(30))
        large = fill(tier, [100], 3 << 20)
        assert sorted(told) == sorted(small)
        assert tier.contains([*small, *large]) == [False] * 30 + [True]
        fill(tier, range(200, 210))
        assert not any(tier.contains(large)), "three quarters of the memory are one chunk"
        fill(tier, [101], 3 << 20)


def test_a_call_of_small_and_large_records_stores_both():
    keys = names_of(range(8))
    records = [record_of(key, 300_000 if i % 2 else 1000) for i, key in enumerate(keys)]
    with Host("4MiB") as tier:
        fill(tier, range(100, 110))
        assert tier.put(keys, records) == [STORED] * 8


def test_the_lock_is_free_while_the_hook_runs():
    with Host(20 * SIZE) as tier:
        keys = fill(tier, range(20))
        told = []

        def evicting(gone, records):
            tier.evicting = None
            others = threading.Thread(target=lambda: told.append(tier.contains(keys)))
            others.start()
            others.join(5)
            told.append(tier.put([name_of(77)], [record_of(name_of(77))]))

        tier.evicting = evicting
        assert tier.put([name_of(50)], [record_of(name_of(50))]) == [STORED]
        assert told == [[False] + [True] * 19, [STORED]]
        assert tier.contains([name_of(50), name_of(77)]) == [True, True]
        tier.check()


@pytest.mark.parametrize("call", ["get", "put"])
def test_the_lock_is_free_while_a_record_is_copied(monkeypatch, call):
    key, other = name_of(1), name_of(2)
    with Host("1MiB") as tier:
        fill(tier, [1, 2] if call == "get" else [2])
        copying, go_on = threading.Event(), threading.Event()
        copy = np.copyto

        def slow_copy(target, source):
            monkeypatch.setattr(np, "copyto", copy)
            copying.set()
            assert go_on.wait(10)
            copy(target, source)

        monkeypatch.setattr(np, "copyto", slow_copy)
        buffer = new_buffer(SIZE)
        work = partial(getattr(tier, call), [key], [buffer if call == "get" else record_of(key)])
        thread = threading.Thread(target=work)
        thread.start()
        assert copying.wait(10)
        assert tier.contains([key, other]) == [call == "get", True]
        assert tier.get([other], [new_buffer(SIZE)]) == [HIT]
        put_again = tier.put([key], [record_of(key)], timeout_s=0.0)
        assert put_again == [PRESENT if call == "get" else Outcome.TIMEOUT]
        fill(tier, [3])
        go_on.set()
        thread.join(10)
        assert tier.get([key], [buffer]) == [HIT]
        assert buffer == record_of(key)
        tier.check()


def test_a_child_process_does_not_write_into_the_memory_of_its_parent():
    with Host(20 * SIZE) as tier:
        keys = fill(tier, range(20))
        child = os.fork()
        if not child:
            fill(tier, range(100, 120))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert tier.get(keys, buffers_like(records_of(keys))) == [HIT] * 20


def test_bytes_shown_to_the_hook_are_not_overwritten_while_it_looks():
    shown = {}
    with Host(20 * SIZE) as tier:
        fill(tier, range(20))
        looking, go_on = threading.Event(), threading.Event()

        def evicting(keys, records):
            if not looking.is_set():
                looking.set()
                go_on.wait(10)
                shown.update({k: verify(r).key for k, r in zip(keys, records, strict=True)})

        tier.evicting = evicting
        writer = threading.Thread(target=fill, args=(tier, [50]))
        writer.start()
        assert looking.wait(10)
        fill(tier, range(60, 90))
        go_on.set()
        writer.join(10)
        assert shown == {name_of(0): name_of(0)}
        tier.check()


def test_a_hook_that_raises_loses_no_room():
    with Host(20 * SIZE) as tier:
        fill(tier, range(20))

        def evicting(keys, records):
            raise ZeroDivisionError

        tier.evicting = evicting
        assert tier.put([name_of(50)], [record_of(name_of(50))]) == [ERROR]
        assert tier.last_failure.startswith("ZeroDivisionError")
        tier.evicting = None
        tier.check()
        fill(tier, range(50, 70))
        assert tier.stats().num_records == 20


def test_a_hook_that_takes_too_long_costs_the_time_of_the_call():
    now = [0.0]
    with Host(20 * SIZE, clock=lambda: now[0]) as tier:
        fill(tier, range(20))

        def evicting(keys, records):
            now[0] += 5.0

        tier.evicting = evicting
        keys = names_of(range(50, 54))
        assert tier.put(keys, records_of(keys), timeout_s=1.0) == [STORED] + [Outcome.TIMEOUT] * 3


def test_a_record_that_goes_while_it_is_copied_is_not_given(monkeypatch):
    """Between finding and copying, its place is given to another record."""
    with Host(20 * SIZE) as tier:
        fill(tier, range(20))
        copy = np.copyto

        def slow_copy(target, source):
            monkeypatch.setattr(np, "copyto", copy)
            fill(tier, range(100, 140))
            copy(target, source)

        monkeypatch.setattr(np, "copyto", slow_copy)
        buffer = new_buffer(SIZE)
        assert tier.get([name_of(0)], [buffer]) == [Outcome.ABSENT]
        assert "corrupt" not in tier.stats().outcomes


def test_threads_that_write_evict_read_and_delete_never_see_wrong_bytes():
    wrong, evicted = [], []
    sizes = (1000, 3000, 20_000)
    expected = {key: record_of(key, sizes[key[0] % 3]) for key in names_of(range(200))}
    keys = list(expected)

    def evicting(gone, records):
        evicted.extend(gone)
        wrong.extend(k for k, r in zip(gone, records, strict=True) if r != expected[k])

    def work(seed):
        numbers = np.random.default_rng(seed)
        for _ in range(150):
            some = [keys[i] for i in numbers.choice(len(keys), 5, replace=False)]
            records = [expected[key] for key in some]
            buffers = buffers_like(records)
            try:
                tier.put(some, records, timeout_s=10)
                got = tier.get(some, buffers, timeout_s=10)
                wrong.extend(o for o in got if o not in (HIT, Outcome.ABSENT))
                wrong.extend(
                    key
                    for key, outcome, buffer in zip(some, got, buffers, strict=True)
                    if outcome is HIT and buffer != expected[key]
                )
                tier.touch(some[:3])
                tier.lease(some[:1], 0.001)
                tier.delete(some[4:])
            except Exception as error:  # noqa: BLE001 - whatever it is, the test fails by it
                wrong.append(error)

    with Host(600_000) as tier:
        tier.evicting = evicting
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        tier.check()
        assert wrong == []
        assert len(evicted) > 100
        assert "corrupt" not in tier.stats().outcomes


def test_a_copy_of_a_mebibyte_costs_what_memory_costs():
    """CPU time; four times a plain copy of the same bytes, and the checksum, is far from any loop."""
    keys = names_of(range(16))
    records = records_of(keys, (1 << 20) - HEADER_BYTES)
    buffers = buffers_like(records)
    target = np.zeros((16, 1 << 20), np.uint8)

    def plain():
        for row, record in zip(target, records, strict=True):
            row[:] = np.frombuffer(record, np.uint8)
            verify(record)

    with Host("64MiB") as tier:
        tier.put(keys, records)
        assert cpu_s(lambda: tier.get(keys, buffers), 5) < 4 * cpu_s(plain, 5) + 0.002


def test_check_finds_a_chunk_that_is_lost():
    with Host("1MiB") as tier:
        fill(tier, range(3))
        chunk = tier._arena.free_chunks.pop()
        with pytest.raises(InvariantError, match="chunks"):
            tier.check()
        tier._arena.free_chunks.append(chunk)


def test_a_put_stores_a_record_whose_other_writer_found_no_room():
    """It is not told that it is there because another thread has begun to write it."""
    key, record = name_of(1000), record_of(name_of(1000))
    told = []

    def evicting(_keys, _records):
        tier.evicting = None
        putting.start()
        putting.join(0.1)
        raise ValueError

    with Host(10 * SIZE) as tier:
        fill(tier, range(10))
        tier._mend = lambda why: None
        tier.evicting = evicting
        putting = threading.Thread(target=lambda: told.extend(tier.put([key], [record])))
        assert tier.put([key], [record]) == [ERROR]
        putting.join(10)
        assert told == [STORED]
        assert tier.contains([key]) == [True]
        tier.check()


def test_a_put_behind_an_interrupted_writer_reports_the_true_outcome():
    (key,) = names_of(range(1))
    outcomes = []
    with Host("1MiB") as host:
        host._filling.begin([key])  # a thread that a signal ends in the middle of its copy
        waiting = threading.Thread(
            target=lambda: outcomes.extend(host.put([key], records_of([key]), 10))
        )
        waiting.start()
        while host._filling.get(key) is None:
            time.sleep(0.001)
        host._mend("a call was cut off")
        waiting.join(5)
        (outcome,) = outcomes  # of a call that began in memory which nobody finds any more
        assert host.contains([key]) == [outcome is Outcome.STORED]
        assert host.put([key], records_of([key]), 10)[0] in (Outcome.STORED, Outcome.PRESENT)
        assert host.get([key], buffers_like(records_of([key])), 10) == [Outcome.HIT]
        host.check()

"""A purge of a stack reaches tiers, queues, jobs and buffers, and nothing that began before it comes back."""

import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from searching import found_in_files, found_in_memory
from stack_help import Stacked

from quire.core import Scope
from quire.errors import ScopeError
from quire.exchange.hashing import tag_of, tenant_tag
from quire.tiers.base import Outcome
from quire.tiers.contents.names import ChainName, NamesFile, ScopeName
from quire.tiers.contract.samples import names_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.files import Files
from quire.tiers.host import Host
from quire.tiers.stack.stack import TierStack

MINE, OTHER = Scope(tenant="acme"), Scope(salt="other")
KEYS = names_of(range(40), tenant_tag(MINE))
OTHERS = names_of(range(40), tenant_tag(OTHER))
RECORDS = dict(zip((*KEYS, *OTHERS), records_of([*KEYS, *OTHERS], 1000), strict=True))


def store(stack, keys):
    buffers = stack.buffers([len(RECORDS[key]) for key in keys])
    for buffer, key in zip(buffers, keys, strict=True):
        buffer[:] = RECORDS[key]
    return stack.store(keys, buffers)


def needles(keys):
    return [tenant_tag(MINE), *(bytes(RECORDS[key][600:632]) for key in keys)]


def test_a_purge_leaves_nothing_in_any_tier_and_lets_the_tenant_store_again(tmp_path):
    tiers = [Host("1MiB"), Disk(tmp_path / "disk", "4MiB"), Files(tmp_path / "files")]
    with TierStack(tiers) as stack:
        for start in range(0, 40, 8):
            store(stack, KEYS[start : start + 8])
            store(stack, OTHERS[start : start + 8])
        stack.drain(10)
        told = stack.purge(MINE)
        assert {name: (each.count, each.is_complete) for name, each in told.items()} == {
            "host": (40, True),
            "disk": (40, True),
            "files": (40, True),
        }
        for needle in needles(KEYS):
            assert found_in_memory(tiers[0], needle) + found_in_files(tmp_path, needle) == []
        assert stack.find(KEYS, contiguous=False) == [-1] * 40
        stack.drain(10)
        assert stack.load(OTHERS, [len(RECORDS[key]) for key in OTHERS])[0] == [Outcome.HIT] * 40
        assert store(stack, KEYS) == [Outcome.STORED] * 40
        stack.drain(10)
        assert all(tier.contains(KEYS) == [True] * 40 for tier in tiers)
        stack.check()


def test_names_of_the_tenant_go_and_those_of_others_stay(tmp_path):
    with TierStack([Files(tmp_path)]) as stack:
        mine, other = (tenant_tag(each).join((b"r" * 16, b"t" * 8)) for each in (MINE, OTHER))
        NamesFile(tmp_path).add(
            ScopeName(mine, "mine"), ChainName(mine, [mine]), ScopeName(other, "other")
        )
        with (tmp_path / "names.jsonl").open("ab") as file:
            file.write(b'{"type":"scope","root":"' + tenant_tag(MINE))
        assert tag_of(mine) == tenant_tag(MINE)
        assert stack.purge("acme")["files"].is_complete
        assert found_in_files(tmp_path, tenant_tag(MINE)) == []
        assert found_in_files(tmp_path, tenant_tag(OTHER)) != []


def test_a_tenant_is_named_by_its_tenant_or_its_salt():
    assert tenant_tag(Scope(tenant="a", salt="x")) == tenant_tag(Scope(salt="a"))
    with TierStack([Host("1MiB")]) as stack, pytest.raises(ScopeError):
        stack.purge(1.5)


def test_a_tier_that_fails_or_may_not_be_written_is_not_complete(tmp_path):
    (tmp_path / "kv").mkdir()
    with TierStack([Host("1MiB"), Files(tmp_path / "kv")]) as stack:
        store(stack, KEYS)
        stack.drain(10)
        (tmp_path / "kv").rename(tmp_path / "elsewhere")
        (tmp_path / "kv").write_text("no directory")
        told = stack.purge(MINE)
        assert told["host"].is_complete
        assert not told["files"].is_complete
        assert told["files"].reason


class SlowStacked(Stacked):
    """A stack in virtual time whose tiers take time, so that a purge falls into the middle of calls."""

    def __init__(self, seconds):
        super().__init__("host", "disk", "remote")
        for tier, took_s in zip(self.tiers[1:], seconds, strict=True):
            tier.put_s, tier.get_s = took_s, took_s / 2


@given(
    computes=st.booleans(),
    seconds=st.tuples(*[st.sampled_from([0.0, 0.01, 0.3])] * 2),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "load", "prefetch", "evict", "feed", "wait", "forget"]),
            st.integers(0, 30),
            st.integers(1, 10),
        ),
        max_size=12,
    ),
)
@example(
    computes=False,
    seconds=(0.0, 0.0),
    steps=[("store", 0, 5), ("wait", 30, 1), ("forget", 0, 5), ("slow", 0, 1), ("load", 0, 5)],
)
@example(computes=True, seconds=(0.0, 0.0), steps=[("feed", 0, 5)])
@settings(max_examples=40)
def test_whatever_is_under_way_when_a_purge_begins_nothing_is_there_when_all_has_ended(
    seconds, computes, steps
):
    stacked = SlowStacked(seconds)
    stack, lanes = stacked.stack, stacked.lanes
    if computes:
        stack.feeding.engine_computes()  # jobs wait for it to rest
    for what, first, count in steps:
        keys = KEYS[first : first + count]
        sizes = [len(RECORDS[key]) for key in keys]
        if what == "store":
            store(stack, keys)
        elif what == "load":
            stack.load(keys, sizes, 0.05)
        elif what == "prefetch":
            stack.prefetch(keys, sizes)
        elif what == "slow":
            stacked.tiers[1].get_s = 1.0
        elif what == "forget":
            stacked.tiers[0].delete(keys)
        elif what == "evict":
            stack._placing.demote(stack._levels[0], keys, [RECORDS[key] for key in keys])
        elif what == "feed":
            stack.feeding.begin(keys, lambda keys=keys: store(stack, keys), 1)
        else:
            lanes.sleep(first / 100)
    store(stack, OTHERS[:3])
    told = stack.purge(MINE, 60.0)
    assert all(each.is_complete for each in told.values()), told
    lanes.sleep(30.0)
    stack.drain(10.0)
    assert [tier.contains(KEYS).count(True) for tier in stacked.tiers] == [0, 0, 0]
    assert all(tier.contains(OTHERS[:3]) == [True] * 3 for tier in stacked.tiers)
    store(stack, KEYS[:3])
    stack.drain(10.0)
    assert all(tier.contains(KEYS[:3]) == [True] * 3 for tier in stacked.tiers)
    stack.close()


@pytest.mark.ci
def test_threads_that_store_all_the_time_leave_nothing_that_they_stored_before(tmp_path):
    """Real threads: what was stored before the purge is gone, and others' is there."""
    with TierStack([Host("2MiB"), Disk(tmp_path, "8MiB")]) as stack:
        ends = threading.Event()
        stored = []

        def work(keys):
            while not ends.is_set():
                for start in range(0, len(keys), 4):
                    store(stack, keys[start : start + 4])
                stored.append(keys)

        threads = [
            threading.Thread(target=work, args=(keys,)) for keys in (KEYS[:20], KEYS[20:], OTHERS)
        ]
        for thread in threads:
            thread.start()
        while len(stored) < 3:
            pass
        stack.purge(MINE)
        ends.set()
        for thread in threads:
            thread.join()
        assert all(each.is_complete for each in stack.purge(MINE).values())
        stack.drain(10)
        assert all(tier.contains(KEYS) == [False] * 40 for tier in stack.tiers)
        assert all(tier.contains(OTHERS) == [True] * 40 for tier in stack.tiers)
        for needle in needles(KEYS):
            assert found_in_memory(stack.tiers[0], needle) + found_in_files(tmp_path, needle) == []


def test_buffers_that_held_a_purged_record_are_zeroed_idle_or_lent():
    folder = Path(tempfile.mkdtemp())
    with TierStack([Files(folder)]) as stack:
        idle, lent = stack.buffers([4096, 4096])
        for buffer in (idle, lent):
            buffer[:] = bytes(RECORDS[KEYS[0]][:1024]) * 4
        stack.give_back([idle])
        stack.purge(MINE)
        assert not any(idle)
        stack.give_back([lent])
        assert not any(lent)


def test_a_read_that_began_before_a_purge_keeps_nothing():
    stacked = Stacked("host", "disk")
    keys, disk = KEYS[:4], stacked.tiers[1]
    store(stacked.stack, keys)
    stacked.stack.drain(10.0)
    stacked.tiers[0].delete(keys)
    get = disk._get

    def late(*given):
        get(*given)
        stacked.lanes.sleep(1.0)

    disk._get = late
    stacked.stack.load(keys, [len(RECORDS[key]) for key in keys], 0.05)
    assert all(each.is_complete for each in stacked.stack.purge(MINE).values())
    stacked.lanes.sleep(5.0)
    assert [tier.contains(keys).count(True) for tier in stacked.tiers] == [0, 0]

"""Objects in a store: their contents, who finds them, and the cost in requests."""

import asyncio
import os
import shutil
import subprocess
import sys
import threading
import time

import obstore
import pytest
from objects_help import objects_of, rewrite, s3_front, s3_tier
from obstore.store import LocalStore, MemoryStore
from s3_server import denied

from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, names_of, record_of, records_of
from quire.tiers.format import new_buffer, record_bytes
from quire.tiers.objects import Objects
from quire.tiers.objects.names import bundle_name, burial_name, make_id, parse_name, short_of

HIT, STORED, PRESENT = Outcome.HIT, Outcome.STORED, Outcome.PRESENT
ABSENT, CORRUPT = Outcome.ABSENT, Outcome.CORRUPT


@pytest.fixture
def front():
    yield from s3_front()


@pytest.fixture
def store():
    return MemoryStore()


def pair(store, **settings):
    """Open one store twice, as two machines would; the second lists whenever it does not know."""
    return Objects(store, **settings), Objects(store, refresh_s=0)


def outcome_of(tier, key, payload_bytes=1000):
    buffer = new_buffer(record_bytes(payload_bytes))
    (outcome,) = tier.get([key], [buffer], timeout_s=10)
    assert outcome is not HIT or buffer == record_of(key, payload_bytes)
    return outcome


# who finds what


def test_another_process_finds_each_key_on_its_own(tmp_path):
    keys = names_of(range(45))
    with Objects(LocalStore(tmp_path)) as tier:
        assert tier.put(keys, records_of(keys), timeout_s=10) == [STORED] * 45
    code = (
        "import sys\n"
        "from obstore.store import LocalStore\n"
        "from quire.tiers.objects.tier import Objects\n"
        "from quire.tiers.format import new_buffer\n"
        "for key in map(bytes.fromhex, sys.argv[2:]):\n"
        "    buffer = new_buffer(1216)\n"
        "    print(*Objects(LocalStore(sys.argv[1])).get([key], [buffer], 10), bytes(buffer).hex())\n"
    )
    some = keys[::-7]
    command = [sys.executable, "-c", code, str(tmp_path), *map(bytes.hex, some)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.split() == [word for key in some for word in ("hit", bytes(record_of(key)).hex())]


@pytest.mark.ci
def test_a_process_that_leaves_its_tier_open_ends_as_any_other(tmp_path):
    with Objects(LocalStore(tmp_path)) as tier:
        tier.put(names_of(range(4)), records_of(names_of(range(4))), timeout_s=10)
    code = (
        "import sys\n"
        "from obstore.store import LocalStore\n"
        "from quire.tiers.objects.tier import Objects\n"
        "Objects(LocalStore(sys.argv[1])).contains([bytes.fromhex(sys.argv[2])], 10)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), name_of(0).hex()]
    ends = []
    for _ in range(12):  # obstore's threads come back to Python late where processors are busy
        children = [subprocess.Popen(command) for _ in range(4)]
        ends += [child.wait() for child in children]
    assert ends == [0] * 48


def test_a_running_tier_finds_what_another_wrote_since(store):
    writer, reader = pair(store)
    keys = names_of(range(3))
    assert reader.contains(keys) == [False] * 3
    for key in keys:
        writer.put([key], [record_of(key)])
        assert outcome_of(reader, key) is HIT


def test_records_of_other_writers_are_listed_at_most_once_per_refresh(front):
    writer = s3_tier(front.url, folder="throttle")
    reader = s3_tier(front.url, folder="throttle", refresh_s=30.0)
    with writer, reader:
        assert reader.contains([name_of(1)], 10) == [False]
        writer.put([name_of(1)], [record_of(name_of(1))], 10)
        front.requests.clear()
        assert outcome_of(reader, name_of(1)) is ABSENT
        assert front.requests == []
        reader._refresh_s = 0.05  # which have passed
        time.sleep(0.05)
        assert outcome_of(reader, name_of(1)) is HIT


def test_a_writer_whose_clock_is_hours_behind_is_found_by_readers_that_run(store):
    ahead = Objects(store, clock=lambda: time.time() + 7200)
    reader = Objects(store, refresh_s=0)
    ahead.put([name_of(1)], [record_of(name_of(1))])
    assert outcome_of(reader, name_of(1)) is HIT
    behind = Objects(store, clock=lambda: time.time() - 7200)
    behind.put([name_of(2)], [record_of(name_of(2))])
    assert outcome_of(reader, name_of(2)) is HIT


@pytest.mark.parametrize("clock", [lambda: 0.0, lambda: -5.0, lambda: 1e10])
def test_a_clock_that_is_nonsense_loses_no_record(store, clock):
    strange, reader = pair(store, clock=clock)
    for number in range(0, 4, 2):
        for tier, key in ((strange, name_of(number)), (reader, name_of(number + 1))):
            assert tier.put([key], [record_of(key)]) == [STORED]
    keys = names_of(range(4))
    with Objects(store) as later:
        assert later.contains(keys) == [True] * 4


def test_two_processes_that_write_a_key_at_once_leave_copies_that_a_deletion_reaches(store):
    one, other = pair(store)
    keys = names_of(range(3))
    one.contains(keys)
    other.put(keys, records_of(keys))
    assert one.put(keys[:2], records_of(keys[:2])) == [STORED] * 2, "it has not listed since"
    with Objects(store) as third:
        assert third.contains(keys) == [True] * 3
        assert third.stats().num_records == 3
        third.delete(keys[:1])
        third.check()
    other.contains([name_of(99)])
    for tier in (Objects(store), other):
        assert tier.contains(keys) == [False, True, True]
        tier.check()


def test_a_deletion_is_seen_by_processes_that_run_and_by_those_that_start(store):
    writer, reader = pair(store)
    keys = names_of(range(4))
    writer.put(keys, records_of(keys))
    assert reader.contains(keys) == [True] * 4
    writer.delete(keys[1:3])
    reader.contains([name_of(99)])
    assert reader.contains(keys) == [True, False, False, True]
    assert Objects(store).contains(keys) == [True, False, False, True]


def test_where_all_records_of_a_bundle_are_deleted_nothing_is_left(store):
    tier, other = pair(store)
    keys = names_of(range(4))
    tier.put(keys, records_of(keys))
    for key in keys[:3]:
        other.delete([key])
        tier.contains([name_of(99)])
    assert len(objects_of(other)) == 4
    other.delete(keys[3:])
    assert objects_of(other) == {}
    assert other.put(keys, records_of(keys)) == [STORED] * 4


def test_a_record_deleted_during_a_listing_does_not_come_back(store):
    tier = Objects(store, refresh_s=0)
    keys = names_of(range(2))
    tier.put(keys, records_of(keys))
    names = tier._client.names

    async def names_and_then(prefix, offset, see):
        seen = []
        await names(prefix, offset, lambda *each: seen.append(each))
        listed.set()
        await asyncio.to_thread(deleted.wait, 10)
        for each in seen:
            see(*each)

    listed, deleted = threading.Event(), threading.Event()
    tier._client.names = names_and_then
    listing = threading.Thread(target=lambda: tier.contains([name_of(99)], 10))
    listing.start()
    assert listed.wait(10)
    tier.delete(keys)
    deleted.set()
    listing.join()
    assert tier.contains(keys) == [False, False]
    assert tier.put(keys, records_of(keys)) == [STORED] * 2
    assert [outcome_of(tier, key) for key in keys] == [HIT] * 2
    tier.check()


def test_two_threads_that_delete_the_records_of_a_bundle_leave_nothing_of_it(store):
    tier = Objects(store)
    keys = names_of(range(2))
    tier.put(keys, records_of(keys))
    write = tier._client.write

    async def delete_before(path, content):
        tier._client.write = write
        await asyncio.to_thread(tier.delete, keys[1:])
        await write(path, content)

    tier._client.write = delete_before
    tier.delete(keys[:1])
    assert objects_of(tier) == {}
    tier.check()


def test_of_two_copies_only_the_damaged_one_is_dropped(store):
    one, other = pair(store)
    key, record = name_of(1), record_of(name_of(1))
    one.contains([key])
    assert other.put([key], [record]) == one.put([key], [record]) == [STORED]
    with Objects(store) as reader:
        assert reader.contains([key]) == [True]
        rewrite(reader, key, bytes(len(record)))
        assert [outcome_of(reader, key) for _ in range(2)] == [CORRUPT, HIT]


def test_an_object_that_expired_is_absent_and_may_be_put_again(store):
    tier = Objects(store)
    keys = names_of(range(3))
    tier.put(keys, records_of(keys))
    obstore.delete(store, list(objects_of(tier)))
    assert outcome_of(tier, keys[0]) is ABSENT
    assert tier.contains(keys) == [False] * 3
    assert tier.put(keys, records_of(keys)) == [STORED] * 3
    assert outcome_of(tier, keys[0]) is HIT
    tier.check()


# what lies there


def test_small_records_of_one_call_share_objects_by_size_and_large_ones_have_their_own(store):
    tier = Objects(store, bundle="1MiB")
    keys = names_of(range(60))
    sizes = [1000, 100_000, 2_000_000]
    records = [record_of(key, sizes[i % 3]) for i, key in enumerate(keys)]
    assert tier.put(keys, records) == [STORED] * 60
    counts = sorted(len(parse_name(path.split("/")[1]).shorts) for path in objects_of(tier))
    assert counts == [1] * 20 + [10, 10] + [20]
    buffers = buffers_like(records)
    assert Objects(store).get(keys, buffers, 10) == [HIT] * 60
    assert buffers == records


def test_names_say_what_they_were_made_of_and_fit_any_file_system():
    keys = names_of(range(20))
    name = bundle_name(make_id(1 << 43, 70_000, "0123abcd"), keys)
    assert len(name) < 250
    assert parse_name(name).shorts == tuple(short_of(key) for key in keys)
    assert parse_name(burial_name("0" * 23, "f" * 23, 0xFFFFF)).mask == 0xFFFFF


@pytest.mark.parametrize(
    "name",
    [
        "readme.txt",
        "0" * 23 + "." + "0" * 16 + ".AAAAAAAAA.kv",
        "0" * 23 + "." + "0" * 16 + "." + "A" * 210 + ".kv",
        "0" * 22 + "." + "0" * 16 + ".AAAAAAAAAA.kv",
        "0" * 23 + "." + "0" * 15 + ".AAAAAAAAAA.kv",
        "0" * 23 + "." + "0" * 16 + ".AAAAAAAAA+.kv",
        "0" * 23 + "." + "0" * 16 + ".AAAAAAAAAA.kv",
        "0" * 23 + "." + "0" * 23 + ".123456.x",
        "0" * 23 + "." + "0" * 23 + ".1.x",
    ],
)
def test_names_and_sizes_that_mean_nothing_are_passed_over(store, name):
    obstore.put(store, f"quire-2/{name}", b"rubbish")
    obstore.put(store, "else/where", b"rubbish")
    tier = Objects(store)
    assert tier.put([name_of(1)], [record_of(name_of(1))]) == [STORED]
    assert outcome_of(tier, name_of(1)) is HIT
    assert [entry.key for entry in tier.scan()] == [name_of(1)]
    assert tier.stats().num_records == 1


def test_an_object_whose_content_is_rubbish_is_corrupt_key_by_key_and_not_listed(store):
    tier = Objects(store)
    keys = names_of(range(3))
    tier.put(keys, records_of(keys))
    ((path, size),) = objects_of(tier).items()
    obstore.put(store, path, os.urandom(size))
    assert list(tier.scan()) == []
    assert outcome_of(tier, keys[1]) is CORRUPT
    assert tier.contains(keys) == [True, False, True]
    assert Objects(store).contains(keys) == [True, False, True]
    assert tier.get(keys, buffers_like(records_of(keys))) == [CORRUPT, ABSENT, CORRUPT]
    assert objects_of(tier) == {}


def test_a_truncated_bundle_gives_no_record(store):
    tier = Objects(store)
    keys = names_of(range(3))
    tier.put(keys, records_of(keys))
    rewrite(tier, keys[2], b"")
    assert tier.get(keys, buffers_like(records_of(keys))) == [CORRUPT] * 3
    assert tier.contains(keys) == [False] * 3


def test_keys_that_share_their_first_60_bits_are_never_taken_for_each_other(store):
    tier = Objects(store)
    key, other = name_of(1), name_of(1)[:8] + bytes(24)
    tier.put([key], [record_of(key)])
    assert outcome_of(tier, other) is CORRUPT, "the price of a collision is a miss"


def test_scan_raises_where_the_store_cannot_list(tmp_path):
    tier = Objects(LocalStore(tmp_path / "store", mkdir=True))
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("no directory")
    with pytest.raises(TierError):
        list(tier.scan())
    tier.close()
    with pytest.raises(TierError, match="closed"):
        list(tier.scan())


# what it costs


def test_requests_are_per_bundle_and_none_for_what_is_known(front):
    keys = names_of(range(32))
    records = records_of(keys, 64_000)
    with s3_tier(front.url, folder="costs") as tier:
        tier.put(keys, records, timeout_s=10)
        assert sorted(each.split()[0] for each in front.requests) == ["GET", "LIST", "PUT", "PUT"]
    with s3_tier(front.url, folder="costs") as tier:
        front.requests.clear()
        assert tier.contains(keys, timeout_s=10) == [True] * 32
        assert [each.split()[0] for each in front.requests] == ["LIST"]
        front.requests.clear()
        assert tier.contains(keys, timeout_s=10) == [True] * 32
        assert tier.put(keys, records, timeout_s=10) == [PRESENT] * 32
        assert front.requests == []
        assert tier.get(keys[5:30], buffers_like(records[5:30]), timeout_s=10) == [HIT] * 25
        assert [each.split()[0] for each in front.requests] == ["GET", "GET"]
        front.requests.clear()
        tier.delete(keys[:3], timeout_s=10)
        assert [each.split()[0] for each in front.requests] == ["PUT"]


def test_only_new_names_are_listed_again(front):
    keys = names_of(range(8))
    now = [time.time() - 3600]
    with s3_tier(front.url, folder="new", bundle="1KiB", clock=lambda: now[0]) as writer:
        writer.put(keys[:6], records_of(keys[:6]), timeout_s=10)
        now[0] += 3600
        writer.put(keys[6:], records_of(keys[6:]), timeout_s=10)
    seen = []
    with s3_tier(front.url, folder="new", refresh_s=0) as reader:
        learn = reader._index.learn
        reader._index.learn = lambda path, size: (seen.append(path), learn(path, size))[1]
        assert reader.contains([*keys, name_of(99)], timeout_s=10) == [True] * 8 + [False]
        assert len(seen) == 8
        seen.clear()
        reader.contains([name_of(99)], timeout_s=10)
        assert len(seen) == 2


def test_own_writes_do_not_hide_what_others_wrote_before_and_was_not_listed(front):
    now = [time.time() - 7200]
    folder = {"folder": "hidden", "clock": lambda: now[0]}
    writer, reader = s3_tier(front.url, **folder), s3_tier(front.url, **folder, refresh_s=0)
    with writer, reader:
        assert reader.contains([name_of(1)], 10) == [False]
        writer.put([name_of(1)], [record_of(name_of(1))], 10)
        now[0] += 7200
        with front.failing(denied, lambda handler: handler.is_listing):
            assert reader.put([name_of(2)], [record_of(name_of(2))], 0.8) == [STORED]
        assert outcome_of(reader, name_of(1)) is HIT

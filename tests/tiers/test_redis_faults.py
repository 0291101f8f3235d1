"""A real Redis that forgets, evicts, hangs, restarts, refuses: each is an outcome, and no byte is wrong."""

import os
import threading
import time

import pytest
from processes import SOON_S, wait_until
from redis_help import get, opening, the_server
from servers import running

from quire.errors import TierError
from quire.tiers.base import ListedRecord, Outcome
from quire.tiers.contract.samples import name_of, names_of, record_of, records_of
from quire.tiers.format import new_buffer
from quire.tiers.redis import Redis

HIT, ABSENT, CORRUPT, FULL = Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT, Outcome.FULL
STORED, PRESENT, ERROR, TIMEOUT = Outcome.STORED, Outcome.PRESENT, Outcome.ERROR, Outcome.TIMEOUT
MIB = 1 << 20


pytestmark = pytest.mark.system("redis-server")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def open_tier(server):
    with opening(server) as open_one:
        yield open_one


@pytest.fixture
def tier(open_tier):
    return open_tier()


# memory


def test_records_evicted_by_redis_are_absent_and_the_others_whole(tmp_path):
    limit = ("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    with running(tmp_path, *limit) as server, Redis(server.url) as tier:
        keys = names_of(range(150))
        for key in keys:
            assert tier.put([key], [record_of(key, 100_000)]) == [STORED]
        there = tier.contains(keys)
        outcomes = get(tier, keys, 100_000)
        assert set(outcomes) == {HIT, ABSENT}
        assert 20 < outcomes.count(HIT) < 80
        # The server draws a few records and evicts the oldest of these. Answers on their way take memory as well, so
        # reading may evict.
        assert outcomes[-40:].count(HIT) > outcomes[:40].count(HIT)
        assert all(there[i] for i, outcome in enumerate(outcomes) if outcome is HIT)
        assert tier.stats().capacity_bytes == 8 * MIB


@pytest.mark.ci
@pytest.mark.parametrize("payload_bytes", [1000, 200_000])
def test_a_put_of_what_is_there_counts_as_its_use_so_that_heads_stay_with_new_tails(
    tmp_path, payload_bytes
):
    limit = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    keys = names_of(range(4))
    with running(tmp_path, *limit) as server, Redis(server.url) as tier, server.client() as client:
        tier.put(keys[:2], records_of(keys[:2], payload_bytes))
        time.sleep(2.1)  # the server counts idle time in seconds
        head, *_ = tier._names(keys)
        assert client.object("idletime", head) >= 2
        outcomes = tier.put(keys, records_of(keys, payload_bytes))
        assert outcomes == [PRESENT, PRESENT, STORED, STORED]
        assert client.object("idletime", head) <= 1


def test_a_server_that_is_full_and_may_not_evict_says_full(tmp_path):
    limit = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with running(tmp_path, *limit) as server, Redis(server.url) as tier:
        keys = names_of(range(100))
        outcomes = tier.put(keys, records_of(keys, 100_000))
        stored = outcomes.count(STORED)
        assert outcomes == [STORED] * stored + [FULL] * (100 - stored)
        assert 40 < stored < 90
        assert get(tier, keys, 100_000) == [HIT] * stored + [ABSENT] * (100 - stored)
        tier.delete(keys[:5])
        assert tier.put(keys[-1:], records_of(keys[-1:], 100_000)) == [STORED]


# time


def test_a_record_ends_with_its_time_to_live(open_tier):
    tier = open_tier(ttl_s=2.0)
    keys = names_of(range(2))
    tier.put(keys, [record_of(keys[0]), record_of(keys[1], MIB)])
    assert tier.contains(keys) == [True, True]
    wait_until(lambda: get(tier, keys[:1]) == [ABSENT], "the end of a record")
    wait_until(lambda: tier.contains(keys) == [False, False], "the end of both")


@pytest.mark.parametrize("payload_bytes", [1000, MIB])
@pytest.mark.parametrize("renew", ["touch", "put"])
def test_a_use_and_another_put_renew_the_time_to_live(server, open_tier, renew, payload_bytes):
    tier = open_tier(ttl_s=60)
    key = name_of(1)
    tier.put([key], [record_of(key, payload_bytes)])
    with server.client() as client:
        client.pexpire(tier._names([key])[0], 5000)
        if renew == "touch":
            tier.touch([key, name_of(2)])
        else:
            assert tier.put([key], [record_of(key, payload_bytes)]) == [PRESENT]
        assert client.pttl(tier._names([key])[0]) > 50_000


def test_without_a_time_to_live_a_record_stays(server, tier):
    tier.put([name_of(1)], [record_of(name_of(1))])
    tier.touch([name_of(1)])
    with server.client() as client:
        assert client.pttl(tier._names([name_of(1)])[0]) == -1


# traffic


@pytest.mark.parametrize("words", [{}, {"ttl_s": 60}])
def test_a_large_record_that_is_there_is_not_sent_again(server, open_tier, words):
    tier = open_tier(**words)
    keys = names_of(range(8))
    records = records_of(keys, MIB)
    tier.put(keys, records)
    before = received(server)
    assert tier.put(keys, records) == [PRESENT] * 8
    assert received(server) - before < 10_000


def received(server):
    with server.client() as client:
        return client.info("stats")["total_net_input_bytes"]


@pytest.mark.ci
def test_many_records_go_over_one_connection_without_either_side_waiting_for_the_other(open_tier):
    tier = open_tier(connections=1)
    keys = names_of(range(40))
    assert tier.put(keys, records_of(keys, MIB), timeout_s=20) == [STORED] * 40
    assert get(tier, keys, MIB, timeout_s=20) == [HIT] * 40
    many = names_of(range(1000, 4000))
    assert tier.put(many, records_of(many, 100), timeout_s=20) == [STORED] * 3000
    assert get(tier, many, 100, timeout_s=20) == [HIT] * 3000
    assert tier.contains(many, timeout_s=20) == [True] * 3000
    assert len(the_server(tier)._idle) == 1


# connections


def test_a_server_that_is_gone_is_an_error_with_a_reason_until_it_is_back_and_empty(server, tier):
    keys = names_of(range(2))
    tier.put(keys, records_of(keys))
    with server.gone():
        assert tier.put(keys, records_of(keys)) == [ERROR] * 2
        assert "refused" in tier.last_failure
        assert get(tier, keys) == [ERROR] * 2
        tier.touch(keys)
        with pytest.raises(TierError, match="refused"):
            list(tier.scan())
    assert get(tier, keys) == [ABSENT] * 2
    assert tier.put(keys, records_of(keys)) == [STORED] * 2
    assert get(tier, keys) == [HIT] * 2


def test_a_late_answer_is_never_taken_for_the_answer_to_a_later_question(server, open_tier):
    tier = open_tier(connections=1)
    keys = names_of(range(6))
    tier.put(keys, records_of(keys))
    with server.hanging():
        for key in keys[:3]:
            assert get(tier, [key], timeout_s=0.03) == [TIMEOUT]
        assert len(the_server(tier)._idle) == 0
    assert get(tier, keys[3:]) == [HIT] * 3
    assert get(tier, keys) == [HIT] * 6


def test_a_server_that_hangs_in_the_middle_of_a_record_costs_the_timeout(server, tier):
    keys = names_of(range(30))
    with server.hanging():
        began = time.monotonic()
        outcomes = tier.put(keys, records_of(keys, MIB), timeout_s=0.3)
        took = time.monotonic() - began
    assert outcomes == [TIMEOUT] * 30
    assert 0.25 < took < SOON_S


def test_threads_wait_in_turn_for_few_connections(open_tier):
    tier = open_tier(connections=2)
    keys = names_of(range(16))
    tier.put(keys, records_of(keys, 50_000))
    wrong = []

    def work(number):
        for _ in range(8):
            wrong.extend(each for each in get(tier, keys[number:], 50_000) if each is not HIT)

    run_in_threads(work, 12)
    assert wrong == []
    assert len(the_server(tier)._idle) <= 2


def test_a_thread_waits_for_a_connection_no_longer_than_its_timeout(server, open_tier):
    tier = open_tier(connections=1)
    with server.hanging():
        slow = threading.Thread(target=get, args=(tier, [name_of(1)], 1000, 60.0))
        slow.start()
        wait_until(lambda: not the_server(tier)._idle, "the only connection is in use")
        began = time.monotonic()
        assert get(tier, [name_of(2)], timeout_s=0.1) == [TIMEOUT]
        assert time.monotonic() - began < SOON_S
    slow.join()


def test_a_server_killed_under_traffic_gives_misses_and_no_wrong_byte(server, tier):
    keys = names_of(range(20))
    seen, errors = set(), []
    done = threading.Event()

    def work(number):
        while not done.is_set():
            try:
                seen.update(tier.put(keys[number:], records_of(keys[number:], 30_000)))
                seen.update(get(tier, keys, 30_000))
            except BaseException as error:
                errors.append(error)
                raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            seen.discard(HIT)
            wait_until(lambda: HIT in seen or errors, "a hit of a server that runs")
            with server.gone():
                seen.discard(ERROR)
                wait_until(lambda: ERROR in seen or errors, "an error of one that is gone")
    finally:
        done.set()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert seen <= {HIT, STORED, PRESENT, ABSENT, ERROR}


def test_a_forked_process_takes_no_answers_of_its_parent(tier):
    keys = names_of(range(10))
    tier.put(keys, records_of(keys))
    before = own_port(tier)
    child = os.fork()
    if child == 0:
        fine = get(tier, keys) == [HIT] * 10 and own_port(tier) != before
        os._exit(0 if fine else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0
    assert get(tier, keys) == [HIT] * 10
    assert own_port(tier) == before


def own_port(tier):
    (link,) = the_server(tier)._idle
    return link._socket.getsockname()[1]


# values that are none


def test_a_value_of_another_type_is_corrupt_and_dropped(server, tier):
    key = name_of(1)
    with server.client() as client:
        client.rpush(tier._names([key])[0], "a", "b")
    assert list(tier.scan()) == []
    assert get(tier, [key, name_of(2)]) == [CORRUPT, ABSENT]
    assert get(tier, [key]) == [ABSENT]
    assert tier.put([key], [record_of(key)]) == [STORED]


@pytest.mark.parametrize("num_bytes", [100_000, 40 * MIB])
def test_a_value_that_is_far_too_long_is_dropped_and_its_neighbours_are_found(
    server, tier, num_bytes
):
    keys = names_of(range(5))
    tier.put(keys, records_of(keys))
    with server.client() as client:
        client.set(tier._names(keys)[2], bytes(num_bytes))
    assert get(tier, keys) == [HIT, HIT, CORRUPT, HIT, HIT]
    assert tier.contains(keys) == [True, True, False, True, True]


def test_a_buffer_shorter_than_a_header_reads_nothing_and_drops_nothing(tier):
    key = name_of(1)
    tier.put([key], [record_of(key)])
    assert tier.get([key], [new_buffer(64)]) == [Outcome.FOREIGN]
    assert get(tier, [key]) == [HIT]


@pytest.mark.parametrize(
    "value",
    [
        bytes(record_of(name_of(2), 5000)),
        bytes(record_of(name_of(2), 100)),
        bytes(record_of(name_of(1), 5000)) + b"more",
        bytes(record_of(name_of(1), 5000))[:-64],
        bytes(record_of(name_of(1), 100))[:-1],
    ],
    ids=["longer, of another", "shorter, of another", "too long", "cut", "cut and short"],
)
def test_a_value_of_another_length_is_dropped_unless_it_is_this_keys_whole_record(
    server, tier, value
):
    key = name_of(1)
    with server.client() as client:
        client.set(tier._names([key])[0], value)
    assert get(tier, [key]) == [CORRUPT]
    assert get(tier, [key]) == [ABSENT]


# whose keys


def test_a_record_that_another_deletes_while_it_is_put_again_is_stored(tier):
    key, record = name_of(1), record_of(name_of(1))
    keep_present = tier._keep_present

    def delete_before(*args):
        tier.delete([key])
        return keep_present(*args)

    assert tier.put([key], [record]) == [STORED]
    tier._keep_present = delete_before
    assert tier.put([key], [record]) == [STORED]
    assert get(tier, [key]) == [HIT]


def test_prefixes_do_not_see_each_other(open_tier):
    first, second = open_tier(prefix="a[b]*?:"), open_tier(prefix="a[b]*??:")
    first.put([name_of(1)], [record_of(name_of(1))])
    second.put([name_of(2)], [record_of(name_of(2), 5000)])
    assert get(first, names_of([1, 2])) == [HIT, ABSENT]
    assert list(first.scan()) == [ListedRecord(name_of(1), len(record_of(name_of(1))))]
    assert list(second.scan()) == [ListedRecord(name_of(2), len(record_of(name_of(2), 5000)))]


def test_keys_of_others_are_not_listed(server, tier):
    with server.client() as client:
        for name in (b"other", tier._prefix + b"z" * 64, tier._prefix + b"a" * 63):
            client.set(name, b"1")
    tier.put([name_of(1)], [record_of(name_of(1))])
    assert [entry.key for entry in tier.scan()] == [name_of(1)]


def test_a_thousand_records_are_listed_once_each(tier):
    keys = names_of(range(1500))
    tier.put(keys, records_of(keys, 10))
    assert sorted(entry.key for entry in tier.scan()) == sorted(keys)


def run_in_threads(work, num_threads):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()

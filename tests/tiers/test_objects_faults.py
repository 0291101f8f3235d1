"""An object store that fails, and settings that cannot be: misses and reasons, never wrong bytes."""

import os
import time

import pytest
from objects_help import objects_of, s3_front, s3_server, s3_tier
from processes import SOON_S, forked, free_port, wait_until
from s3_server import (
    CONFIG,
    denied,
    flipped_bit,
    half,
    hanging,
    late,
    overloaded,
    rubbish,
    short,
)

from quire.errors import ConfigError, TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, names_of, record_of, records_of
from quire.tiers.format import new_buffer
from quire.tiers.objects import Objects

HIT, STORED, ABSENT = Outcome.HIT, Outcome.STORED, Outcome.ABSENT
TIMEOUT, ERROR, CORRUPT = Outcome.TIMEOUT, Outcome.ERROR, Outcome.CORRUPT

KEYS = names_of(range(4))
RECORDS = records_of(KEYS, 30_000)


@pytest.fixture(scope="module")
def front():
    yield from s3_front()


@pytest.fixture
def tier(front):
    """Give a tier that knows four records, in one bundle."""
    with s3_tier(front.url) as tier:
        assert tier.put(KEYS, RECORDS, timeout_s=10) == [STORED] * 4
        front.requests.clear()
        yield tier
        tier.check()


def get(tier, keys=KEYS, timeout_s=0.4):
    """Get records; assert that hits are right and that the deadline held."""
    buffers = [new_buffer(len(RECORDS[0])) for _ in keys]
    began = time.monotonic()
    outcomes = tier.get(keys, buffers, timeout_s=timeout_s)
    assert time.monotonic() - began < timeout_s + SOON_S
    for key, outcome, buffer in zip(keys, outcomes, buffers, strict=True):
        assert outcome is not HIT or buffer == record_of(key, 30_000)
    return outcomes


def reading(handler):
    return handler.is_reading


@pytest.mark.parametrize(
    ("fault", "outcomes"),
    [
        (overloaded, {TIMEOUT, ERROR}),
        (denied, {ERROR}),
        (hanging, {TIMEOUT}),
        (late, {TIMEOUT}),
        (half, {TIMEOUT, ERROR}),
        (short, {TIMEOUT, ERROR}),
        (rubbish, {TIMEOUT, ERROR, CORRUPT}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_reads_that_fail_are_misses_within_the_deadline_and_the_records_stay(
    front, tier, fault, outcomes
):
    with front.failing(fault, reading):
        assert set(get(tier, timeout_s=20 if outcomes == {ERROR} else 0.4)) <= outcomes
    assert tier.stats().outcomes.get("hit") is None
    assert get(tier, timeout_s=10) == [HIT] * 4


def test_a_bit_that_turns_on_the_way_is_corrupt_and_the_others_of_the_bundle_are_hits(front, tier):
    with front.failing(flipped_bit, reading):
        assert get(tier, timeout_s=10) == [HIT, HIT, CORRUPT, HIT]
    assert get(tier, timeout_s=10) == [HIT, HIT, ABSENT, HIT]


def test_an_overload_that_ends_before_the_deadline_is_waited_out(front, tier):
    times = []

    def twice(handler):
        times.append(handler.path)
        return handler.is_reading and len(times) <= 2

    with front.failing(overloaded, twice):
        assert get(tier, timeout_s=10) == [HIT] * 4
    assert len(times) == 3


def is_quiet(front):
    """Whether no request comes for as long as several retries take."""
    front.requests.clear()
    time.sleep(0.6)
    return front.requests == []


def test_retries_end_with_the_deadline(front, tier):
    with front.failing(overloaded):
        get(tier, timeout_s=0.3)
        wait_until(lambda: is_quiet(front), "the end of retries")


def test_an_answer_that_comes_too_late_does_not_touch_the_buffer(front, tier):
    buffers = [memoryview(bytearray(b"\xee" * len(RECORDS[0]))) for _ in KEYS]
    with front.failing(late, reading):
        assert tier.get(KEYS, buffers, timeout_s=0.1) == [TIMEOUT] * 4
        time.sleep(0.8)
    assert all(bytes(buffer) == b"\xee" * len(buffer) for buffer in buffers)


def test_a_request_that_hangs_holds_up_no_other(front, tier):
    others = names_of(range(10, 14))
    tier.put(others, records_of(others, 30_000), timeout_s=10)
    slow = tier._index.find(KEYS[0])[0].path
    with front.failing(hanging, lambda handler: slow in handler.path):
        expected = [TIMEOUT] * 4 + [HIT] * 4
        # The others come at once, and on a busy machine a little later.
        assert any(get(tier, [*KEYS, *others], each) == expected for each in (0.4, 4.0, 20.0))


@pytest.mark.parametrize("fault", [overloaded, denied, hanging, rubbish])
def test_writes_that_fail_are_not_found_in_this_process_and_never_wrong_in_another(front, fault):
    with s3_tier(front.url, folder=f"writes-{fault.__name__}") as tier:
        tier.contains(KEYS, timeout_s=10)
        with front.failing(fault, lambda handler: handler.command == "PUT"):
            began = time.monotonic()
            assert set(tier.put(KEYS, RECORDS, timeout_s=0.4)) <= {TIMEOUT, ERROR}
            assert time.monotonic() - began < SOON_S
        assert {tier._index.find(key) for key in KEYS} == {None}
        assert set(get(tier, timeout_s=10)) <= {HIT, ABSENT}
    with s3_tier(front.url, folder=f"writes-{fault.__name__}") as other:
        assert set(get(other, timeout_s=10)) <= {HIT, ABSENT}


@pytest.mark.ci
@pytest.mark.parametrize("fault", [overloaded, denied, hanging, half])
def test_where_listing_fails_known_keys_are_hits_and_others_are_not_called_absent(
    front, tier, fault
):
    keys = [*KEYS, name_of(99)]
    tier._refresh_s = 0.0
    with front.failing(fault, lambda handler: handler.is_listing):
        *known, unknown = get(tier, keys, timeout_s=2.0)
        assert known == [HIT] * 4
        assert unknown in (TIMEOUT, ERROR)
        assert tier.contains(keys, timeout_s=0.3) == [True] * 4 + [False]
        assert tier.put(keys[4:], [record_of(keys[4])], timeout_s=2) == [STORED]
    counted = tier.stats().outcomes
    assert counted.get("timeout", 0) + counted.get("error", 0) == 2


def test_a_listing_that_reads_as_empty_forgets_nothing(front, tier):
    with front.failing(rubbish, lambda handler: handler.is_listing):
        tier._refresh_s = 0.0
        assert get(tier, [*KEYS, name_of(99)], timeout_s=20) == [HIT] * 4 + [ABSENT]


def test_a_listing_that_hangs_is_not_waited_for_by_later_calls_forever(front):
    with s3_tier(front.url, folder="hanging-list") as tier:
        with front.failing(hanging):
            assert get(tier, KEYS[:1], timeout_s=0.2) == [TIMEOUT]
        assert get(tier, KEYS[:1], timeout_s=10) == [ABSENT]


def test_a_bucket_that_is_missing_is_an_error_with_its_reason():
    config = {**CONFIG, "endpoint": s3_server().url}
    with Objects("s3://missing/x", config=config) as tier:
        assert get(tier, timeout_s=2) == [ERROR] * 4
        assert tier.put(KEYS, RECORDS, timeout_s=2) == [ERROR] * 4
        assert tier.contains(KEYS, timeout_s=2) == [False] * 4
        tier.delete(KEYS, timeout_s=2)
        assert "NoSuchBucket" in tier.last_failure or "not found" in tier.last_failure.lower()
        assert tier.last_failure in repr(tier)
        with pytest.raises(TierError):
            list(tier.scan())


def test_a_server_that_is_not_there_is_an_error_or_a_timeout():
    with s3_tier(f"http://127.0.0.1:{free_port()}") as tier:
        assert set(get(tier)) <= {ERROR, TIMEOUT}
        assert set(tier.put(KEYS, RECORDS, timeout_s=0.3)) <= {ERROR, TIMEOUT}


def test_a_bundle_that_disappears_is_absent(front, tier):
    paths = list(objects_of(tier))
    tier._client.wait(lambda: tier._client.remove(paths), time.monotonic() + 5)
    assert get(tier, timeout_s=5) == [ABSENT] * 4


def test_records_that_change_after_a_put_gave_up_are_not_what_is_stored(front):
    records = [memoryview(bytearray(record)) for record in RECORDS]
    with s3_tier(front.url, folder="reused") as tier, front.failing(late):
        assert tier.put(KEYS, records, timeout_s=0.2) == [TIMEOUT] * 4
        for record in records:
            record[:] = bytes(len(record))
        time.sleep(0.8)
    with s3_tier(front.url, folder="reused") as other:
        assert set(get(other, timeout_s=10)) <= {HIT, ABSENT}


def test_closing_while_calls_wait_ends_in_time(front):
    tier = s3_tier(front.url)
    with front.failing(hanging):
        tier.put(KEYS, RECORDS, timeout_s=0.1)
        began = time.monotonic()
        tier.close()
        assert time.monotonic() - began < SOON_S


# opening


@pytest.mark.parametrize(
    ("url", "settings", "reason"),
    [
        ("nowhere://bucket", {}, "nowhere"),
        ("bucket", {}, "bucket"),
        ("s3://", {}, "s3://"),
        ("az://container", {}, r"give account_name, az://container/path.account_name=mine"),
        ("https://example.com/x", {}, "web server"),
        ("file:///mnt/kv", {}, "for a directory of files: files:/mnt/kv"),
        ("s3://b", {"config": {"nonsense": "1"}}, "nonsense"),
        ("s3://b", {"client_options": {"nonsense": 1}}, "nonsense"),
        ("s3://b", {"config": {"allow_http": "perhaps"}}, "as boolean; client options: allow_http"),
        ("s3://b", {"config": {"timeout": "1s"}, "client_options": {"timeout": "2s"}}, "twice"),
        ("s3://b", {"config": {"endpoint": 5}}, "not an instance of 'str'"),
        ("memory://", {"config": {"region": "x"}}, "not remote"),
        ("memory://", {"bundle": "many"}, "not a size"),
        ("memory://", {"concurrency": 0}, "concurrency must be from 1"),
        ("memory://", {"refresh_s": -1.0}, "refresh_s is -1.0"),
        ("memory://", {"refresh_s": float("nan")}, "refresh_s is nan"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_reason(url, settings, reason):
    with pytest.raises(ConfigError, match=reason):
        Objects(url, **settings)


def test_no_record_of_a_call_with_many_bundles_is_lost_where_requests_are_few(front):
    keys = names_of(range(100, 160))
    records = records_of(keys, 30_000)
    with s3_tier(front.url, concurrency=2, bundle="64KiB") as tier:
        assert tier.put(keys, records, timeout_s=20) == [STORED] * 60
        buffers = buffers_like(records)
        assert tier.get(keys, buffers, timeout_s=20) == [HIT] * 60
        assert buffers == records


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_process_has_no_part_in_the_tier_and_is_told_so_at_once():
    with Objects("memory://") as tier:
        tier.put(KEYS, RECORDS)

        def use_and_close():
            began = time.monotonic()
            assert tier.get(KEYS, buffers_like(RECORDS), timeout_s=60) == [ERROR] * 4
            assert tier.put(KEYS, RECORDS, timeout_s=60) == [ERROR] * 4
            with pytest.raises(TierError, match=f"process {os.getppid()}, from which this one"):
                list(tier.scan())
            tier.close()
            tier.close()
            assert time.monotonic() - began < SOON_S

        assert forked(use_and_close) == 0
        assert tier.get(KEYS, buffers_like(RECORDS)) == [HIT] * 4

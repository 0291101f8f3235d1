"""Objects of others beside the records, under any name that a store takes: they are passed over, and end no listing."""

import http.client
import time
from urllib.parse import quote

import obstore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from objects_help import s3_server, s3_tier
from obstore.store import LocalStore, MemoryStore

from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, names_of, records_of
from quire.tiers.objects import Objects
from quire.tiers.objects.listing import PREFIX
from quire.tiers.objects.names import bundle_name, burial_name, make_id

KEYS = names_of(range(4))
RECORDS = records_of(KEYS)
HIT, STORED = Outcome.HIT, Outcome.STORED

LIKE_OURS = bundle_name(make_id(1, 1, "00000000"), KEYS[:1])
BURIAL = burial_name(make_id(1, 2, "00000000"), make_id(1, 1, "00000000"), 1)
NAMES = [
    "a//b",
    "/",
    "//",
    f"/{LIKE_OURS}",
    f"a//{LIKE_OURS}",
    "./x",
    "../x",
    "f/./x",
    "f/..",
    "a\x01b",
    "\x1f",
    "f\x7f",
    "folder/",
    f"{LIKE_OURS}/",
    f"folder/{LIKE_OURS}",
    f"folder/{BURIAL}",
    "a%2Fb",
    "%2e%2e",
    "n" * 900,
    "é/ü 漢字",
    "a+b c?d#e",
    LIKE_OURS[:-1],
    LIKE_OURS.replace(".", "..", 1),
    BURIAL.upper(),
    "",
]
SEGMENTS = st.sampled_from(["", ".", "..", "a", "f", "\x02", "é", "%2F", LIKE_OURS[:30], BURIAL])
DRAWN = st.lists(SEGMENTS, min_size=1, max_size=4).map("/".join)


def put_raw(folder, name, *, may_be_refused=False):
    """Put an object by plain HTTP, under any name."""
    connection = http.client.HTTPConnection("127.0.0.1", s3_server().port, timeout=30)
    try:
        path = quote(f"/quire/{folder}/{PREFIX}/{name}", safe="/-_~")
        connection.request("PUT", path.replace(".", "%2E"), b"foreign")
        status = connection.getresponse().status
        assert status == 200 or may_be_refused, status
    finally:
        connection.close()


def assert_served(folder):
    """Assert that a process that starts here finds, lists and deletes all records, and stores more."""
    with s3_tier(s3_server().url, folder=folder, refresh_s=0.0) as tier:
        buffers = buffers_like(RECORDS)
        assert tier.get(KEYS, buffers, 10) == [HIT] * len(KEYS), tier.last_failure
        assert buffers == RECORDS
        assert sorted(entry.key for entry in tier.scan()) == sorted(KEYS)
        more = names_of([time.monotonic_ns()])
        assert tier.put(more, records_of(more), 10) == [STORED]
        assert tier.contains([*more, bytes(32)], 10) == [True, False]
        assert tier.last_failure == ""
        tier.delete(more, 10)
        assert tier.contains(more, 10) == [False]
        tier.check()
        return tier._client.num_refused


def stored(folder):
    with s3_tier(s3_server().url, folder=folder, bundle="4KiB") as tier:
        assert tier.put(KEYS, RECORDS, 10) == [STORED] * len(KEYS)


@pytest.mark.cases(6)
@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:24]))
def test_a_foreign_object_ends_no_listing(name):
    folder = f"foreign-{NAMES.index(name)}"
    stored(folder)
    put_raw(folder, name)
    assert_served(folder)


def test_refused_names_are_counted_and_said_once(caplog):
    stored("counted")
    for name in ("a//b", "../x", "c//d", "whole"):
        put_raw("counted", name)
    assert assert_served("counted") == 3
    assert sum("3 objects beside the records" in line for line in caplog.messages) == 1


@settings(max_examples=8, deadline=None)
@given(names=st.lists(DRAWN, min_size=1, max_size=4))
def test_any_foreign_objects_end_no_listing(names):
    folder = f"drawn-{time.monotonic_ns()}"
    stored(folder)
    for name in names:
        put_raw(folder, name, may_be_refused=True)  # moto's server does, some
    assert_served(folder)


def test_a_store_that_cannot_be_listed_past_a_name_says_which(monkeypatch):
    stored("unsigned")
    put_raw("unsigned", "a//b")
    monkeypatch.setattr("quire.tiers.objects.client.is_listable", lambda _: False)
    tier = s3_tier(s3_server().url, folder="unsigned")
    with tier, pytest.raises(TierError, match=r"a//b.*delete it"):
        list(tier.scan())


@pytest.mark.parametrize("kind", ["memory", "local"])
def test_foreign_objects_of_other_stores_end_no_listing(kind, tmp_path):
    store = MemoryStore() if kind == "memory" else LocalStore(tmp_path)
    with Objects(store) as tier:
        assert tier.put(KEYS, RECORDS, 10) == [STORED] * len(KEYS)
        for name in ("a%2Fb", "é", f"folder/{LIKE_OURS}", "n" * 200, LIKE_OURS[:-1]):
            obstore.put(store, f"{PREFIX}/{name}", b"foreign")
        if kind == "local":
            for name in ("a\x01b", "a b", "%2e%2e"):
                (tmp_path / PREFIX / name).write_bytes(b"foreign")
    with Objects(store) as tier:
        assert tier.get(KEYS, buffers_like(RECORDS), 10) == [HIT] * len(KEYS), tier.last_failure
        assert len(list(tier.scan())) == len(KEYS)

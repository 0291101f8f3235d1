"""Block hashes are a published format: they never change."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import CacheManager, MediaItem, Scope, block_hashes
from quire.exchange import BlockStored
from quire.exchange.hashing import tag_of, tenant_tag
from watching import take_events, watchers

VECTORS = json.loads(Path(__file__).with_name("block_hashes.json").read_text(encoding="utf-8"))


def media_of(vector):
    return tuple(
        MediaItem(bytes.fromhex(item["digest"]), item["start"], item["length"])
        for item in vector["media"]
    )


@pytest.mark.parametrize("vector", VECTORS)
def test_hashes_equal_the_published_vectors(vector):
    digests = block_hashes(
        vector["tokens"], vector["block_size"], Scope(**vector["scope"]), media_of(vector)
    )
    assert [digest.hex() for digest in digests] == vector["hashes"]


@pytest.mark.parametrize("vector", VECTORS)
def test_stored_events_carry_the_published_hashes(vector):
    manager = CacheManager(64, vector["block_size"], watchers=watchers(events=True))
    other = np.arange(1000, 1020)
    for tokens, media in ((other, ()), (vector["tokens"], media_of(vector))):
        seq = manager.open(tokens, Scope(**vector["scope"]), media=media)
        manager.reserve(seq, len(tokens))
        for token in tokens:  # one by one, so that blocks are published one by one
            manager.commit(seq, [token])
        manager.close(seq)
    stored = [event for event in take_events(manager) if isinstance(event, BlockStored)]
    digests = [digest.hex() for event in stored for digest in event.block_hashes]
    assert digests[-len(vector["hashes"]) :] == vector["hashes"]


def test_scope_parts_are_not_joined():
    tokens = np.arange(16)
    scopes = [
        Scope(),
        Scope(salt="ab"),
        Scope(lora="ab"),
        Scope(lora="a", salt="b"),
        Scope(salt=b"ab"),
        Scope(salt=""),
        Scope(salt=1),
        Scope(salt="1"),
        Scope(tenant="ab"),
        Scope(tenant="ab", salt="ab"),
        Scope(tenant="a", salt="b"),
        Scope(tenant=b"ab"),
    ]
    assert len({block_hashes(tokens, 16, scope)[0] for scope in scopes}) == len(scopes)


PARTS = st.one_of(st.none(), st.text(max_size=3), st.binary(max_size=3), st.integers(-3, 3))


@given(st.tuples(*[PARTS] * 4), st.tuples(*[PARTS] * 4), st.integers(1, 5))
def test_every_hash_carries_the_tag_of_its_tenant_alone(one, two, block_size):
    first, second = Scope(*one), Scope(*two)
    tokens = np.arange(11)
    hashes = block_hashes(tokens, block_size, first)
    assert {tag_of(each) for each in hashes} == {tenant_tag(first)}
    tenants = [each.salt if each.tenant is None else each.tenant for each in (first, second)]
    is_one = tenants[0] == tenants[1] and type(tenants[0]) is type(tenants[1])
    assert (tenant_tag(first) == tenant_tag(second)) is is_one
    assert (tenant_tag(first) == bytes(8)) is (tenants[0] is None)
    others = block_hashes(tokens, block_size, second)
    for part in (slice(0, 16), slice(24, 32)):  # the tag leaves enough of the hash on both sides
        assert (hashes[0][part] == others[0][part]) is (
            first == second and repr(first) == repr(second)
        )
    assert len({each[24:] for each in hashes}) == len(hashes)


def test_a_hash_names_the_whole_prefix_and_only_that():
    one = block_hashes(np.arange(48), 16)
    other = np.arange(48)
    other[0] = 99
    assert all(a != b for a, b in zip(one, block_hashes(other, 16), strict=True))
    assert block_hashes(np.arange(40), 16) == one[:2]

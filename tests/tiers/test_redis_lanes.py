"""One call over two connections: faster, and no promise of the tier is weaker for it."""

import time

import pytest
from redis_help import get, opening
from servers import running

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import names_of, records_of

HIT, ABSENT, CORRUPT, TIMEOUT = Outcome.HIT, Outcome.ABSENT, Outcome.CORRUPT, Outcome.TIMEOUT
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


def num_open(tier):
    return tier._routes._node._num_open


def test_large_values_come_over_two_connections_and_small_ones_over_one(open_tier):
    tier = open_tier()
    few, many = names_of(range(6)), names_of(range(10, 43))
    tier.put(few, records_of(few))
    tier.put(many, records_of(many, 100_000))
    assert get(tier, few) == [HIT] * 6
    assert num_open(tier) == 1
    absent = names_of(range(50, 60))
    mixed = [key for pair in zip(many, absent, strict=False) for key in pair]
    assert get(tier, many, 100_000) == [HIT] * 33
    assert get(tier, mixed, 100_000) == [HIT, ABSENT] * 10
    assert get(tier, many[:2], 100_000) == [HIT] * 2
    assert num_open(tier) == 2


def test_a_call_takes_a_second_connection_only_while_half_are_free(open_tier):
    tier = open_tier(connections=3)
    keys = names_of(range(8))
    tier.put(keys, records_of(keys, 200_000))
    assert get(tier, keys, 200_000) == [HIT] * 8
    assert num_open(tier) == 1


def test_a_server_that_takes_no_second_client_gives_all_over_the_first(server, tier):
    keys = names_of(range(8))
    tier.put(keys, records_of(keys, 200_000))
    with server.client() as client:
        client.config_set("maxclients", len(client.client_list()))
        try:
            assert get(tier, keys, 200_000) == [HIT] * 8
            assert num_open(tier) == 1
        finally:
            client.config_set("maxclients", 1000)


@pytest.mark.parametrize("place", range(4))
def test_what_waits_on_the_other_connection_is_never_the_answer_to_a_later_question(
    server, tier, place
):
    keys = names_of(range(6))
    tier.put(keys, records_of(keys, 300_000))
    assert get(tier, keys, 300_000) == [HIT] * 6
    before = own_ports(tier)
    with server.client() as client:
        client.set(tier._names(keys)[place], bytes(40 * MIB))
    expected = [HIT] * 6
    expected[place] = CORRUPT
    assert get(tier, keys, 300_000) == expected
    assert not before & own_ports(tier)
    expected[place] = ABSENT
    assert get(tier, keys, 300_000) == expected


def test_a_server_that_hangs_costs_one_timeout_and_both_connections(server, tier):
    keys = names_of(range(8))
    tier.put(keys, records_of(keys, 300_000))
    get(tier, keys, 300_000)
    with server.hanging():
        began = time.monotonic()
        assert get(tier, keys, 300_000, timeout_s=0.2) == [TIMEOUT] * 8
        assert time.monotonic() - began < 0.6
        assert num_open(tier) == 0
    assert get(tier, keys, 300_000) == [HIT] * 8


def own_ports(tier):
    return {link._wire._socket.getsockname()[1] for link in tier._routes._node._idle}

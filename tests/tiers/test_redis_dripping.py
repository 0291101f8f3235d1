"""Answers that never end, in pieces however small: each call keeps to its timeout, and to little memory."""

import time
from contextlib import suppress

import pytest
from processes import SOON_S
from redis_help import the_server
from rubbish_server import RubbishServer, Then, bulk

from quire.errors import TierError
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, name_of, record_of
from quire.tiers.redis import Redis
from quire.tiers.redis import servers as redis_servers
from quire.tiers.redis import tier as redis_tier

TIMEOUT, ERROR = Outcome.TIMEOUT, Outcome.ERROR


@pytest.fixture
def server():
    server = RubbishServer()
    yield server
    server.close()


@pytest.fixture
def tier(server):
    with Redis(f"redis://127.0.0.1:{server.port}", connections=2) as tier:
        yield tier
        tier.check()


def test_a_server_that_drips_an_answer_byte_by_byte_costs_the_timeout(server, tier):
    def drip(connection):
        for byte in bulk(bytes(record_of(name_of(1)))):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    server.mischief = lambda answer, command: Then(b"", after=drip)
    began = time.monotonic()
    outcomes = tier.get([name_of(1)], buffers_like([record_of(name_of(1))]), timeout_s=0.2)
    assert outcomes == [TIMEOUT]
    assert time.monotonic() - began < SOON_S


def dripping(connection):
    for _ in range(3000):
        connection.sendall(b"x")
        time.sleep(0.01)


@pytest.mark.parametrize(
    "call",
    [
        lambda tier: tier.put([name_of(1)], [record_of(name_of(1))], timeout_s=0.2),
        lambda tier: tier.contains([name_of(1)], timeout_s=0.2),
        lambda tier: tier.delete([name_of(1)], timeout_s=0.2),
        lambda tier: tier.touch([name_of(1)]),
    ],
)
def test_a_login_that_drips_costs_the_timeout_of_the_call(server, tier, call):
    the_server(tier)._close_idle()
    server.mischief = lambda answer, command: Then(b"+", after=dripping)
    began = time.monotonic()
    call(tier)
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
@pytest.mark.parametrize("word", [b"CLIENT", b"EXISTS", b"INFO", b"CLUSTER"])
def test_a_server_that_drips_opens_or_is_refused_within_the_time_of_opening(
    server, monkeypatch, scheme, word
):
    monkeypatch.setattr(redis_tier, "OPEN_TIMEOUT_S", 0.3)

    def mischief(answer, command):
        return Then(b"+", after=dripping) if command[0] == word else answer

    server.mischief = mischief
    began = time.monotonic()
    with suppress(TierError):
        Redis(f"{scheme}://127.0.0.1:{server.port}").close()
    assert time.monotonic() - began < SOON_S


def test_a_listing_that_drips_is_refused(server, tier, monkeypatch):
    monkeypatch.setattr(redis_servers, "REFRESH_S", 0.2)
    server.mischief = lambda answer, command: Then(b"+", after=dripping)
    began = time.monotonic()
    with pytest.raises(TierError, match="cannot be listed"):
        list(tier.scan())
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    "answer", [b"*1\r\n" * 3000 + b":1\r\n", b"$40000000\r\n" + bytes(40_000_000)]
)
def test_an_answer_that_is_too_deep_or_too_long_is_rubbish(server, tier, answer):
    the_server(tier)._close_idle()
    server.mischief = lambda _, command: answer
    key = name_of(1)
    assert tier.put([key], [record_of(key)]) == [ERROR]
    assert tier.contains([key]) == [False]
    tier.delete([key])
    tier.touch([key])
    with pytest.raises(TierError, match="cannot be listed"):
        list(tier.scan())
    with pytest.raises(TierError, match=r"nested too deep|more than 16777216 bytes"):
        Redis(f"redis://127.0.0.1:{server.port}")


def test_a_server_that_never_stops_talking_costs_the_timeout(server, tier):
    def flood(connection):
        while True:
            connection.sendall(b"+PONG\r\n" * 10_000)

    server.mischief = lambda answer, command: Then(b"$100000000\r\n", after=flood)
    began = time.monotonic()
    record = record_of(name_of(1), 6_000_000)
    outcomes = tier.put([name_of(1)] * 9, [record] * 9, timeout_s=0.3)
    assert set(outcomes) <= {ERROR, TIMEOUT}
    assert time.monotonic() - began < SOON_S

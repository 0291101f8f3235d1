"""A call of the Redis tier that is cut off anywhere, as by Ctrl-C, keeps no connection from the next call."""

import gc
import threading
from pathlib import Path

import pytest
import redis
from cut_tiers import (
    CALLS,
    HELD,
    ROOMS,
    SAMPLES,
    STDLIB,
    TIMEOUT_S,
    KeptCut,
    assert_fit,
    assert_fit_after_cuts,
    close,
    cut_opening_and_closing,
    places_of,
)
from processes import wait_until
from redis_help import PREFIXES, the_server
from servers import make_certificate, running, running_cluster

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, records_of
from quire.tiers.redis import Redis
from turns import few, few_rows

pytestmark = pytest.mark.system("redis-server")

BELOW = (*ROOMS, str(Path(redis.__file__).parent), str(STDLIB / "ssl.py"))
LONG = 30
"""Fewer than of other tiers: each place costs a connection, and of a cluster several."""

HIT, STORED = Outcome.HIT, Outcome.STORED


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Return servers by kind, and the URL of each kind."""
    folder = tmp_path_factory.mktemp("redis")
    certificate, key = make_certificate(folder)
    tls = ("--tls-port", "PORT", "--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    with (
        running(folder) as plain,
        running(folder, *tls, "--tls-auth-clients", "no") as secured,
        running_cluster(folder) as nodes,
    ):
        yield {
            "plain": ([plain], plain.url),
            "tls": ([secured], f"rediss://127.0.0.1:{secured.port}?ssl_ca_certs={certificate}"),
            "cluster": (nodes, nodes[0].url.replace("redis:", "redis+cluster:")),
        }


def opened(url):
    """Return a tier of one connection to each server: one that stays taken keeps everybody waiting."""
    return Redis(url, prefix=f"cut-{next(PREFIXES)}:", connections=1)


def prepared(url):
    tier = opened(url)
    assert tier.put(HELD, records_of(HELD), TIMEOUT_S) == [STORED] * len(HELD)
    return tier


def afresh(call):
    """Return a call that has to make its connections first."""

    def made(tier):
        for server in tier._servers._servers.values():
            server._close_idle()
        return call(tier)

    return made


NEW = {"get_afresh": afresh(CALLS["get"]), "put_afresh": afresh(CALLS["put"])}
EACH = CALLS | NEW
CASES = [
    *(("plain", name) for name in EACH),
    *((kind, name) for kind in ("tls", "cluster") for name in ("put", "get", "scan", *NEW)),
]


OTHERS = ("tls", "get"), ("cluster", "put"), ("cluster", next(iter(NEW)))
"""Of servers of the other kinds: one way to read, one to write and one that is a Redis tier's own."""


def num_connections(servers):
    count = 0
    for server in servers:
        with server.client() as client:
            count += len(client.client_list(_type="normal")) - 1
    return count


def assert_none_is_left(servers):
    gc.collect()
    wait_until(lambda: not num_connections(servers), "connections stay open")


@pytest.mark.cases(2)
@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "name"), few_rows(CASES, *(each for each in CASES if each[0] == "plain"), *OTHERS)
)
def test_a_redis_tier_answers_in_time_after_a_call_that_was_cut_off(servers, kind, name, samples):
    nodes, url = servers[kind]
    assert_fit_after_cuts(lambda: prepared(url), name, samples, call=EACH[name], rooms=BELOW)
    assert_none_is_left(nodes)


@pytest.mark.cases(1)
@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", few(["plain", "tls", "cluster"], "plain", "tls"))
def test_a_redis_tier_whose_opening_or_closing_was_cut_off_leaves_no_connection(
    servers, kind, samples
):
    nodes, url = servers[kind]
    cut_opening_and_closing(lambda: opened(url), kind, samples, BELOW)
    assert_none_is_left(nodes)


@pytest.mark.ci
def test_a_redis_tier_answers_after_any_number_of_mixed_calls_that_were_cut_off(servers):
    _, url = servers["plain"]
    with prepared(url) as tier:
        for name, call in CALLS.items():
            for at in places_of(lambda call=call: call(tier), SAMPLES, name):
                KeptCut(at, rooms=ROOMS).run(lambda call=call: call(tier))
                assert the_server(tier)._permits.num_taken == 0
        assert_fit(tier, 0)


@pytest.mark.cases(1)
@pytest.mark.parametrize("samples", [8, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["plain", "cluster"])
def test_a_thread_that_waits_for_a_connection_gets_it_when_its_user_is_cut_off(
    servers, kind, samples
):
    _, url = servers[kind]
    waiting = []

    def begin_to_wait(tier):
        buffers = buffers_like(records_of(HELD))
        thread = threading.Thread(
            target=lambda: answers.extend(tier.get(HELD, buffers, TIMEOUT_S)), daemon=True
        )
        answers = []
        thread.start()
        gates = [server._permits._bell._gates for server in tier._servers._servers.values()]
        wait_until(lambda: any(gates) or not thread.is_alive(), "a thread that waits")
        waiting.append((thread, answers, any(gates)))

    with prepared(url) as tier:
        places = places_of(lambda: CALLS["get"](tier), samples, kind)
    for at in places:
        tier = prepared(url)
        cut = KeptCut(at, rooms=ROOMS, meanwhile=lambda tier=tier: begin_to_wait(tier))
        cut.run(lambda tier=tier: CALLS["get"](tier))
        thread, answers, _ = waiting[-1]
        thread.join(2 * TIMEOUT_S)
        assert answers == [HIT] * len(HELD), f"cut at {at}"
        close(tier)
    assert any(has_waited for *_, has_waited in waiting)

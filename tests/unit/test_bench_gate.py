"""`quire bench tiers --gate`: the proxy delays, and the rows judge."""

import socket
import threading
import time

import pytest
from cli_help import told

from quire.bench import gate_rows
from quire.bench.proxy import DelayingProxy
from quire.errors import ConfigError


def test_a_proxy_delays_what_is_sent_both_ways_in_order_and_takes_no_longer_for_more():
    server = socket.create_server(("127.0.0.1", 0))

    def echo():
        connection, _ = server.accept()
        while data := connection.recv(1 << 20):
            connection.sendall(data)
        connection.close()

    threading.Thread(target=echo, daemon=True).start()
    sent = bytes(range(256)) * 2000
    with (
        DelayingProxy(server.getsockname(), 0.06) as proxy,
        socket.create_connection(("127.0.0.1", proxy.port)) as client,
    ):
        for data in (b"x", sent):
            begun_s, came = time.perf_counter(), b""
            client.sendall(data)
            while len(came) < len(data):
                came += client.recv(1 << 20)
            took_s = time.perf_counter() - begun_s
            assert came == data
            assert 0.06 <= took_s < 1.0
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b"", "an end is passed on"
    server.close()


def test_rows_tell_hits_misses_loading_and_computing_and_judge(tmp_path):
    (row,) = gate_rows.rows([f"files:{tmp_path}"], lengths=[256])
    assert row["computing_ms"] == 29.6
    assert row["hit_ms"] < 29.6 <= row["miss_ms"]
    with gate_rows.open_tier(f"files:{tmp_path}") as tier:
        assert not list(tier.scan()), "what was put is deleted"


def test_what_is_allowed_is_a_tenth_or_two_milliseconds():
    assert gate_rows._holds(1.09, 1.0)
    assert not gate_rows._holds(1.11, 1.0)
    assert gate_rows._holds(0.0019, 0.0)


def test_the_command_prints_them(monkeypatch, tmp_path):
    monkeypatch.setattr(gate_rows, "computing_s", lambda num_tokens: num_tokens * 1e-6)
    found = told("bench", "tiers", f"files:{tmp_path}", "--gate", "--quick")
    assert [row["tokens"] for row in found] == [64, 512, 2048]


@pytest.mark.parametrize("lines", [[], ["host:1MiB"]])
def test_a_tier_that_forgets_is_refused(lines):
    with pytest.raises(ConfigError, match="keeps what is put"):
        gate_rows.rows(lines)

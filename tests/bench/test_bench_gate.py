"""`quire bench tiers --gate`: the proxy delays, and the rows judge."""

import logging
import socket
import threading
import time

import pytest

from cli_help import told
from quire.bench import gate_rows
from quire.bench import proxy as proxy_module
from quire.bench.proxy import DelayingProxy
from quire.errors import ConfigError
from quire.tiers.files import Files


def test_a_proxy_delays_what_is_sent_both_ways_in_order_and_takes_no_longer_for_more(monkeypatch):
    monkeypatch.setattr(proxy_module, "CHUNK_BYTES", 1 << 12)  # one after another: 125 delays
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
            assert 0.06 <= took_s < 60 * 0.06
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b"", "an end is passed on"
    server.close()


def test_rows_tell_hits_misses_loading_and_computing_and_judge(tmp_path, monkeypatch):
    assert gate_rows.computing_s(256) == pytest.approx(0.0296)
    monkeypatch.setattr(gate_rows, "computing_s", lambda num_tokens: num_tokens / 1000)
    (row,) = gate_rows.rows([f"files:{tmp_path}"], lengths=[128])
    assert row["computing_ms"] == 128
    assert row["hit_ms"] < 128 <= row["miss_ms"]
    with gate_rows.open_tier(f"files:{tmp_path}") as tier:
        assert not list(tier.scan()), "what was put is deleted"


def test_a_warning_of_a_server_is_logged_once_per_benchmark(monkeypatch, tmp_path, caplog):
    opened = []

    def warns(line):
        opened.append(line)
        logging.getLogger("quire.tiers.redis.tier").warning("has no maxmemory")
        return Files(tmp_path)

    monkeypatch.setattr(gate_rows, "open_tier", warns)
    gate_rows.rows([f"files:{tmp_path}"], lengths=[64])
    assert len(opened) == 6
    assert caplog.messages == ["has no maxmemory"]
    warns("")
    assert len(caplog.messages) == 2, "only while rows are measured"


def test_a_request_may_be_a_tenth_or_two_milliseconds_slower_than_the_best():
    assert gate_rows.holds(1.09, 1.0)
    assert not gate_rows.holds(1.11, 1.0)
    assert gate_rows.holds(0.0019, 0.0)


def test_bench_tiers_prints_the_rows_of_the_gate(monkeypatch, tmp_path):
    monkeypatch.setattr(gate_rows, "computing_s", lambda num_tokens: num_tokens * 1e-6)
    words = (f"files:{tmp_path / 'kv'}", "--gate", "--quick")
    found = told("bench", "tiers", *words)
    assert [row["tokens"] for row in found] == [64, 512, 2048]


@pytest.mark.parametrize("lines", [[], ["host:1MiB"]])
def test_a_tier_that_forgets_is_refusal(lines):
    with pytest.raises(ConfigError, match="keeps what is put"):
        gate_rows.rows(lines)

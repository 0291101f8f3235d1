"""`quire demo` against a server: it starts one, asks it everything twice, and leaves nothing behind."""

import json

import httpx
import pytest
from typer.testing import CliRunner

from quire.bench.serve_http import ServerProcess
from quire.cli import served_demo
from quire.cli.app import app

pytestmark = pytest.mark.slow
SMALL = ("demo", "--num-conversations", "2", "--num-turns", "2", "--system-tokens", "300")
SMALL += ("--max-new-tokens", "6", "--kv-memory", "16MiB")


class Lent:
    """One server for two demos: the second one finds that of the first, and ends it."""

    server, demos = None, 0

    def __init__(self, *given):
        Lent.server = Lent.server or ServerProcess(*given)
        self.port = Lent.server.port

    def close(self):
        Lent.demos += 1
        if Lent.demos == 2:
            Lent.server.close()


def test_it_talks_with_a_server_with_reuse_and_without(monkeypatch):
    urls, lies = [], [False]
    monkeypatch.setattr(served_demo, "ServerProcess", Lent)

    class Watched(served_demo.ServedSides):
        def __enter__(self):
            urls.append(self.url)
            return super().__enter__()

        def _ask(self, talk, salt, **asked):
            made = super()._ask(talk, salt, **asked)
            return made._replace(replies=["?"] * 4, said="?") if lies[0] and salt is None else made

    monkeypatch.setattr(served_demo, "ServedSides", Watched)
    done = CliRunner().invoke(app, [*SMALL, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert f"its page at {urls[0]}" in done.stderr.replace("\n", " ")
    assert found["outputs_identical"] is True
    cold, *others = found["turns"]
    assert len(others) == 3
    assert cold["cached_tokens"] < 16
    assert all(turn["cached_tokens"] >= 300 for turn in others)
    assert len(found["sample"]["replies"]) == 4
    assert found["ttft_speedup_median"] > 1
    assert found["pool"]["active"] == 0
    lies[0] = True
    done = CliRunner().invoke(app, [*SMALL, "--num-turns", "1"])
    assert done.exit_code == 1
    assert "NO" in done.stdout
    assert "outputs differ" in done.stderr
    assert urls == [urls[0]] * 2
    with pytest.raises(httpx.ConnectError):
        httpx.get(urls[0] + "/health")


def test_a_server_that_does_not_start_is_told_of():
    done = CliRunner().invoke(app, [*SMALL, "--tier", "host:1XB"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "'1XB' is not a unit" in done.stderr

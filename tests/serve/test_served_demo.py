"""`quire demo` against a server: it starts one, asks it everything twice, and leaves nothing behind."""

import json

import httpx
import pytest
from typer.testing import CliRunner

import plain_http
from quire.cli import served_demo
from quire.cli.app import app
from quire.cli.server_process import HOST, ServerProcess

pytestmark = [pytest.mark.slow, pytest.mark.ci]
SMALL = ("demo", "--num-conversations", "2", "--num-turns", "2", "--system-tokens", "300")
SMALL += ("--max-new-tokens", "6", "--kv-memory", "16MiB")


class Lent:
    """A server that demos are lent, one after the other: the first one's words start it, and it outlives them."""

    def __init__(self):
        self.server, self.num_closed = None, 0

    def __call__(self, *given):
        self.server = self.server or ServerProcess(*given)
        self.port = self.server.port
        return self

    def close(self):
        self.num_closed += 1


@pytest.fixture(scope="module")
def lent():
    """Lend one server to the demos of this file, and end it after the last."""
    lent = Lent()
    yield lent
    lent.server.close()
    with pytest.raises(httpx.ConnectError):
        plain_http.get(f"http://{HOST}:{lent.port}/health")


@pytest.fixture
def demo(lent, monkeypatch):
    """Run a demo, which has to close the server that it is lent."""
    monkeypatch.setattr(served_demo, "ServerProcess", lent)

    def run(*words):
        before = lent.num_closed
        done = CliRunner().invoke(app, [*SMALL, *words])
        assert lent.num_closed == before + 1
        return done

    return run


def test_the_demo_asks_a_server_with_reuse_and_without(demo, lent):
    done = demo("--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert f"its page at http://{HOST}:{lent.port}" in done.stderr.replace("\n", " ")
    assert found["outputs_identical"] is True
    cold, *others = found["turns"]
    assert len(others) == 3
    assert cold["cached_tokens"] < 16
    assert all(turn["cached_tokens"] >= 300 for turn in others)
    assert len(found["sample"]["replies"]) == 4
    assert found["ttft_speedup_median"] > 1
    assert found["pool"]["active"] == 0


def test_outputs_that_differ_are_told_of(demo, monkeypatch):
    asked = served_demo.ServedSides._ask

    def lying(self, talk, salt, **more):
        made = asked(self, talk, salt, **more)
        return made if salt else made._replace(replies=["?"] * 4, said="?")

    monkeypatch.setattr(served_demo.ServedSides, "_ask", lying)
    done = demo("--num-turns", "1")
    assert done.exit_code == 1
    assert "NO" in done.stdout
    assert "outputs differ" in done.stderr


@pytest.mark.ci
def test_a_server_that_does_not_start_is_told_of():
    done = CliRunner().invoke(app, [*SMALL, "--tier", "host:1XB"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "'1XB' is not a unit" in done.stderr

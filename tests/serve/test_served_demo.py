"""`quire demo` against a server: it starts one, asks it everything twice, and leaves nothing behind."""

import io
import json
from string import ascii_uppercase

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

import plain_http
import quire.cli.demo as command
import real_models
from quire.cli import served_demo
from quire.cli.app import app
from quire.cli.served_demo import DemoReply, call, figures
from quire.cli.server_process import HOST, ServerProcess

SMALL = ("demo", "--model", "quire-tiny", "--kv-memory", "16MiB")


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
    """Run a demo of four short replies, which has to close the server that it is lent."""
    monkeypatch.setattr(served_demo, "ServerProcess", lent)
    monkeypatch.setattr(served_demo, "_MAX_TOKENS", 6)
    monkeypatch.setattr(command, "NUM_CONVERSATIONS", 2)
    monkeypatch.setattr(command, "NUM_TURNS", 2)
    notes = command.TINY_TALKS.notes[:300]
    monkeypatch.setattr(command, "TINY_TALKS", command.TINY_TALKS._replace(notes=notes))

    def run(*words):
        before = lent.num_closed
        done = CliRunner().invoke(app, [*SMALL, *words])
        assert lent.num_closed == before + 1
        return done

    return run


@pytest.mark.slow
@pytest.mark.ci
def test_the_demo_asks_a_server_with_reuse_and_without(demo, lent):
    done = demo("--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert f"its page is http://{HOST}:{lent.port} while" in done.stderr
    assert found["outputs_identical"] is True
    cold, *others = found["turns"]
    assert len(others) == 3
    assert cold["cached_tokens"] < 16
    assert all(turn["cached_tokens"] >= 300 for turn in others)
    assert found["prompt_tokens"] == found["reused_tokens"] + found["computed_tokens"]
    assert found["hit_rate"] == found["reused_tokens"] / found["prompt_tokens"]
    assert found["ttft_speedup_median"] > 0
    assert found["pool"]["active"] == 0


@pytest.mark.slow
@pytest.mark.ci
def test_outputs_that_differ_are_told_of(demo, monkeypatch):
    asked = served_demo.DemoServer.ask

    def lying(self, talk, *, is_reusing):
        made = asked(self, talk, is_reusing=is_reusing)
        return made._replace(text="?") if is_reusing else made

    monkeypatch.setattr(served_demo.DemoServer, "ask", lying)
    done = demo()
    assert done.exit_code == 1
    assert "NO: 4 of 4 replies differ" in done.stdout
    assert "replies differ" in done.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_replies_are_printed_as_they_come(demo):
    done = demo()
    assert done.exit_code == 0, done.output
    before_table = done.stdout.partition("2 conversations")[0]
    for question in ("What is a list?", "What does the with statement do?"):
        assert question in before_table
    assert before_table.count("first token after") == 4


@pytest.mark.slow
@pytest.mark.ci
def test_a_server_that_does_not_start_is_told_of():
    done = CliRunner().invoke(app, [*SMALL, "--dtype", "float33"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "'float33' is not a dtype" in done.stderr


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.system("smollm2-135m")
def test_the_real_assistant_answers_from_its_handbook():
    real_models.folder("smollm2-135m")
    done = CliRunner().invoke(app, ["demo", "--json"])
    found = json.loads(done.stdout)
    assert found["model"] == "smollm2"
    assert [call["conversation"] for call in found["turns"]] == [*"ABCABC"]
    first, *others = (call["reply"] for call in found["turns"])
    assert "working days" in first
    assert all(reply[0].isupper() and reply.endswith((".", "?", "!")) for reply in others)
    assert found["hit_rate"] > 0.7


def compared(num_conversations, num_turns, wrong=()):
    """The document of a demo, of numbers that are made up."""
    turns = []
    for turn in range(1, num_turns + 1):
        for label in ascii_uppercase[:num_conversations]:
            cached = 12_000 if turns else 0
            after = DemoReply("Yes.", 12_345 * turn, cached, 0.02 if turns else 2.1, 0.5)
            before = DemoReply(
                "No." if f"{label}{turn}" in wrong else "Yes.", 12_345 * turn, 0, 2.0, 2.5
            )
            turns.append(call(label, turn, before, after, "Is it?"))
    pool = {"num_blocks": 4000, "active": 0, "cached": 3000, "free": 1000, "num_bytes": 2**28}
    return figures(turns) | {"model": "a model", "dtype": "float32", "pool": pool}


def drawn(found, columns):
    console = Console(width=columns, record=True, file=io.StringIO())
    command.show(console, found)
    return console.export_text()


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("size", [(3, 2), (1, 1), (2, 3)])
def test_the_table_fits_the_terminal(columns, size):
    lines = drawn(compared(*size), columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert not any("…" in line for line in lines)
    for word in ("A1", "speed-up", f"yes: {size[0] * size[1]} replies", "free"):
        assert any(word in line for line in lines)


def test_the_table_says_where_a_reply_differs():
    text = drawn(compared(3, 2, wrong=("B1",)), 80)
    assert "NO: 1 of 6 replies differ" in text
    assert "yes: " not in text


def test_medians_leave_out_the_first_call():
    found = compared(3, 1)
    assert found["ttft_ms_cold_median"] == pytest.approx(2000)
    assert found["ttft_ms_warm_median"] == pytest.approx(20)
    assert found["hit_rate"] == 24_000 / 37_035

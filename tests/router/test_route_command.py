"""`quire route`, as it is typed, before servers that run."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress

import pytest
from typer.testing import CliRunner
from upstream_help import wait_for

import plain_http
from quire.cli.app import app
from quire_router.relay import MADE_BY

PROMPT = "Once upon a time there were two servers and a router that knew them both. " * 3


@contextmanager
def started(*words, port=0):
    """Start a command; yield its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", *words, "--port", str(port), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def said(process):
    """Return what a command says of itself."""
    text = ""
    while not text.endswith("}\n"):
        line = process.stdout.readline()
        assert line, process.stderr.read()
        text += line
    return json.loads(text)


def broken_off(url, servers, home, headers=None):
    """Kill the server that answers a stream, as soon as it does."""
    asked = {"prompt": PROMPT, "max_tokens": 1500, "stream": True, "ignore_eos": True}
    more, told = {"json": asked, "headers": headers, "timeout": 30}, []
    with plain_http.stream("POST", f"{url}/v1/completions", **more) as answer:
        assert answer.headers[MADE_BY] == str(home)
        for line in answer.iter_lines():
            told += [line] if line.startswith("data: ") else []
            if len(told) == 2:
                servers[home].kill()
    assert json.loads(told[-2][6:])["error"]["code"] == "broken_off"
    assert told[-1] == "data: [DONE]"


@pytest.mark.long
def test_two_servers_behind_one_address_and_one_of_them_is_killed_in_a_stream():
    serve = ("serve", "--kv-memory", "16MiB", "--dtype", "float32")
    with ExitStack() as stack:
        servers = [stack.enter_context(started(*serve)) for _ in range(2)]
        urls = [said(server)["url"] for server in servers]
        words = [word for url in urls for word in ("--upstream", url)]
        process = stack.enter_context(started("route", *words))
        router = said(process)
        assert router["upstreams"] == urls

        def state():
            return plain_http.get(router["url"] + "/v1/upstreams").json()["upstreams"]

        def ask(**more):
            asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0} | more
            return plain_http.post(f"{router['url']}/v1/completions", json=asked, timeout=30)

        wait_for(lambda: all(each["is_well"] for each in state()))
        first, second = ask(), ask()
        home = int(first.headers[MADE_BY])
        assert second.headers[MADE_BY] == str(home)
        assert second.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100

        broken_off(router["url"], servers, home)
        third = ask()
        assert (third.status_code, third.headers[MADE_BY]) == (200, str(1 - home))
        assert third.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        process.terminate()
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()


@pytest.mark.long
def test_a_router_that_follows_events_may_begin_first_and_be_killed_and_knows_tenants(
    tmp_path, monkeypatch
):
    pytest.importorskip("zmq", reason="install it with: pip install pyzmq")
    monkeypatch.setenv("QUIRE_OPERATOR_KEY", "the-operators")
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann\nbob key-of-bob\n")
    keys.chmod(0o600)
    first = free_ports(7)
    ports = [first, first + 1, first + 2]
    follow = [f"tcp://127.0.0.1:{first + at}" for at in (3, 5)]  # and the port behind each
    url = f"http://127.0.0.1:{ports[2]}"
    route = ["route", "--keys", str(keys)]
    for port, endpoint in zip(ports[:2], follow, strict=True):
        route += ["--upstream", f"http://127.0.0.1:{port}", "--follow", endpoint]

    def serve(at):
        words = ["serve", "--keys", str(keys), "--kv-memory", "16MiB", "--dtype", "float32"]
        return stack.enter_context(started(*words, "--events", follow[at], port=ports[at]))

    def state():
        operator = {"authorization": "Bearer the-operators"}
        return plain_http.get(f"{url}/v1/upstreams", headers=operator).json()

    def each(what):
        return [upstream[what] for upstream in state()["upstreams"]]

    def ask(name="ann"):
        asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        key = {"authorization": f"Bearer key-of-{name}"}
        return plain_http.post(f"{url}/v1/completions", json=asked, headers=key, timeout=30)

    def found(answer):
        usage = answer.json()["usage"]
        return int(answer.headers[MADE_BY]), usage["prompt_tokens_details"]["cached_tokens"] > 100

    with ExitStack() as stack:
        router = stack.enter_context(started(*route, port=ports[2]))
        assert said(router)["url"] == url
        assert ask().json()["error"]["code"] == "no_upstream"
        servers = [serve(0), serve(1)]
        wait_for(lambda: each("is_well") == [True, True], 60)

        before = ask()
        home, was_found = found(before)
        assert not was_found
        wait_for(lambda: state()["blocks"] > 0)
        assert [found(ask()) for _ in range(3)] == [(home, True)] * 3
        assert not found(ask("bob"))[1]

        router.kill()
        router.wait()
        router = stack.enter_context(started(*route, port=ports[2]))
        said(router)
        wait_for(lambda: state()["blocks"] > 0 and each("is_well") == [True, True])
        assert [found(ask()) for _ in range(3)] == [(home, True)] * 3

        broken_off(url, servers, home, {"authorization": "Bearer key-of-ann"})
        after = ask()
        assert found(after)[0] == 1 - home
        assert after.json()["choices"][0]["text"] == before.json()["choices"][0]["text"]
        wait_for(lambda: each("is_degraded")[home], 20)
        servers[home] = serve(home)
        wait_for(lambda: each("is_well") == [True, True] and not any(each("is_degraded")), 60)
        assert [found(ask()) for _ in range(3)] == [(1 - home, True)] * 3
        router.terminate()
        assert router.wait(10) == 0
        assert "Traceback" not in router.stderr.read()


def free_ports(count):
    """Return the first of so many ports in a row where nobody listens, and that no connection is given by chance."""
    for first in range(20000 + os.getpid() % 5000, 32000, count):
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def refusal(*words):
    done = CliRunner().invoke(app, ["route", *words])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return done.stderr


def test_flags_that_cannot_be_are_refused():
    one, two = ("--upstream", "http://127.0.0.1:1"), ("--upstream", "http://127.0.0.1:2")
    assert "beyond loopback needs keys" in refusal(*one, "--host", "10.0.0.1")
    assert "an upstream is http" in refusal("--upstream", "127.0.0.1:1")
    assert "given once" in refusal(*one, "--upstream", "http://127.0.0.1:1/")
    assert "1 --follow for 2 upstreams" in refusal(*one, *two, "--follow", "tcp://127.0.0.1:9")
    assert "did you mean prefix" in refusal(*one, "--router", "prefx")
    assert "load limit" in refusal(*one, "--load-limit", "0.1")

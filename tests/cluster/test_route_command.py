"""`quire route`, as it is typed, before servers that run."""

import json
import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from typer.testing import CliRunner
from upstream_help import wait_for

from quire.cli.app import app
from quire.cluster.proxy import MADE_BY

PROMPT = "Once upon a time there were two servers and a router that knew them both. " * 3


@contextmanager
def started(*words):
    """Start a command; yield its process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.cli", *words, "--port", "0", "--json"],
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
            return httpx.get(router["url"] + "/v1/upstreams").json()["upstreams"]

        def ask(**more):
            asked = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0} | more
            return httpx.post(f"{router['url']}/v1/completions", json=asked, timeout=30)

        wait_for(lambda: all(each["is_well"] for each in state()))
        first, second = ask(), ask()
        home = int(first.headers[MADE_BY])
        assert second.headers[MADE_BY] == str(home)
        assert second.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        assert second.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 100

        asked = {"prompt": PROMPT, "max_tokens": 1500, "stream": True, "ignore_eos": True}
        told = []
        url = f"{router['url']}/v1/completions"
        with httpx.stream("POST", url, json=asked, timeout=30) as answer:
            assert answer.headers[MADE_BY] == str(home)
            for line in answer.iter_lines():
                told += [line] if line.startswith("data: ") else []
                if len(told) == 2:
                    servers[home].kill()
        assert json.loads(told[-2][6:])["error"]["code"] == "broken_off"
        assert told[-1] == "data: [DONE]"
        third = ask()
        assert (third.status_code, third.headers[MADE_BY]) == (200, str(1 - home))
        assert third.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]
        process.terminate()
        assert process.wait(10) == 0
        assert "Traceback" not in process.stderr.read()


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

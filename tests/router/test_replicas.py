"""`quire serve --replicas`, as it is typed: replicas on Ray Serve, one of which is killed in a stream."""

import json
import os
import signal
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from test_route_command import PROMPT, free_ports, said, started
from typer.testing import CliRunner
from upstream_help import wait_for

import plain_http
from quire.cli.app import app

pytest.importorskip("ray.serve", reason="install it with: pip install 'ray[serve]'")

sys.path.append(str(Path(__file__).parents[1] / "tiers"))

from servers import running

MADE_BY = "x-quire-replica"
MARK = "QUIRE_TEST_OF_REPLICAS"


def marked(mark):
    """Return the processes that a command has started, and those in turn, each with what it is called."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}\0".encode() in (process / "environ").read_bytes():
                found[process] = (process / "cmdline").read_bytes().decode()
        except OSError:  # it has ended
            continue
    return found


def replicas(mark):
    return [process for process, name in marked(mark).items() if "ServeReplica:quire:Rep" in name]


def process_of(replica, mark):
    """Return the number of the process of a replica: it is the one that writes the replica's log."""
    for process in replicas(mark):
        files = [str(each.readlink()) for each in (process / "fd").iterdir() if each.exists()]
        if any(each.endswith(f"{replica}.log") for each in files):
            return int(process.name)
    raise AssertionError("no such replica")


def heard_beyond(mark):
    """Return what processes of a command are called that listen beyond loopback, one for each socket."""
    elsewhere = {
        f"socket:[{line[9]}]"
        for name in ("tcp", "tcp6")
        for line in map(str.split, Path(f"/proc/net/{name}").read_text().splitlines()[1:])
        if line[3] == LISTENING and line[1].rpartition(":")[0] not in LOOPBACK
    }
    found = []
    for process, called in marked(mark).items():
        with suppress(OSError):  # it has ended
            for each in (process / "fd").iterdir():
                with suppress(OSError):  # it is closed
                    if str(each.readlink()) in elsewhere:
                        found.append(called.partition("\0")[0])
    return found


LISTENING = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same as IPv6, and ::1, as the system writes them."""


@pytest.mark.long
@pytest.mark.system("redis-server")
def test_replicas_share_what_they_computed_and_one_that_is_killed_in_a_stream_is_replaced(
    tmp_path, monkeypatch
):
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann\nbob key-of-bob\n")
    keys.chmod(0o600)
    with ExitStack() as stack:
        redis = stack.enter_context(running(tmp_path))
        mark = uuid.uuid4().hex
        monkeypatch.setenv(MARK, mark)
        monkeypatch.setenv("QUIRE_OPERATOR_KEY", "key-of-operator")
        stack.callback(lambda: [os.kill(int(each.name), signal.SIGKILL) for each in marked(mark)])
        words = ["--kv-memory", "16MiB", "--dtype", "float32", "--keys", str(keys)]
        stack_file = (
            tmp_path / "stack.toml"
        )  # all that is found is loaded, however fast computing is
        stack_file.write_text("[stack]\ngate = false\nbusy_share = 1.0\n")
        words += ["--tier", redis.url, "--tier-file", str(stack_file)]
        words = ["serve", "--replicas", "2", *words]
        server = stack.enter_context(started(*words, port=free_ports(1)))
        url = said(server)["url"]

        def ask(name="ann", prompt=PROMPT, **more):
            asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0} | more
            key = {"authorization": f"Bearer key-of-{name}"}
            return plain_http.post(f"{url}/v1/completions", json=asked, headers=key, timeout=180)

        def found(answer):
            usage = answer.json()["usage"]
            return answer.headers[MADE_BY], usage["prompt_tokens_details"]["cached_tokens"]

        # Who computed a prompt answers it again; no other tenant finds it, and none without a key.
        first = ask()
        home, cached = found(first)
        assert cached == 0
        num_tokens = first.json()["usage"]["prompt_tokens"]
        wait_for(lambda: found(ask())[0] == home, 60)  # its events are on their way
        again = [found(ask()) for _ in range(4)]
        assert all(each[0] == home and each[1] > num_tokens - 16 for each in again)
        assert found(ask("bob"))[1] == 0
        assert ask("eve").status_code == 401
        assert len({found(ask("bob", f"{at} {PROMPT}"))[0] for at in range(8)}) == 2

        # A response is gone on from where it is kept, in a stream too, and that ends as it should.
        def respond(**more):
            asked = {"input": PROMPT, "max_output_tokens": 4} | more
            key = {"authorization": "Bearer key-of-ann"}
            return plain_http.post(f"{url}/v1/responses", json=asked, headers=key, timeout=180)

        for _ in range(3):
            kept = respond()
            goes_on = {"previous_response_id": kept.json()["id"]}
            for more in (goes_on, goes_on | {"stream": True}):
                answer = respond(**more)
                assert answer.headers[MADE_BY] == kept.headers[MADE_BY]
                assert "response.incomplete" in answer.text or not more.get("stream")

        # The operator sees each of them; of Ray's processes the replicas alone are heard beyond this machine.
        operator = {"auth": ("", "key-of-operator"), "timeout": 60}
        listed = plain_http.get(f"{url}/v1/replicas", **operator).json()["replicas"]
        assert home in [each["replica"] for each in listed]
        assert all(each["stats"]["prompt_tokens"] > 0 for each in listed)
        metrics = plain_http.get(f"{url}/metrics", **operator).text
        assert all(f'replica="{each["replica"]}"' in metrics for each in listed)
        page = plain_http.get(f"{url}/replicas/{home}/", **operator)
        assert "<html" in page.text
        heard = heard_beyond(mark)
        assert (
            len(heard) == 3
        )  # a port of each replica's and the ingress's, which Ray Serve lets nobody bind
        assert all(name.startswith("ray::ServeReplica:") for name in heard)

        # Its process is killed in a stream: the client is told, and the next request works.
        told = []
        asked = {"prompt": PROMPT, "max_tokens": 1500, "stream": True, "ignore_eos": True}
        key = {"authorization": "Bearer key-of-ann"}
        more = {"json": asked, "headers": key, "timeout": 180}
        with plain_http.stream("POST", f"{url}/v1/completions", **more) as answer:
            assert answer.headers[MADE_BY] == home
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    told.append(line)
                if line and len(told) == 2:
                    os.kill(process_of(home, mark), signal.SIGKILL)
        assert json.loads(told[-2][6:])["error"]["code"] == "broken_off"
        assert told[-1] == "data: [DONE]"
        second = ask()
        other, cached = found(second)
        assert other != home
        assert cached >= num_tokens // 16 * 16  # from Redis
        assert second.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]

        # Another one is started in its place. Alone, it finds at once what those before it computed.
        wait_for(lambda: len(replicas(mark)) == 2, 180)
        os.kill(process_of(other, mark), signal.SIGKILL)
        third = ask()
        assert found(third)[0] not in (home, other)
        assert found(third)[1] >= num_tokens // 16 * 16
        assert third.json()["choices"][0]["text"] == first.json()["choices"][0]["text"]

        # At the end no process is left.
        server.terminate()
        assert server.wait(120) == 0
        assert "Traceback" not in server.stderr.read()
        wait_for(lambda: not marked(mark), 60)


@pytest.mark.long
def test_more_replicas_come_when_there_is_more_to_do(monkeypatch):
    with ExitStack() as stack:
        mark = uuid.uuid4().hex
        monkeypatch.setenv(MARK, mark)
        stack.callback(lambda: [os.kill(int(each.name), signal.SIGKILL) for each in marked(mark)])
        words = ["--kv-memory", "16MiB", "--dtype", "float32", "--max-running", "2"]
        words = ["serve", "--replicas", "1", "--max-replicas", "2", *words]
        server = stack.enter_context(started(*words, port=free_ports(1)))
        told = said(server)
        asked = {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "temperature": 0}
        client = stack.enter_context(plain_http.Client(base_url=told["url"], timeout=180))

        def ask(_):
            return client.post("/v1/completions", json=asked).raise_for_status().headers[MADE_BY]

        asking = stack.enter_context(ThreadPoolExecutor(8))
        assert len(client.get("/v1/replicas").json()["replicas"]) == 1
        until = time.monotonic() + 180
        made = set(asking.map(ask, range(8)))
        while len(made) < 2 and time.monotonic() < until:
            made |= set(asking.map(ask, range(8)))
        assert len(made) == 2
        assert len(client.get("/v1/replicas").json()["replicas"]) == 2
        server.terminate()
        assert server.wait(120) == 0


def refusal(*words, **env):
    done = CliRunner().invoke(app, ["serve", *words], env=env)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return " ".join(done.stderr.split())


def test_flags_that_cannot_be_are_refused():
    three = ("--replicas", "3", "--kv-memory", "1MiB")
    assert "needs --replicas" in refusal("--max-replicas", "3", "--kv-memory", "1MiB")
    assert "2 is less than --replicas 3" in refusal(*three, "--max-replicas", "2")
    assert "belongs to one server" in refusal(*three, "--tier", "disk:/nowhere?capacity=1GiB")
    assert "leave --events out" in refusal(*three, "--events", "tcp://127.0.0.1:5557")
    assert "did you mean prefix" in refusal(*three, "--router", "prefx")
    assert "add --events-in-clear" in refusal(*three, RAY_ADDRESS="10.0.0.1:6379")
    assert "1,000 times" in refusal("--replicas", "1000", "--kv-memory", "1GiB")

"""`quire serve`: its flags, what it says, and how it ends."""

import os
import signal
import socket
import subprocess
import sys
from typing import NamedTuple

import httpx
import pytest
from serve_help import command, running, wait_for
from typer.testing import CliRunner

import plain_http
from parts import skip_without
from quire.cli.app import app
from quire.cli.listening import listen
from quire.cli.serve import OF_SHAPES

pytestmark = pytest.mark.slow


class Served(NamedTuple):
    """A server that runs, what it said of itself, and where it keeps what it computed."""

    process: subprocess.Popen
    told: dict
    tier: str


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Return a server for the tests of this file; the last of them ends it."""
    tier = f"disk:{tmp_path_factory.mktemp('kv') / 'kv'}?capacity=64MiB"
    words = [
        "--kv-memory",
        "32MiB",
        "--tier",
        tier,
        "--dtype",
        "float32",
        "--events",
        "tcp://127.0.0.1:0",
    ]
    with command(*words) as (process, told):
        yield Served(process, told, tier)


def refusal(*words, **env):
    done = CliRunner().invoke(app, ["serve", *words], env=env)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    return done.stderr


@pytest.mark.ci
def test_its_events_tell_what_it_has_cached(served):
    pytest.importorskip("zmq", reason="install it with: pip install '.[observe]'")
    from quire.observe import Mirror
    from quire.observe.zmq import Subscriber

    told = served.told
    prompt = list(range(100, 180))
    asked = {"model": "quire-tiny", "prompt": prompt, "max_tokens": 4}
    mirror = Mirror()
    plain_http.post(told["url"] + "/v1/completions", json=asked, timeout=60).raise_for_status()
    with Subscriber(told["events"], mirror, replay=told["events_replay"]) as events:
        wait_for(lambda: events.poll(0.05) >= 0 and mirror.lookup(prompt) == 80)
        assert not events.is_degraded
        again = plain_http.post(told["url"] + "/v1/completions", json=asked, timeout=60).json()
        cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached // 16 * 16 == mirror.lookup(prompt[:-1]) == 64  # and the head of one more


def test_a_terminated_server_finishes_its_requests_and_the_next_finds_its_kv(
    served,
):
    prompt = "Once upon a time there was a server that kept what it had computed. " * 3
    process, told, tier = served
    asked = {"model": "quire-tiny", "prompt": prompt, "max_tokens": 120, "temperature": 0}
    assert told["model"] == "quire-tiny"
    client = plain_http.openai_client(told["url"])
    stream = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
    chunks = [next(stream)]
    process.send_signal(signal.SIGTERM)
    chunks += list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    assert process.wait(60) == 0
    out, err = process.communicate()
    assert "Traceback" not in out + err
    with pytest.raises(httpx.ConnectError):
        plain_http.get(told["url"] + "/health")
    with running(tiers=[tier]) as server:
        explained = server.post("/v1/cache/explain", {"prompt": prompt}).json()
        whole = (len(prompt) - 1) // 16 * 16
        assert explained["in_tiers"] == {"disk": whole}
        answer = server.client().completions.create(**asked, extra_body={"ignore_eos": True})
        assert answer.usage.prompt_tokens_details.cached_tokens == whole
        assert answer.choices[0].text == "".join(each.choices[0].text for each in chunks)
        server.quiet()


@pytest.mark.parametrize(("mode", "warns"), [(0o644, True), (0o640, False), (0o600, False)])
def test_a_file_of_keys_that_everybody_may_read_is_told_of(tmp_path, mode, warns):
    file = tmp_path / "keys"
    file.write_text("ann a-secret-key\n")
    file.chmod(mode)
    said = refusal("--keys", str(file), "--kv-memory", "900TiB")
    assert ("chmod 600" in said) == warns
    assert "a-secret-key" not in said


COMMAND = "sys.argv[1:] = ['serve', '--port', '0']; from quire.cli import main; main()"
REPLICA = """
from quire_router.cli.replicas import opened_replica
wanted = command.Wanted("tiny", "auto", "tiny", None, 1, 60.0, 1, None, None, None, {})
with opened_replica(wanted, is_alone=True): pass
"""


@pytest.mark.cases(2)
@pytest.mark.parametrize("begin", [COMMAND, REPLICA], ids=["command", "replica"])
@pytest.mark.parametrize("own", [{}, dict.fromkeys(OF_SHAPES, "7")], ids=["", "own"])
def test_torch_is_loaded_as_little_is_to_be_kept_of_shapes(begin, own):
    if begin == REPLICA:
        skip_without("route")
    look = f"""
import os, sys
import quire.cli.serve as command

def opened(*_, **__):  # the first that opens anything
    print("torch" in sys.modules, {{name: os.environ[name] for name in command.OF_SHAPES}})
    sys.exit()

command.opened = opened
{begin}
"""
    before = {name: value for name, value in os.environ.items() if name not in OF_SHAPES}
    said = subprocess.run(
        [sys.executable, "-c", look], env=before | own, check=True, capture_output=True, text=True
    )
    assert said.stdout == f"False {OF_SHAPES | own}\n"


def test_a_folder_that_is_not_there_is_said_before_torch_is_loaded():
    look = """
import sys
sys.argv[1:] = ["serve", "--model", "/nope", "--passages", "1GiB"]
from quire.cli import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", look], check=False, capture_output=True, text=True)
    assert "there is no file or folder '/nope'" in said.stderr
    assert (said.returncode, said.stdout) == (2, "False\n")


@pytest.mark.ci
def test_flags_are_checked_before_a_model_is_loaded(tmp_path):
    assert "beyond loopback needs keys" in refusal("--host", "10.0.0.1")
    assert "--host is an IP address" in refusal("--host", "nowhere.example")
    assert "cannot read" in refusal("--keys", str(tmp_path / "none"))
    assert "available" in refusal("--kv-memory", "900TiB")
    for everywhere in ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0", "tcp://eth0:0"):
        assert "--events-in-clear" in refusal("--events", everywhere)
    assert "tcp://HOST:PORT" in refusal("--events", "tcp://nowhere:0", "--events-in-clear")
    assert "not a size" in refusal("--max-body", "much")
    assert "at least 8" in refusal(QUIRE_API_KEY="short")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"127.0.0.1:{port}" in refusal("--port", str(port))


def test_the_parts_of_an_answer_do_not_wait_for_one_another():
    listening, _ = listen("127.0.0.1", 0, 1.0)
    with listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

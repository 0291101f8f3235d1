"""Faults around a server: their requests hold nothing afterwards, and others are served on."""

import json
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest
from serve_help import LONG, fixtures, loaded, running, short, together, wait_for

import plain_http
from quire.serve.service import Bounds
from quire.tiers import Host
from quire.tiers.faults import FaultPlan, Faulty
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack
from quire.web.keys import ApiKeys

TEXT = "This prompt is long enough to fill some blocks of sixteen tokens each."
KEYS = ApiKeys([("ann", "key-of-ann"), ("bob", "key-of-bob")], "the-operators")


server, nothing_stays = fixtures(bounds=Bounds(max_inflight=4, max_body=1 << 16, slow_s=1.0))


def test_a_client_that_goes_in_mid_stream_is_forgotten(server):
    with plain_http.stream(
        "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}
    ) as answer:
        lines = answer.iter_lines()  # one that is forgotten closes the answer
        next(lines)
        assert server.manager.sequences
    server.quiet(within_s=6)


def test_a_client_that_goes_while_it_waits_for_the_whole_is_forgotten(server):
    with pytest.raises(httpx.ReadTimeout):
        plain_http.post(f"{server.url}/v1/completions", json=LONG | {"n": 2}, timeout=0.5)
    server.quiet(within_s=6)
    prompts = LONG | {"prompt": ["Once", "Twice"]}
    with pytest.raises(httpx.ReadTimeout):
        plain_http.post(f"{server.url}/v1/completions", json=prompts, timeout=0.5)
    server.quiet(within_s=6)


@pytest.mark.parametrize("first", [True, False])
def test_streams_of_several_prompts_and_choices_are_forgotten_with_their_client(server, first):
    asked = LONG | {"prompt": ["Once", "Twice"], "n": 2, "stream": True}
    body = json.dumps(asked).encode()
    host, port = server.url.removeprefix("http://").split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            if first:
                assert connection.recv(20)
        server.quiet(within_s=5)
    # The server may have read the last request only now, and have no room until it sees its client gone.
    wait_for(lambda: short(server).status_code == 200)


def test_more_than_there_is_room_for_is_told_to_come_back(server):
    with ThreadPoolExecutor(1) as crew, plain_http.Client() as leaving:
        stream = leaving.stream(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True, "n": 3}
        )
        with stream as answer:
            lines = answer.iter_lines()  # one that is forgotten closes the answer
            next(lines)
            refused = server.post("/v1/completions", LONG | {"n": 2})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
            assert crew.submit(short, server).result().status_code == 200
    server.quiet(within_s=6)
    never = server.post("/v1/completions", LONG | {"n": 5})
    assert never.status_code == 400


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not(server):
    large = json.dumps({"prompt": "a" * (10 << 20)}).encode()
    answer = server.post("/v1/completions", content=large)
    assert answer.status_code == 413
    assert str(1 << 16) in answer.json()["error"]["message"]
    pieces = (large[at : at + 4096] for at in range(0, 1 << 17, 4096))
    assert server.post("/v1/completions", content=pieces).status_code == 413


def test_a_body_that_says_that_it_is_too_large_is_refused_before_it_comes(server):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {(1 << 16) + 1}\r\n\r\n"
    with socket.create_connection(
        server.url.removeprefix("http://").split(":"), timeout=30
    ) as asked:
        asked.sendall(head.encode())
        assert asked.recv(64).startswith(b"HTTP/1.1 413")


def test_a_text_that_is_too_long_whatever_it_says_is_not_read():
    with running(max_model_len=64) as made:
        longest = max(map(len, made.service.reader.tokenizer.get_vocab()))
        read = []
        own = made.service.reader.tokenizer
        made.service.reader.tokenizer = lambda text, **how: read.append(text) or own(text, **how)
        for over, message in ((1, "characters has more than 64 tokens"), (0, "the prompt has")):
            text = "a" * (64 * longest + over)
            answer = made.post("/v1/completions", {"prompt": text, "max_tokens": 1})
            assert answer.status_code == 400
            assert message in answer.json()["error"]["message"]
        assert read == ["a" * 64 * longest]
        made.quiet()


@pytest.mark.parametrize(
    "begun",
    [
        b"GET /health HTTP/1.1\r\n",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n",
    ],
    ids=["head", "trailers"],
)
@pytest.mark.parametrize("line_end", [b"\r\n", b""], ids=["many lines", "one line"])
def test_a_head_without_end_is_refused(server, begun, line_end):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.settimeout(20)
        connection.sendall(begun + b"X-First: a")
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(10_000):
                connection.sendall(line_end + b"X-Line: " + b"a" * 90)
            pytest.fail("a million bytes of headers were taken")


def test_a_connection_serves_requests_with_large_headers(server):
    with plain_http.Client() as client:
        for length in (10, 60_000, 20, 60_000, 60_000):
            asked = {"X-Long": "a" * length}
            assert client.get(f"{server.url}/health", headers=asked).status_code == 200


def test_a_body_that_never_comes_is_given_up(server):
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100\r\n\r\n"
        connection.sendall(head.encode())
        connection.settimeout(20)
        assert b" 408 " in connection.recv(200)


@pytest.mark.ci
def test_a_reader_that_takes_nothing_is_given_up(server):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"stream": True, "n": 2, "logprobs": 20}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with connection:
        connection.connect((host, int(port)))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        wait_for(lambda: server.manager.sequences)
        server.quiet(within_s=20)
        # what waits in buffers for a client that is still there is dropped too
        open_ones = server.server.server_state.connections
        wait_for(lambda: not any(each.transport.is_closing() for each in open_ones), 20)


def test_an_error_that_nobody_foresaw_says_nothing_of_the_inside(server, monkeypatch, caplog):
    async def broken(_):
        raise RuntimeError("a secret of the inside")

    monkeypatch.setattr(server.service, "ids", broken)
    answer = short(server)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    wait_for(lambda: "a secret of the inside" in caplog.text)


def test_an_internal_error_in_a_stream_is_its_last_event_without_details(
    server, monkeypatch, caplog
):
    def broken(reply, choice):
        if choice.num_tokens > 1:
            raise RuntimeError("a secret of the inside")
        return b"data: {}\n\n"

    monkeypatch.setattr("quire.serve.completions.CompletionReply.chunk", broken)
    answer = server.post("/v1/completions", LONG | {"stream": True})
    *_, error, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert answer.status_code == 200
    assert json.loads(error)["error"]["type"] == "server_error"
    assert last == "[DONE]"
    assert "secret" not in answer.text
    assert "a secret of the inside" in caplog.text


@pytest.mark.cases(1)
@pytest.mark.parametrize("how", ["grace", "second Ctrl-C"])
def test_requests_beyond_the_grace_of_a_shutdown_end_with_an_error(how, capfd):
    with (
        running(grace_s=0 if how == "grace" else None) as server,
        ThreadPoolExecutor(1) as crew,
    ):
        whole = crew.submit(server.post, "/v1/completions", LONG | {"prompt": "Twice"})
        stream = plain_http.stream(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}
        )
        with stream as answer:
            lines = answer.iter_lines()
            next(lines)
            wait_for(lambda: server.service.num_inflight == 2)
            for _ in range(2 if how != "grace" else 1):
                server.server.handle_exit(signal.SIGINT, None)
            *_, error, last = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(error)["error"]["code"] == "shutting_down"
        assert last == "[DONE]"
        assert (whole.result().status_code, whole.result().headers["retry-after"]) == (503, "10")
        server.quiet(within_s=2)
    said = capfd.readouterr().err
    assert "2 sequences are finished; Ctrl-C again cuts them" in said
    assert "Traceback" not in said


@pytest.mark.ci
def test_while_it_finishes_what_runs_all_else_is_told_so():
    asked = LONG | {"stream": True, "max_tokens": 200}
    with running() as server:
        stream = plain_http.stream("POST", f"{server.url}/v1/completions", json=asked)
        with stream as answer:
            lines = answer.iter_lines()
            next(lines)
            assert server.get("/health").status_code == 200
            server.server.should_exit = True
            wait_for(lambda: server.service.is_ending)
            assert server.get("/health").status_code == 503
            refused = short(server)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "shutting_down"
            assert server.get("/v1/cache").status_code == 200
            *_, last, _ = [line.removeprefix("data: ") for line in lines if line]
        assert json.loads(last)["choices"][0]["finish_reason"] == "length"


def test_a_busy_api_key_leaves_places_to_others():
    with running(keys=KEYS, bounds=Bounds(max_inflight=8)) as server:

        def asked(key, n, **more):
            headers = {"Authorization": f"Bearer key-of-{key}"}
            return {"json": LONG | {"n": n} | more, "headers": headers, "timeout": 20}

        url = f"{server.url}/v1/completions"
        with plain_http.stream("POST", url, **asked("ann", 6, stream=True)) as answer:
            lines = answer.iter_lines()
            next(lines)
            more = plain_http.post(url, **asked("ann", 1))
            assert more.status_code == 429
            assert "2 are kept for other keys" in more.json()["error"]["message"]
            assert plain_http.post(url, **asked("ann", 7)).status_code == 400
            assert plain_http.post(url, **asked("bob", 2, max_tokens=1)).status_code == 200
            assert plain_http.post(url, **asked("bob", 3, max_tokens=1)).status_code == 429
        server.quiet()


def test_an_error_in_the_models_forward_is_told_and_the_server_lives():
    model, _ = loaded()
    with running(model) as server:
        failing = []

        def maybe(*_):
            if failing:
                raise RuntimeError("the layer broke: /secret/path")

        model.model.layers[2].register_forward_pre_hook(maybe)
        stream = plain_http.stream(
            "POST", f"{server.url}/v1/completions", json=LONG | {"stream": True}
        )
        with stream as answer:
            lines = answer.iter_lines()
            next(lines)
            failing.append(1)
            rest = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert "error" in rest[-1]
        assert rest[-1]["error"]["type"] == "server_error"
        answer = short(server)
        assert answer.status_code == 500
        assert "Traceback" not in answer.text
        failing.clear()
        server.quiet()
        assert short(server).status_code == 200
        server.quiet()


def test_a_request_that_can_never_fit_is_refused_and_a_full_pool_is_waited_for():
    with running(num_blocks=16) as server:
        never = server.post("/v1/completions", LONG | {"prompt": "a" * 300, "max_tokens": 8})
        assert never.status_code == 400
        with ThreadPoolExecutor(8) as crew, together(server, 8):
            asked = LONG | {"max_tokens": 100}
            answers = list(crew.map(lambda at: server.post(
                "/v1/completions", asked | {"prompt": f"{at} Once"}), range(8)))  # fmt: skip
        assert [each.status_code for each in answers] == [200] * 8
        assert server.service.running.engine.stats().preemptions > 0
        server.quiet()


def test_tenants_share_nothing_and_only_keys_are_let_in(capfd):
    with running(keys=KEYS) as server:

        def cached(key):
            said = server.client(key).completions.create(
                model="quire-tiny", prompt=TEXT, max_tokens=1
            )
            return said.usage.prompt_tokens_details.cached_tokens

        assert (cached("key-of-ann"), cached("key-of-bob")) == (0, 0)
        assert cached("key-of-ann") == cached("key-of-bob") == 64
        with pytest.raises(openai.AuthenticationError):
            cached("key-of-eve")
        with pytest.raises(openai.AuthenticationError):
            cached("the-operators")
        for path in ("/metrics", "/v1/cache", "/", "/v1/cache/what-if", "/v1/cache/pins"):
            assert server.get(path).status_code == 401
            ann = {"Authorization": "Bearer key-of-ann"}
            assert server.get(path, headers=ann).status_code == 401
            assert server.get(path, auth=("me", "the-operators")).status_code == 200
        assert server.get("/v1/models").status_code == 401
        told = server.post(
            "/v1/cache/explain",
            {"prompt": TEXT, "tenant": "ann"},
            headers={"Authorization": "Bearer the-operators"},
        )
        assert told.json()["cached_tokens"] == 64
        server.quiet()
    out, err = capfd.readouterr()
    assert "key-of" not in out + err
    assert "the-operators" not in out + err


def test_a_request_past_its_deadline_is_told_so_with_all_its_answers(server):
    late = server.post("/v1/completions", LONG | {"n": 3, "deadline_s": 0.05})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_passed")
    assert short(server).status_code == 200


def test_a_request_that_waits_too_long_for_its_turn_is_told_to_come_back():
    with running(max_running=1, bounds=Bounds(max_wait_s=0.2)) as server:
        first = LONG | {"stream": True}
        with plain_http.stream("POST", f"{server.url}/v1/completions", json=first) as answer:
            events = answer.iter_lines()
            next(events)  # it has begun
            for wants_stream in (False, True):
                late = server.post("/v1/completions", LONG | {"stream": wants_stream})
                assert (late.status_code, late.json()["error"]["code"]) == (503, "overloaded")
                assert int(late.headers["Retry-After"]) > 0
            assert "error" not in next(events)  # and goes on
        server.quiet()


def test_a_tier_that_hangs_keeps_nobody_waiting():
    tier = Faulty(Host("64MiB"), FaultPlan(hangs=1.0, hang_s=30.0))
    patience = StackSettings(lookup_timeout_s=0.1, load_timeout_s=0.2, close_timeout_s=0.2)
    with TierStack([tier], patience) as stack, running(tiers=stack) as server:
        begun = time.monotonic()
        asked = [
            server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 2}) for _ in range(3)
        ]
        assert [each.status_code for each in asked] == [200] * 3
        assert time.monotonic() - begun < 15.0
        server.quiet()

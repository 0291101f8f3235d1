"""The proxy before servers that die, hang or fail: answers, and how often a request is sent."""

import json
import socketserver
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest
from upstream_help import FakeUpstream, routed, served, wait_for

import plain_http
from quire.routing import RoundRobin, SessionAffinity
from quire.web.origin import MOST_HEAD
from quire_router.breaker import AFTER, FIRST_S, LONGEST_S, UpstreamBreaker
from quire_router.relay import MADE_BY, MOST_WHOLE


@pytest.fixture
def three():
    """Three servers, and a router before them that takes turns and loses its patience after 2 s."""
    fakes = [FakeUpstream(name) for name in ("one", "two", "three")]
    with ExitStack() as stack:
        urls = [stack.enter_context(served(each.app())) for each in fakes]
        router = stack.enter_context(routed(urls, RoundRobin(), hung_s=0.5))
        router.well(True, True, True)
        yield router, fakes
        for each in fakes:
            each.going_on.set()
        router.idle()


def asked(fakes):
    return sum(len(each.asked) for each in fakes)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_kills_servers_reaches_two_of_them(three, stream):
    router, fakes = three
    for each in fakes:
        each.mood = "mute"
    answer = router.ask(stream=stream)
    assert answer.status_code == 502
    error = answer.json()["error"]
    assert error["code"] == "broken_off"
    assert "upstream 0: " in error["message"]
    assert "sent to 2 upstreams and is not sent again" in error["message"]
    assert asked(fakes) == 2


def test_without_retries_a_request_reaches_one_server():
    fakes = [FakeUpstream(name) for name in ("one", "two")]
    with ExitStack() as stack:
        urls = [stack.enter_context(served(each.app())) for each in fakes]
        router = stack.enter_context(routed(urls, RoundRobin(), retries=0))
        router.well(True, True)
        fakes[0].mood = fakes[1].mood = "busy"
        assert router.ask().status_code == 429
        assert asked(fakes) == 1


def test_a_whole_answer_that_breaks_off_is_not_sent_again(three):
    router, fakes = three
    for each in fakes:
        each.mood = "half"
    answer = router.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "broken_off")
    assert "broke off in its answer" in answer.json()["error"]["message"]
    assert asked(fakes) == 1


def test_requests_of_a_hung_server_go_to_another_one_or_end_with_504(three):
    router, fakes = three
    fakes[0].mood = "hung"
    answer = router.ask()
    assert answer.json()["name"] in ("two", "three")
    assert (len(fakes[0].asked), asked(fakes)) == (1, 2)
    fakes[0].going_on.set()
    router.well(True, True, True)
    fakes[0].going_on.clear()
    for each in fakes:
        each.mood = "hung"
    before = asked(fakes)
    answer = router.ask()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
    assert "has said nothing for" in answer.json()["error"]["message"]
    assert asked(fakes) - before == 2


def test_a_stream_of_a_hung_server_ends_with_an_error(three):
    router, fakes = three
    fakes[0].mood = "stuck"
    answer = router.ask(stream=True)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert json.loads(lines[-2][6:])["error"]["code"] == "broken_off"
    assert asked(fakes) == 1


def test_a_server_that_is_well_and_slow_is_not_hung(three):
    router, fakes = three
    fakes[0].mood = "late"  # later than a server may hang, but its health is answered
    assert router.ask().json()["name"] == "one"
    assert asked(fakes) == 1


def test_an_answer_that_does_not_come_in_time_is_a_504_and_sent_once():
    fakes = [FakeUpstream(name) for name in ("one", "two")]
    with ExitStack() as stack:
        urls = [stack.enter_context(served(each.app())) for each in fakes]
        router = stack.enter_context(routed(urls, RoundRobin(), slow_s=0.5))
        router.well(True, True)
        fakes[0].mood = fakes[1].mood = "late"
        answer = router.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
        assert asked(fakes) == 1


def test_compressed_answers_and_several_cookies_pass_as_they_are(three):
    router, fakes = three
    fakes[0].mood = "packed"
    with plain_http.stream("POST", f"{router.url}/v1/completions", json={}) as answer:
        raw = b"".join(answer.iter_raw())
    assert answer.headers["content-encoding"] == "gzip"
    assert raw == fakes[0].packed
    assert answer.headers.get_list("set-cookie") == ["a=1; Path=/", "b=2"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/responses"),
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/messages/batches"),
        ("POST", "/score"),
        ("POST", "/v1/audio/transcriptions"),
        ("PUT", "/v1/files/a%2Fb?x=1&y=a%20b"),
        ("DELETE", "/v1/files/7"),
        ("GET", "/v1/models/a/b"),
        ("GET", "/slots"),
        ("POST", "/v1/anything/"),
    ],
)
def test_paths_that_the_router_does_not_know_are_passed_on(three, method, path):
    router, _ = three
    body = b"\x00no json" if method in ("POST", "PUT") else None
    answer = plain_http.Client().request(method, router.url + path, content=body)
    assert answer.json() == {"name": "one", "method": method, "target": path, "size": len(body or b"")}  # fmt: skip
    assert answer.headers[MADE_BY] == "0"


def test_requests_that_load_an_adapter_reach_every_server(three):
    router, fakes = three
    answer = router.ask({"lora_name": "a"}, "/v1/load_lora_adapter")
    assert answer.status_code == 200
    assert [len(each.seen) for each in fakes] == [1, 1, 1]
    fakes[1].mood = "refusing"
    assert router.ask({"lora_name": "a"}, "/v1/unload_lora_adapter").status_code == 400


def test_a_socket_upgrade_is_refused(three):
    router, _ = three
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-key": "x" * 22 + "=="}  # fmt: skip
    headers["sec-websocket-version"] = "13"
    assert plain_http.get(f"{router.url}/v1/realtime", headers=headers).status_code in (200, 403)


def test_metrics_count_answers_retries_and_states(three):
    router, fakes = three
    fakes[0].mood = "busy"
    at = int(router.ask().headers[MADE_BY])
    text = plain_http.get(f"{router.url}/metrics").text
    name = router.proxy.upstreams[at].name
    for line in (
        f'quire_router_answers_total{{status="200",upstream="{name}"}} 1.0',
        'quire_router_retries_total{reason="busy"} 1.0',
        f'quire_router_upstream_up{{upstream="{name}"}} 1.0',
        f'quire_router_upstream_breaker{{state="closed",upstream="{name}"}} 1.0',
        "quire_router_first_byte_seconds_count 2.0",
    ):
        assert line in text.splitlines(), text


def test_a_server_that_fails_again_and_again_is_asked_from_time_to_time(three):
    router, fakes = three
    fakes[0].mood = "mute"
    first = router.proxy.upstreams[0]
    for _ in range(20 * AFTER):  # a failure on an idle connection says nothing of the server
        if first.breaker.num_opened:
            break
        wait_for(lambda: first.is_well)
        assert router.ask().status_code == 200
    assert first.breaker.num_opened == 1
    assert len(fakes[0].asked) >= AFTER
    wait_for(lambda: first.is_well)


def test_a_breaker_opens_after_failures_in_a_row_and_closes_with_an_answer():
    now = [0.0]
    breaker = UpstreamBreaker(lambda: now[0])
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.answered()
    assert (breaker.state, breaker.allows) == ("closed", True)
    for _ in range(AFTER):
        breaker.failed()
    assert (breaker.state, breaker.allows) == ("open", False)
    for seconds in (FIRST_S, 2 * FIRST_S, 4 * FIRST_S):
        now[0] += seconds - 0.01
        assert not breaker.allows
        now[0] += 0.02
        assert (breaker.state, breaker.allows) == ("half-open", True)
        trial = breaker.asked()
        assert not breaker.allows
        breaker.failed()
        breaker.left(trial)
    now[0] += LONGEST_S
    breaker.left(breaker.asked())  # its client went
    assert breaker.allows
    breaker.asked()
    breaker.answered()
    assert (breaker.state, breaker.allows) == ("closed", True)


def test_headers_of_tracing_and_of_the_session_pass_and_the_session_decides(three):
    router, fakes = three
    router.proxy._router = SessionAffinity()
    trace = {"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01", "baggage": "a=1"}
    homes = {
        router.ask(headers=trace | {"x-session-id": "mine"}).headers[MADE_BY] for _ in range(4)
    }
    assert len(homes) == 1
    told = fakes[int(homes.pop())].asked[-1][2]
    assert trace.items() <= told.items()
    names = [str(number) for number in range(20)]
    spread = {router.ask(headers={"X-Session-Id": name}).headers[MADE_BY] for name in names}
    assert len(spread) == 3


def test_a_half_open_breaker_allows_one_trial_whoever_else_ends():
    now = [0.0]
    breaker = UpstreamBreaker(lambda: now[0])
    before = breaker.asked()
    for _ in range(AFTER):
        breaker.failed()
    now[0] += FIRST_S
    trial = breaker.asked()
    breaker.left(before)  # sent before it opened
    assert not breaker.allows
    breaker.failed()
    now[0] += 2 * FIRST_S
    assert not breaker.allows  # the trial has not ended
    breaker.left(trial)
    assert breaker.allows


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
ANSWERS = {
    "a head": HEAD,
    "a part of a line": b"HTTP/1.1 2",
    "a whole head": HEAD + b"content-length: 9\r\n\r\n",
    "an endless head": HEAD + b"x: " + b"y" * (MOST_HEAD + 1),
}


@contextmanager
def blunt(answer):
    """A server that answers `/health`, and everything else with these bytes, or none; then it closes the connection."""
    asked = []

    class Blunt(socketserver.StreamRequestHandler):
        def handle(self):
            while line := self.rfile.readline():
                size = 0
                while (header := self.rfile.readline()) not in (b"\r\n", b""):
                    if header.lower().startswith(b"content-length:"):
                        size = int(header.partition(b":")[2])
                self.rfile.read(size)
                if line.startswith(b"GET /health"):
                    self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                    continue
                asked.append(line)
                with suppress(OSError):
                    self.wfile.write(answer)
                return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Blunt) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("kind", ANSWERS)
def test_nothing_is_sent_again_after_the_first_byte_of_a_head(kind):
    with ExitStack() as stack:
        pair = [stack.enter_context(blunt(ANSWERS[kind])) for _ in range(2)]
        router = stack.enter_context(routed([url for url, _ in pair], RoundRobin()))
        router.well(True, True)
        answer = router.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "broken_off")
        assert "broke off in its answer" in answer.json()["error"]["message"]
        assert len(pair[0][1]) + len(pair[1][1]) == 1


def test_without_retries_no_idle_connection_is_used():
    """A server that closes an idle connection as a request comes has perhaps seen it: 502, without any retry."""
    with blunt(b"") as (url, asked), routed([url], RoundRobin(), retries=0) as router:
        router.well(True)
        for number in range(1, 4):
            assert router.ask().status_code == 502
            assert len(asked) == number
            wait_for(lambda: router.proxy.upstreams[0].is_well)
    fake = FakeUpstream("one")
    with served(fake.app()) as url, routed([url], RoundRobin(), retries=0) as router:
        router.well(True)
        origin = router.proxy.upstreams[0].origin
        ask, fresh = origin.ask, []

        def noted(asked, *, is_fresh=False):
            if asked.method == "POST":
                fresh.append(is_fresh)
            return ask(asked, is_fresh=is_fresh)

        origin.ask = noted
        assert [router.ask(["a"]).status_code for _ in range(3)] == [200] * 3
        assert fresh == [True] * 3


def test_an_endless_answer_about_an_adapter_is_a_502():
    body = HEAD + b"\r\n" + b"x" * (MOST_WHOLE + 1)
    with ExitStack() as stack:
        urls = [stack.enter_context(blunt(body))[0] for _ in range(2)]
        router = stack.enter_context(routed(urls, RoundRobin()))
        router.well(True, True)
        answer = router.ask(path="/v1/load_lora_adapter")
        assert answer.status_code == 502
        assert "more than 1,048,576 bytes" in answer.json()["error"]["message"]

"""The relay of `quire tap`: bytes in both directions, ends of all kinds, and what is recorded."""

import gzip
import json
import socket
import stat
import threading
import time

import pytest

from quire.errors import ConfigError
from quire_sim.logs import open_log
from quire_sim.tap.observing import Exchange
from quire_sim.tap.records import MOST_KEYS, KeyNumbers, RecordFile
from quire_sim.tap.relay import Relay
from tap_help import OK, RawServer, asked, post, sent, tapped, wait_for

BODY = b'{"model":"m",\n "messages":[{"role":"user","content":"hi"}]}'
ANSWER = b'{"choices":[{"message":{"content":"ho"}}],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":8}}}'


def whole(body, *headers):
    return [OK + b"".join(h + b"\r\n" for h in headers) + b"Content-Length: %d\r\n\r\n" % len(body) + body]  # fmt: skip


def chunked(*pieces):
    return [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]


@pytest.fixture
def file(tmp_path):
    made = RecordFile(tmp_path / "log.jsonl", 1 << 20)
    yield made
    made.close()


def lines_of(file):
    return [json.loads(line) for line in file._path.read_text().splitlines()]


def test_heads_and_bodies_pass_as_they_are(file):
    packed = gzip.compress(ANSWER)
    said = whole(packed, b"Content-Encoding: gzip", b"Set-Cookie: a=1; Path=/", b"Set-Cookie: b=2",
                 b"X-Request-Id: r7", b"Date: Sun, 29 Nov 2026 10:00:00 GMT", b"Connection: x-own", b"X-Own: 1")  # fmt: skip
    request = post("/v1/chat/completions?beta=a%20b&x=", BODY, "Authorization: Bearer secret-1",
                   "Cookie: c=3", "Accept-Encoding: gzip, br", "X-Stainless: A")  # fmt: skip
    with RawServer(said) as server, tapped(server.url, file=file) as (url, tap):
        head, _, body = b"".join(asked(url, request)).partition(b"\r\n\r\n")
        wait_for(lambda: tap.page.watch.recent)
    assert body == packed
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"http/1.1 200 ok"
    assert [each for each in lines if each.startswith(b"set-cookie")] == [
        b"set-cookie: a=1; path=/",
        b"set-cookie: b=2",
    ]
    assert b"date: sun, 29 nov 2026 10:00:00 gmt" in lines
    assert sum(each.startswith(b"date:") for each in lines) == 1
    assert not any(each.startswith(b"x-own") for each in lines)
    (sent, came), target = server.came[0], b"POST /v1/chat/completions?beta=a%20b&x= HTTP/1.1"
    lines = [each.lower() for each in sent.split(b"\r\n")]
    assert sent.split(b"\r\n")[0] == target
    assert came == BODY
    for header in (b"authorization: bearer secret-1", b"cookie: c=3", b"accept-encoding: gzip, br", b"x-stainless: a"):  # fmt: skip
        assert lines.count(header) == 1
    assert b"host: " + server.url.removeprefix("http://").encode() in lines
    assert not any(each.startswith((b"user-agent", b"accept:")) for each in lines)
    assert b"secret-1" not in file._path.read_bytes()
    (line,) = lines_of(file)
    assert line["request"] == json.loads(BODY)
    assert line["response"] == json.loads(ANSWER)
    assert line["tenant"] == "key-1"
    assert line["end"] == "whole"


def test_chunks_of_a_stream_come_one_by_one_as_the_server_sends_them():
    going = [threading.Event() for _ in range(2)]
    pieces = b"data: 1\n\n", b"data: 2\n\ndata: 3", b"\n\ndata: [DONE]\n\n"
    one, two, three = chunked(*pieces)
    said = [OK + b"Transfer-Encoding: chunked\r\n\r\n" + one, going[0], two, going[1], three + b"0\r\n\r\n"]  # fmt: skip
    with RawServer(said) as server, tapped(server.url) as (url, _):
        came = asked(url, post("/v1/x", BODY))
        got = b""
        for piece, event in ((one, going[0]), (two, going[1])):
            while piece not in got:
                got += next(came)
            event.set()
        got += b"".join(came)
    assert got.partition(b"\r\n\r\n")[2] == one + two + three + b"0\r\n\r\n"


def test_two_chunks_that_come_in_one_read_stay_two():
    one, two = chunked(b"data: 1\n\n", b"data: 2\n\n")
    said = [OK + b"Transfer-Encoding: chunked\r\n\r\n" + one + two + b"0\r\n\r\n"]
    with RawServer(said) as server, tapped(server.url) as (url, _):
        got = b"".join(asked(url, post("/v1/x", BODY)))
    assert got.partition(b"\r\n\r\n")[2] == one + two + b"0\r\n\r\n"


@pytest.mark.parametrize("before_head", [True, False])
def test_a_client_that_goes_ends_its_request_at_the_server(file, before_head):
    never = threading.Event()
    head = [] if before_head else [OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n"]
    with RawServer([*head, never]) as server, tapped(server.url, file=file) as (url, tap):
        came = asked(url, post("/v1/chat/completions", BODY))
        if before_head:
            with sent(url, post("/v1/chat/completions", BODY)):
                wait_for(lambda: server.came)
        else:
            next(came)
            came.close()
        assert server.gone.wait(10)
        wait_for(lambda: tap.page.watch.recent)
        assert tap.page.watch.recent[0].end == "client gone"


def test_a_whole_answer_that_breaks_off_breaks_off_for_the_client():
    said = [OK + b"Content-Length: 100\r\n\r\nhalf"]
    with RawServer(said) as server, tapped(server.url) as (url, tap):
        got = b"".join(asked(url, post("/v1/chat/completions", BODY)))
        wait_for(lambda: tap.page.watch.recent)
    head, _, body = got.partition(b"\r\n\r\n")
    assert body == b"half"
    assert b"content-length: 100" in head.lower()
    assert tap.page.watch.recent[0].end == "server broke off"


def test_a_stream_that_breaks_off_ends_without_its_last_chunk():
    said = [OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"4\r\nhalf\r\n"]
    with RawServer(said) as server, tapped(server.url) as (url, _):
        got = b"".join(asked(url, post("/v1/chat/completions", BODY)))
    assert got.endswith(b"4\r\nhalf\r\n")


def test_a_server_that_does_not_run_is_told_with_502():
    with RawServer() as server:
        pass
    with tapped(server.url) as (url, tap):
        for path in ("/v1/chat/completions", "/v1/messages"):
            got = b"".join(asked(url, post(path, BODY)))
            assert got.startswith(b"HTTP/1.1 502")
            said = json.loads(got.partition(b"\r\n\r\n")[2])
            assert server.url in said["error"]["message"]
        assert said["type"] == "error"
        wait_for(lambda: len(tap.page.watch.recent) == 2)
    assert [each.end for each in tap.page.watch.recent] == ["no server"] * 2


@pytest.mark.parametrize("status", [b"429 Too Many Requests", b"500 Internal", b"204 No Content"])
def test_codes_of_the_server_pass(status):
    body = b"" if status.startswith(b"204") else b'{"error":{}}'
    length = b"" if not body else b"Content-Length: %d\r\n" % len(body)
    said = [b"HTTP/1.1 " + status + b"\r\nRetry-After: 7\r\n" + length + b"\r\n" + body]
    with RawServer(said) as server, tapped(server.url) as (url, _):
        got = b"".join(asked(url, post("/v1/chat/completions", BODY)))
    assert got.split(b" ")[1] == status[:3]
    assert b"retry-after: 7" in got.lower()
    assert got.partition(b"\r\n\r\n")[2] == body


def test_bodies_above_the_limit_pass_and_are_not_kept(file):
    body = b'{"messages":[{"role":"user","content":"' + b"x" * (3 << 20) + b'"}]}'
    with RawServer(whole(body)) as server, tapped(server.url, file=file) as (url, tap):
        got = b"".join(asked(url, post("/v1/chat/completions", body)))
        wait_for(lambda: tap.page.watch.recent)
    assert got.partition(b"\r\n\r\n")[2] == body
    assert server.came[0][1] == body
    assert [line["response"] for line in lines_of(file)] == [None]


def test_a_body_in_chunks_passes_in_chunks():
    request = (
        b"POST /v1/x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    request += b"".join(chunked(b"one", b"two")) + b"0\r\n\r\n"
    with RawServer(whole(b"{}")) as server, tapped(server.url) as (url, _):
        got = b"".join(asked(url, request))
    assert got.endswith(b"{}")
    assert server.came[0][1].count(b"\r\n") >= 4
    assert b"transfer-encoding: chunked" in server.came[0][0].lower()


def test_a_body_passes_whole_to_a_server_that_begins_to_answer_before_it_has_all_of_it():
    head = b"POST /v1/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    with listening, tapped(url) as (relay, _), sent(relay, head + b"3\r\none\r\n") as client:
        server, _ = listening.accept()
        with server:
            came = b""
            while b"one" not in came:
                came += server.recv(1 << 16)
            server.sendall(OK + b"Content-Length: 2\r\n\r\n{")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            for piece in (b"two", b"three"):
                client.sendall(b"".join(chunked(piece)))
                time.sleep(0.05)
            client.sendall(b"0\r\n\r\n")
            while b"0\r\n\r\n" not in came:
                came += server.recv(1 << 16)
            server.sendall(b"}")
    assert b"three" in came


def test_bodies_that_are_no_json_pass_and_are_recorded_as_text(file):
    request, answer = b"\x00\xff not json", b"\xfe plain"
    with RawServer(whole(answer)) as server, tapped(server.url, file=file) as (url, tap):
        got = b"".join(asked(url, post("/v1/audio", request)))
        wait_for(lambda: tap.page.watch.recent)
    assert got.endswith(answer)
    assert server.came[0][1] == request
    (line,) = lines_of(file)
    assert line["request"] == request.decode("utf-8", "replace")
    assert tap.page.watch.recent[0].kind == "unread"


def test_a_request_without_a_body_has_none_at_the_server():
    request = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    with RawServer(whole(b"{}"), whole(ANSWER)) as server, tapped(server.url) as (url, tap):
        got = b"".join(asked(url, request))
        b"".join(asked(url, post("/v1/chat/completions", BODY)))
        wait_for(lambda: tap.page.watch.recent)
    assert got.endswith(b"{}")
    assert b"content-length" not in server.came[0][0].lower()
    assert len(tap.page.watch.recent) == 1


def test_credentials_within_bodies_are_not_recorded(file):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "mcp", "headers": {"Authorization": "Bearer s3"}, "authorization": "s4"}],
            "mcp_servers": [{"authorization_token": "s5"}]}  # fmt: skip
    with RawServer(whole(b"{}")) as server, tapped(server.url, file=file) as (url, tap):
        b"".join(asked(url, post("/v1/chat/completions", json.dumps(body).encode())))
        wait_for(lambda: tap.page.watch.recent)
    assert b"s5" in server.came[0][1]
    text = file._path.read_text()
    assert not any(secret in text for secret in ("s3", "s4", "s5"))


def test_a_record_is_read_as_a_log_of_requests(file, tmp_path):
    with RawServer(whole(ANSWER)) as server, tapped(server.url, file=file) as (url, tap):
        b"".join(asked(url, post("/v1/chat/completions", BODY)))
        wait_for(lambda: tap.page.watch.recent)
    (request,) = open_log(tmp_path / "log.jsonl")
    assert request.usage.cached_tokens == 8
    assert [each.text for each in request.sections] == ["hi"]
    assert request.answer == "ho"
    assert stat.S_IMODE((tmp_path / "log.jsonl").stat().st_mode) == 0o600


def test_a_file_of_records_turns_at_its_limit_and_leaves_longer_lines_out(tmp_path):
    file = RecordFile(tmp_path / "r.jsonl", 110)
    for at in range(9):
        file.write({"number": at, "text": "x" * 30})
    file.write({"text": "x" * 200})
    file.close()
    kept = [*(tmp_path / "r.jsonl.1").read_text().splitlines(), *(tmp_path / "r.jsonl").read_text().splitlines()]  # fmt: skip
    assert [json.loads(line)["number"] for line in kept] == [6, 7, 8]
    assert file.num_omitted == 1
    with pytest.raises(ConfigError, match="cannot write"):
        RecordFile(tmp_path / "none" / "r.jsonl", 100)
    with pytest.raises(ConfigError, match="got 0"):
        RecordFile(tmp_path / "r.jsonl", 0)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a", "http://u:p@a", "http://a?b=c"])
def test_an_upstream_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match="--upstream"):
        Relay(url, print, most=1)


def test_the_page_is_for_this_machine():
    page = b"GET /tap HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n"
    with RawServer() as server, tapped(server.url) as (url, _):
        own = url.removeprefix("http://").encode()
        assert b"quire tap" in b"".join(asked(url, page % own))
        refused = b"".join(asked(url, page % b"evil.example"))
        told = b"".join(asked(url, (page % own).replace(b"/tap", b"/tap/requests")))
    assert refused.startswith(b"HTTP/1.1 403")
    assert json.loads(told.partition(b"\r\n\r\n")[2])["upstream"] == server.url


def test_keys_beyond_a_bound_share_a_name_and_known_ones_keep_theirs():
    numbers = KeyNumbers()
    asked = [
        Exchange("POST", "/", [(b"authorization", b"Bearer %d" % i)], 0.0)
        for i in range(MOST_KEYS + 2)
    ]
    names = [numbers.name_of(each) for each in asked]
    assert names[MOST_KEYS - 1] == f"key-{MOST_KEYS}"
    assert names[MOST_KEYS:] == ["key-more"] * 2
    assert [numbers.name_of(each) for each in asked] == names

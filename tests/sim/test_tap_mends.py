"""Mends in `quire tap`: the server gets the changed request, and the client, the page and the record are told."""

import gzip
import json
import threading

from quire.web.mends import Mends
from quire_sim.tap.records import RecordFile
from tap_help import OK, RawServer, asked, post, sent, tapped, wait_for

ANSWER = OK + b"Content-Length: 2\r\n\r\n{}"
TOOLS = [{"name": name, "description": "d", "input_schema": {}} for name in ("write", "read")]
BODY = json.dumps({"model": "m", "tools": TOOLS, "system": "x-anthropic-billing-header: cch=3f2a1;\nBe kind.",
                   "messages": [{"role": "user", "content": "Hi?"}]}).encode()  # fmt: skip


def mends():
    return Mends(["sort-tools", "drop-lines"])


def relayed(request, **options):
    """Return what the server got, the client's answer, and the relay, for one request through mends."""
    with RawServer([ANSWER]) as server, tapped(server.url, mends=mends(), **options) as (url, tap):
        said = b"".join(asked(url, request))
        wait_for(lambda: tap.page.watch.recent)
    return server.came[0], said, tap


def test_the_server_gets_the_changed_body_and_the_answer_names_the_rules(tmp_path):
    file = RecordFile(tmp_path / "log.jsonl", 1 << 20)
    (head, body), said, tap = relayed(post("/v1/messages?beta=true", BODY), file=file)
    file.close()
    got = json.loads(body)
    assert [each["name"] for each in got["tools"]] == ["read", "write"]
    assert got["system"] == "Be kind."
    lines = head.lower().split(b"\r\n")
    assert lines.count(b"content-length: %d" % len(body)) == 1
    assert sum(line.startswith(b"content-length") for line in lines) == 1
    assert b"x-quire-mended: drop-lines, sort-tools" in said.lower()
    (line,) = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert line["request"] == got
    assert line["mended"] == ["drop-lines", "sort-tools"]
    document = tap.page.watch.document()
    assert document["mends"] == {"drop-lines": 1, "sort-tools": 1}
    assert document["requests"][0].mends[0] == ("drop-lines", "system", "x-anthropic-billing-header: cch=3f2a1;\nBe kind.", "Be kind.")  # fmt: skip


def test_a_body_that_no_rule_changes_passes_byte_for_byte():
    for body in (b'{ "messages": [], "tools": [] }', b"{no", b"[]"):
        (head, came), said, _ = relayed(post("/v1/messages", body))
        assert came == body
        assert b"content-length: %d" % len(body) in head.lower()
        assert b"x-quire-mended" not in said.lower()


def test_a_body_in_chunks_is_read_to_its_end_and_has_a_length_then():
    pieces = [BODY[:50], BODY[50:]]
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    (head, body), _, _ = relayed(head + chunks + b"0\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert json.loads(body)["system"] == "Be kind."


def test_a_gzip_body_stays_one():
    packed = gzip.compress(BODY)
    (head, body), _, _ = relayed(post("/v1/messages", packed, "Content-Encoding: gzip"))
    assert b"content-encoding: gzip" in head.lower()
    assert json.loads(gzip.decompress(body))["system"] == "Be kind."


def test_a_body_above_the_limit_passes_as_it_comes_and_is_counted():
    body = BODY[:-1] + b" " * 5000 + b"}"
    (_, came), said, tap = relayed(post("/v1/messages", body), most=1000)
    assert came == body
    assert b"x-quire-mended" not in said.lower()
    assert tap.relay.mends.num_unread == 1


def test_private_differences_have_no_text():
    _, _, tap = relayed(post("/v1/messages", BODY), is_private=True)
    assert {each[2:] for each in tap.page.watch.document()["requests"][0].mends} == {("", "")}


def test_a_client_that_goes_within_its_body_ends_nothing_else():
    with RawServer([ANSWER]) as server, tapped(server.url, mends=mends()) as (url, _):
        head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 900\r\n\r\n"
        sent(url, head + BODY[:40]).close()
        said = b"".join(asked(url, post("/v1/messages", BODY)))
    assert said.startswith(b"HTTP/1.1 200")
    assert len(server.came) == 1


def test_chunks_of_a_mended_stream_come_one_by_one():
    going = threading.Event()
    answer = [OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nda1\n\r\n", going, b"4\r\nda2\n\r\n0\r\n\r\n"]  # fmt: skip
    with RawServer(answer) as server, tapped(server.url, mends=mends()) as (url, _):
        came = asked(url, post("/v1/messages", BODY))
        seen = b""
        while b"da1" not in seen:
            seen += next(came)
        assert b"da2" not in seen
        going.set()
        assert b"da2" in b"".join(came)

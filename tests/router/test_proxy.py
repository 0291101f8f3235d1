"""The reverse proxy: where requests go, and what clients see of servers that fail."""

import asyncio
import json
import socket

import msgspec
import pytest
from upstream_help import FakeUpstream, routed, served, wait_for

import plain_http
import quire_router.upstreams
from cpu_time import cpu_s
from quire.errors import ConfigError
from quire.routing import RoundRobin
from quire.web.keys import ApiKeys
from quire_router.gateway import _events
from quire_router.prefixes import Asker, Question, keys_of
from quire_router.relay import MADE_BY
from quire_router.upstreams import Upstream

LONG = "A text that is longer than the sixty-four bytes which are looked at as one block. " * 3


@pytest.fixture
def two():
    """Two servers, and a router before them."""
    fakes = FakeUpstream("one"), FakeUpstream("two")
    with served(fakes[0].app()) as one, served(fakes[1].app()) as two, routed([one, two]) as router:
        router.well(True, True)
        yield router, fakes
        router.idle()


@pytest.fixture
def checked_once(monkeypatch):
    """Servers are looked at when the router starts, and never again: one that failed stays so."""
    monkeypatch.setattr(quire_router.upstreams, "CHECK_S", 3600)


def lines(answer):
    return [line for line in answer.text.splitlines() if line.startswith("data: ")]


def test_a_prompt_goes_where_its_beginning_went_and_others_spread(two):
    router, _ = two
    first = router.ask(LONG)
    for at in range(6):
        assert (
            router.ask(LONG + "and on" * at, stream=at % 2 == 0).headers[MADE_BY]
            == first.headers[MADE_BY]
        )
    assert len({router.ask(f"{at} {LONG}").headers[MADE_BY] for at in range(12)}) == 2


def test_a_conversation_and_a_prompt_of_tokens_are_known_again(two):
    router, _ = two
    talk = [{"role": "user", "content": LONG}]
    longer = [
        *talk,
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Go on."},
    ]
    for number, (before, after) in enumerate(
        [
            ({"messages": talk}, {"messages": longer}),
            ({"prompt": [*range(200)]}, {"prompt": [*range(300)]}),
        ]
    ):
        path = ["/v1/chat/completions", "/v1/completions"][number]
        home = router.ask(before, path).headers[MADE_BY]
        assert router.proxy.prefixes.index.num_blocks > 0
        assert {router.ask(after, path).headers[MADE_BY] for _ in range(8)} == {home}


def test_prompts_of_other_servers_own_paths_are_known_again(two):
    router, _ = two
    rest = {"sampling_params": {"max_new_tokens": 4}}
    for path, before, after in [
        ("/generate", {"text": LONG} | rest, {"text": f"{LONG} and on"} | rest),
        ("/generate", {"input_ids": [*range(200)]}, {"input_ids": [*range(300)]}),
        ("/infill", {"input_prefix": LONG[1:]}, {"input_prefix": f"{LONG[1:]} x", "input_suffix": "y"}),
        ("/infill", {"input_extra": [{"text": LONG}], "prompt": "a", "input_prefix": ""},
         {"input_extra": [{"text": LONG}], "prompt": "b", "input_prefix": "c"}),
    ]:  # fmt: skip
        num = router.proxy.counts.num_found
        home = router.ask(before, path).headers[MADE_BY]
        assert {router.ask(after, path).headers[MADE_BY] for _ in range(4)} == {home}, before
        assert router.proxy.counts.num_found == num + 4


def test_the_text_format_of_a_response_is_no_part_of_its_prompt():
    def read(**fields):
        return msgspec.json.decode(json.dumps(fields), type=Question)

    form = {"format": {"type": "json_schema", "schema": {"title": LONG}}}
    who = Asker("key")
    assert keys_of(read(input=LONG, text=form), who) == keys_of(read(input=LONG), who) != []
    assert read(text=LONG).first_prompt == read(text=[LONG, "x"]).first_prompt == LONG
    assert (
        read(input_ids=[1, 2]).first_prompt == read(input_ids=[[1, 2], [3]]).first_prompt == [1, 2]
    )
    assert read(prompt="a", text="b").first_prompt == "a"
    assert not read(text=None, input_ids=None, prompt=None).has_prompt


def test_messages_are_known_again_though_a_line_of_their_system_differs(two):
    router, fakes = two

    def asked(line, *more):
        head = {"type": "text", "text": f"x-anthropic-billing-header: cch={line};"}
        system = [head, {"type": "text", "text": LONG}]
        return {"system": system, "messages": [{"role": "user", "content": LONG}, *more]}

    homes = set()
    for at in range(6):
        other = {"messages": [{"role": "user", "content": f"{at} {LONG}"}]}
        router.ask(other, "/v1/messages")
        answer = router.ask(asked(at), "/v1/messages", params={"beta": "true"})
        homes.add(answer.headers[MADE_BY])
    assert len(homes) == 1
    router.ask(asked(7), "/v1/messages/count_tokens", headers={"x-api-key": "mine"})
    sent = [each for fake in fakes for each in fake.asked if each[0].endswith("count_tokens")]
    assert sent[0][2]["x-api-key"] == "mine"


def test_messages_of_one_user_are_one_session():
    asked = {"session_id": "s", "user": "u", "metadata": {"user_id": "m"}}
    for name, right in (("session_id", "s"), ("user", "u"), ("metadata", "m")):
        assert msgspec.json.decode(json.dumps(asked), type=Question).session == right
        del asked[name]
    for wrong in ([], "a", {"user_id": 1}, {}):
        said = json.dumps({"metadata": wrong})
        assert msgspec.json.decode(said, type=Question).session is None


def test_a_stream_of_messages_that_breaks_off_ends_with_an_error_of_its_shape(two):
    router, fakes = two
    fakes[0].mood = fakes[1].mood = "torn"
    answer = router.ask({"messages": []}, "/v1/messages", stream=True)
    last = answer.text.split("\n\n")[-2]
    assert last.startswith("event: error\ndata: ")
    assert json.loads(last.split("data: ")[1])["error"]["type"] == "api_error"
    assert "[DONE]" not in answer.text


def test_the_proxy_indexes_each_key_and_salt_apart(two):
    router, _ = two
    index = router.proxy.prefixes.index
    sizes = []
    for headers, more in [
        ({}, {}),
        ({}, {}),
        ({"authorization": "Bearer b"}, {}),
        ({}, {"cache_salt": "s"}),
        ({"x-api-key": "b"}, {}),
        ({"x-api-key": "c"}, {}),
    ]:
        router.ask(LONG, headers=headers, **more)
        sizes.append(index.num_blocks)
    each = len(LONG) // 64
    assert sizes == [each, each, 2 * each, 3 * each, 4 * each, 5 * each]


def test_a_request_that_fails_before_its_answer_begins_goes_to_the_other(two):
    router, fakes = two
    home = int(router.ask(LONG).headers[MADE_BY])
    for mood in ("busy", "mute"):
        fakes[home].mood = mood
        for stream in (False, True):
            router.well(True, True)
            answer = router.ask(LONG, stream=stream)
            assert (answer.status_code, answer.headers[MADE_BY]) == (200, str(1 - home))
    fakes[0].mood = fakes[1].mood = "busy"
    router.well(True, True)
    answer = router.ask(LONG)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")


def test_a_refusal_of_an_upstream_is_passed_on_without_a_retry(two):
    router, fakes = two
    fakes[0].mood = fakes[1].mood = "refusing"
    answer = router.ask("Once")
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no such thing")
    assert len(fakes[0].asked) + len(fakes[1].asked) == 1
    broken = plain_http.post(f"{router.url}/v1/completions", content=b"no json", timeout=20)
    assert broken.status_code == 500  # as this server says it


@pytest.mark.usefixtures("checked_once")
def test_a_stream_that_breaks_off_ends_with_an_error_and_the_next_request_works(two):
    router, fakes = two
    fakes[0].mood = fakes[1].mood = "torn"
    answer = router.ask(LONG, stream=True)
    told = lines(answer)
    assert json.loads(told[0][6:])["name"] in ("one", "two")
    assert json.loads(told[1][6:])["error"]["code"] == "broken_off"
    assert told[2:] == ["data: [DONE]"]
    broken = int(answer.headers[MADE_BY])
    assert not router.proxy.upstreams[broken].is_well
    fakes[1 - broken].mood = "well"
    assert lines(router.ask(LONG, stream=True))[1:] == ["data: [DONE]"]


def test_a_client_that_goes_frees_the_server(two):
    router, fakes = two
    fakes[0].mood = fakes[1].mood = "slow"
    with plain_http.stream("POST", f"{router.url}/v1/completions", json={"stream": True}) as answer:
        lines_ = answer.iter_lines()  # one that is forgotten closes the answer
        next(lines_)
        assert sum(each.num_inflight for each in router.proxy.upstreams) == 1
    wait_for(lambda: fakes[0].gone + fakes[1].gone == 1)
    router.idle()


def test_a_router_without_servers_is_unhealthy_until_one_answers():
    with served(FakeUpstream("none").app()) as url:
        pass  # a port where nobody listens any more
    with routed([url]) as router:
        assert plain_http.get(f"{router.url}/health").status_code == 503
        answer = router.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_upstream")
        assert answer.headers["retry-after"] == "1"
        with served(FakeUpstream("late").app(), int(url.rpartition(":")[2])):
            router.well(True)
            assert router.ask().json() == {"name": "late"}
            assert plain_http.get(f"{router.url}/health").status_code == 200
        router.well(False)


def test_headers_and_paths_are_passed_on(two):
    router, fakes = two
    router.ask(headers={"authorization": "Bearer mine", "accept-encoding": "gzip"})
    path, _, headers = (fakes[0].asked + fakes[1].asked)[0]
    assert (path, headers["authorization"]) == ("/v1/completions", "Bearer mine")
    assert headers["accept-encoding"] == "gzip"
    assert plain_http.get(f"{router.url}/v1/models").json()["name"] in ("one", "two")
    state = plain_http.get(f"{router.url}/v1/upstreams").json()
    assert [each["is_well"] for each in state["upstreams"]] == [True, True]
    assert sum(each["requests"] for each in state["upstreams"]) == 2


def test_keys_and_sizes_are_checked_before_anybody_is_asked():
    fake, keys = FakeUpstream("one"), ApiKeys([("ann", "key-of-ann")], "the-operators")
    with served(fake.app()) as url, routed([url], keys=keys, max_body=100) as router:
        router.well(True)
        known = {"authorization": "Bearer key-of-ann"}
        assert router.ask().status_code == 401
        assert router.ask(headers=known).status_code == 200
        assert router.ask("x" * 100, headers=known).status_code == 413
        assert plain_http.get(f"{router.url}/v1/upstreams", headers=known).status_code == 401
        operator = {"authorization": "Bearer the-operators"}
        assert plain_http.get(f"{router.url}/v1/upstreams", headers=operator).status_code == 200
        assert len(fake.asked) == 1


def test_paths_that_a_server_may_read_as_the_operators_need_the_operators_key():
    fake, keys = FakeUpstream("one"), ApiKeys([("ann", "key-of-ann")], "the-operators")
    ann, operator = (f"authorization: Bearer {key}" for key in ("key-of-ann", "the-operators"))
    paths = ["/v1/cache", "/v1/CACHE", "/v1//cache", "/v1/./cache", "/v1/../metrics", "/V1/models"]
    paths += ["/v1/%2e%2e/slots", "/v1/a%2F..%2fcache", "/v1/..;a/slots", "/v1/..%5cslots"]
    with served(fake.app()) as url, routed([url], keys=keys) as router:
        router.well(True)
        for path in [*paths, "/v1/a/..", "//v1/models"]:
            for target in (path, f"http://other{path}"):
                statuses = [raw(router.url, f"GET {target} HTTP/1.1", key)[9:12] for key in (ann, operator)]  # fmt: skip
                assert statuses == [b"401", b"200"], target
        for path in ("/v1/models/a..b/.c/", "/v1/..a/b%2Fc", "/v1/caches"):
            assert raw(router.url, f"GET {path} HTTP/1.1", ann)[9:12] == b"200", path


def raw(url, *lines):
    """Send the lines of a request as they are; return its answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = [*lines[:1], f"host: {host}", "connection: close", *lines[1:]]
        connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n")
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def test_trailers_of_a_request_are_no_headers_at_the_server(two):
    router, fakes = two
    lines = ("POST /v1/completions HTTP/1.1", "transfer-encoding: chunked", "")
    got = raw(router.url, *lines, "2", "{}", "0", "x-late: 1")
    assert got.startswith(b"HTTP/1.1 200 ")
    (told,) = [headers for each in fakes for *_, headers in each.asked]
    assert (told["content-length"], "x-late" in told) == ("2", False)


def test_metadata_that_are_no_text_are_for_the_server_to_refuse(two):
    router, _ = two
    body = b'{"prompt": "a", "metadata": {"user_id": "\xff"}}'
    answer = plain_http.post(f"{router.url}/v1/completions", content=body)
    assert answer.headers[MADE_BY] in ("0", "1")


def test_a_long_line_of_a_stream_costs_little_more_in_many_pieces():
    async def main(num_pieces):
        async def pieces():
            for _ in range(num_pieces):
                yield b"x" * ((1 << 24) // num_pieces)
            yield b"\nlast"

        got = [piece async for piece in _events(pieces(), "/v1/completions")]
        assert [len(piece) for piece in got] == [(1 << 24) + 1, 4]

    few, many = (cpu_s(lambda each=each: asyncio.run(main(each))) for each in (1 << 6, 1 << 13))
    assert many < 30 * few


def test_the_router_decides_which_pages_may_ask():
    fake, page = FakeUpstream("one"), "https://chat.example"
    with served(fake.app()) as url, routed([url], keys=ApiKeys(origins=[page])) as router:
        router.well(True)
        for more in ({}, {"stream": True}):
            answer = router.ask(headers={"origin": page}, **more)
            assert answer.headers["access-control-allow-origin"] == page
        assert "origin" not in fake.asked[0][2]
        assert router.ask(headers={"origin": "https://evil.example"}).status_code == 403
        assert len(fake.asked) == 2


def test_another_router_needs_no_prefixes(two):
    router, _ = two
    router.proxy._router = RoundRobin()
    assert [router.ask(LONG).headers[MADE_BY] for _ in range(4)] == ["0", "1", "0", "1"]


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://host", "http://", "http://me:secret@host"]
)
def test_an_address_that_is_no_upstream_is_refused_without_its_password(url):
    with pytest.raises(ConfigError, match="upstream") as refusal:
        Upstream(url)
    assert "secret" not in str(refusal.value)


def test_an_upstream_may_be_named_with_or_without_v1():
    assert Upstream("http://host:8000/v1/").name == Upstream("http://host:8000").name

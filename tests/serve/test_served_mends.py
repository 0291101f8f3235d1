"""`quire serve --mend` and `--tap`: mended requests find each other in the cache, and the page tells each."""

import pytest
from serve_help import command, fixtures, running

import plain_http
from quire.errors import ConfigError
from quire.web.keys import ApiKeys
from quire.web.mends import Mends
from quire_sim.tap.page import page_around
from tap_help import wait_for

RULES = ["drop-lines", "sort-tools", "sort-keys", "move-lines=Now: .*", "line-ends"]
PROSE = "You tell short stories of lighthouses and of those who keep them. " * 8
server, nothing_stays = fixtures(around=lambda app: page_around(app, "quire-tiny", ApiKeys(), 1 << 20))  # fmt: skip


@pytest.fixture(autouse=True)
def mends(server):
    server.service.mends = Mends(RULES, server.service.log.num_by_mend)
    yield
    server.service.mends = Mends(())


def body(api, number):
    """Return a body that differs from others of its API in its billing line and its time alone."""
    line = f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};"
    system = f"{line}\nNow: 10:0{number}\n{PROSE}".replace("\n", "\r\n" if number % 2 else "\n")
    said = [{"role": "user", "content": f"Who keeps {api}?"}]
    if api == "completions":
        return {"prompt": f"{line}\n{PROSE}{api}.\nWho?", "max_tokens": 2}
    if api == "messages":
        return {"system": [{"type": "text", "text": line}, {"type": "text", "text": system}], "messages": said, "max_tokens": 2}  # fmt: skip
    messages = [{"role": "system", "content": system}, *said]
    if api == "responses":
        return {"input": messages, "max_output_tokens": 2}
    return {"messages": messages, "max_tokens": 2}


PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses", "completions": "/v1/completions"}  # fmt: skip


def cached(told):
    usage = told["usage"]
    if "cache_read_input_tokens" in usage:
        return usage["cache_read_input_tokens"]
    return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]


@pytest.mark.parametrize("api", [*PATHS])
def test_requests_that_differ_in_lines_that_mends_take_find_each_other(server, api):
    for rules, is_found in (([], api == "messages"), (RULES, True)):
        server.service.mends = Mends(rules, server.service.log.num_by_mend)
        server.post("/v1/cache/evict", {"all": True})
        answers = [server.post(PATHS[api], {"model": "quire-tiny"} | body(api, number)) for number in (1, 2)]  # fmt: skip
        assert [each.status_code for each in answers] == [200, 200], answers[0].text
        # without mends, the time of a message stands before the rest, too
        found = cached(answers[1].json())
        assert (found > 100) == (is_found and bool(rules)), rules
        told = answers[1].headers.get("x-quire-mended")
        assert ("drop-lines" in (told or "")) == bool(rules)
    counted = plain_http.get(f"{server.url}/metrics").text
    assert 'quire_mended_requests_total{mend="drop-lines"}' in counted
    assert server.get("/v1/cache").json()["mended"]["drop-lines"] >= 2


def test_counts_and_the_cache_s_paths_read_a_prompt_as_it_is_mended(server):
    given = {"model": "quire-tiny"} | body("chat", 1)
    usage = server.post("/v1/chat/completions", given).json()["usage"]
    counted = server.post("/tokenize", {"messages": body("chat", 2)["messages"]}).json()
    assert counted["count"] == usage["prompt_tokens"]
    explained = server.post("/v1/cache/explain", {"messages": body("chat", 3)["messages"]}).json()
    assert explained["cached_tokens"] > 100


def test_a_refused_request_tells_its_mends_too(server):
    given = body("chat", 1) | {"max_tokens": -1}
    answer = server.post("/v1/chat/completions", {"model": "quire-tiny"} | given)
    assert answer.status_code == 400
    assert "drop-lines" in answer.headers["x-quire-mended"]


def test_the_page_tells_kinds_reuse_and_changes_of_a_stream_without_usage(server):
    before = server.get("/tap/requests").json()["sums"].get("requests", 0)
    said = [{"role": "user", "content": "Who keeps the page?"}]
    for number in (4, 5):
        line = f"x-anthropic-billing-header: cch={number:05x};"
        messages = [{"role": "system", "content": f"{line}\n{PROSE}"}, *said]
        given = {"model": "quire-tiny", "messages": messages, "max_tokens": 2, "stream": True}
        url = f"{server.url}/v1/chat/completions"
        with plain_http.stream("POST", url, json=given, timeout=20) as answer:
            assert answer.headers["x-quire-mended"] == "drop-lines"
            answer.read()
        said += [
            {"role": "assistant", "content": "Ann."},
            {"role": "user", "content": "And by day?"},
        ]
    server.post("/tokenize", {"messages": said})  # which leaves no cache, and no row
    told = {}

    def has_both():  # a request of a test before this one may be read only now
        told.update(server.get("/tap/requests").json())
        is_last = told["requests"] and told["requests"][0]["kind"] == "continuation"
        return is_last and told["sums"]["requests"] >= before + 2

    wait_for(has_both)
    last, first = told["requests"][:2]
    assert last["kind"] == "continuation"
    assert last["nearest"] == first["number"]
    assert last["cached_tokens"] > 100
    assert last["prompt_tokens"] > last["cached_tokens"]
    assert [each[:2] for each in last["mends"]] == [["drop-lines", "messages[0].content"]]
    assert told["upstream"] == "quire-tiny"
    page = server.get("/tap")
    assert page.headers["content-type"].startswith("text/html")


def test_the_page_of_a_server_with_keys_is_the_operators():
    keys = ApiKeys([("ann", "key-of-ann")], "the-operators")
    around = lambda app: page_around(app, "m", keys, 1 << 20)  # noqa: E731 - as short as its use
    with running(keys=keys, around=around) as server:
        for path in ("/tap", "/tap/requests"):
            assert server.get(path).status_code == 401
            assert server.get(path, headers={"authorization": "Bearer key-of-ann"}).status_code == 401  # fmt: skip
            assert server.get(path, headers={"authorization": "Bearer the-operators"}).status_code == 200  # fmt: skip
            assert server.get(path, headers={"authorization": "Bearer the-operators", "origin": "https://x.example"}).status_code == 403  # fmt: skip
        server.post("/v1/completions", {"prompt": "A", "max_tokens": 1}, headers={"x-api-key": "key-of-ann"})  # fmt: skip


@pytest.mark.ci
def test_the_command_takes_rules_and_the_page():
    with command("--kv-memory", "16MiB", "--mend", "sort-tools", "--tap") as (_, said):
        tools = [{"type": "function", "function": {"name": name}} for name in ("b", "a")]
        given = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 1}
        answer = plain_http.post(f"{said['url']}/v1/chat/completions", json=given, timeout=30)
        assert answer.headers["x-quire-mended"] == "sort-tools"
        wait_for(lambda: plain_http.get(f"{said['url']}/tap/requests").json()["requests"])


def test_a_wrong_rule_is_told_before_a_model_is_loaded():
    from quire.cli.serve import serve

    with pytest.raises(ConfigError, match="is no rule"):
        serve(model="quire-tiny", mend=["sort"])
    with pytest.raises(ConfigError, match="no page of --tap"):
        serve(model="quire-tiny", kv_memory="16MiB", replicas=1, tap=True)

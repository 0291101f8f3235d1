"""Mends of the router: by upstream, in what is sent, looked up and told."""

import pytest
from upstream_help import FakeUpstream, routed, served, wait_for

import plain_http
from quire.errors import ConfigError
from quire.routing import RoundRobin
from quire.web.keys import ApiKeys
from quire_router.mending import UpstreamMends

PROSE = "Rules that are longer than the sixty-four bytes which are looked at as one block. " * 3


def chat(number, tools=("b", "a")):
    system = f"x-anthropic-billing-header: cch={number:05x};\n{PROSE}"
    said = [{"role": "system", "content": system}, {"role": "user", "content": "Hi?"}]
    return {"messages": said, "tools": [{"type": "function", "function": {"name": name}} for name in tools]}  # fmt: skip


@pytest.fixture
def two():
    fakes = FakeUpstream("one"), FakeUpstream("two")
    with served(fakes[0].app()) as one, served(fakes[1].app()) as two, routed([one, two]) as router:
        router.well(True, True)
        yield router, fakes, (one, two)
        router.idle()


def ask(router, document):
    return plain_http.post(f"{router.url}/v1/chat/completions", json=document, timeout=20)


def names(document):
    return [each["function"]["name"] for each in document["tools"]]


def test_each_upstream_gets_its_own_mends_and_answers_say_which():
    fakes = FakeUpstream("one"), FakeUpstream("two")
    with served(fakes[0].app()) as one, served(fakes[1].app()) as two, routed([one, two], router=RoundRobin()) as router:  # fmt: skip
        router.well(True, True)
        router.proxy.mends = UpstreamMends(["sort-tools", f"{two}/v1=drop-lines"], [one, two])
        answers = [ask(router, chat(number)) for number in range(4)]
        told = {each.json()["name"]: each.headers["x-quire-mended"] for each in answers}
        assert told == {"one": "sort-tools", "two": "drop-lines, sort-tools"}
        for fake, first in zip(fakes, ("x-anthropic", "Rules that"), strict=True):
            _, document, headers = fake.asked[0]
            assert names(document) == ["a", "b"]
            assert document["messages"][0]["content"].startswith(first)
            assert headers["content-type"] == "application/json"
        counted = plain_http.get(f"{router.url}/metrics").text
        assert 'quire_router_mended_total{mend="sort-tools"} 4.0' in counted
        assert 'quire_router_mended_total{mend="drop-lines"} 2.0' in counted
        router.idle()


def test_prompts_that_are_equal_once_mended_go_to_one_server(two):
    router, fakes, _ = two
    router.proxy.mends = UpstreamMends(["drop-lines", "sort-tools"])
    for number in range(6):
        ask(router, chat(number, ("a", "b") if number % 2 else ("b", "a")))
    assert sorted(len(fake.asked) for fake in fakes) == [0, 6]
    assert router.proxy.counts.num_found == 5


def test_without_mends_bodies_pass_byte_for_byte(two):
    router, _, _ = two
    assert "x-quire-mended" not in ask(router, chat(1)).headers


def test_a_mend_of_an_upstream_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="there is no such upstream"):
        UpstreamMends(["http://x:1=sort-tools"], ["http://a:8000"])
    with pytest.raises(ConfigError, match="is no rule"):
        UpstreamMends(["http://a:8000=sort"], ["http://a:8000"])
    UpstreamMends(["http://x:1=sort-tools"])  # it may come later
    mends = UpstreamMends(["http://a:8000/=drop-lines=Build: .*=x"], ["http://a:8000"])
    assert mends.of("http://a:8000").names == ["drop-lines"]
    assert mends.of("http://b:8000").names == []


def test_the_page_tells_requests_as_their_server_got_them(two):
    page_around = pytest.importorskip("quire_sim.tap.page").page_around
    router, _, _ = two
    router.proxy.mends = UpstreamMends(["drop-lines"])
    app = page_around(router.proxy.app(), "quire route", ApiKeys(), 1 << 20)
    with served(app) as url:
        for number in range(2):
            plain_http.post(f"{url}/v1/chat/completions", json=chat(number), timeout=20)
        wait_for(lambda: len(app.watch.recent) == 2)
        told = plain_http.get(f"{url}/tap/requests").json()
    assert [each["kind"] for each in told["requests"]] == ["repeat", "cold"]
    assert told["mends"] == {"drop-lines": 2}
    assert told["requests"][0]["mends"][0][2].startswith("x-anthropic-billing-header")

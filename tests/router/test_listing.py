"""Upstreams that are added and removed while a proxy runs: a file that is watched, names that DNS resolves."""

import asyncio
from contextlib import ExitStack

import pytest
from upstream_help import FakeUpstream, routed, served, wait_for

import plain_http
from quire.errors import ConfigError
from quire.routing import RoundRobin
from quire_router.candidates import Candidates
from quire_router.listing import RESOLVE_S, Listed, UpstreamList, listed
from quire_router.prefixes import Known
from quire_router.relay import MADE_BY
from quire_router.upstreams import Upstream


def test_upstreams_come_and_go_with_the_file_and_running_requests_end(tmp_path):
    fakes = [FakeUpstream(name) for name in ("one", "two", "three")]
    file = tmp_path / "upstreams"
    with ExitStack() as stack:
        urls = [stack.enter_context(served(each.app())) for each in fakes]
        file.write_text(f"# two of three\n{urls[0]}\n{urls[1]}/v1\n")
        router = stack.enter_context(routed(UpstreamList([], file), RoundRobin()))
        router.well(True, True)

        def names():
            return {router.ask().json()["name"] for _ in range(4)}

        def state():
            return plain_http.get(f"{router.url}/v1/upstreams").json()

        assert names() == {"one", "two"}
        fakes[1].mood = "slow"
        stream = plain_http.stream("POST", f"{router.url}/v1/completions", json={"stream": True})
        answers = [stack.enter_context(stream)]
        while answers[-1].headers[MADE_BY] != "1":
            more = plain_http.stream("POST", f"{router.url}/v1/completions", json={"stream": True})
            answers.append(stack.enter_context(more))
        lines = answers[-1].iter_lines()
        assert "two" in next(lines)
        file.write_text(f"{urls[0]}\n{urls[2]}\n")
        wait_for(lambda: [each["number"] for each in state()["upstreams"]] == [0, 1, 2])
        wait_for(lambda: all(each["is_well"] for each in state()["upstreams"]))
        assert [each["is_leaving"] for each in state()["upstreams"]] == [False, True, False]
        assert names() == {"one", "three"}
        fakes[1].mood = "well"
        assert list(lines)[-2:] == ["data: [DONE]", ""]
        wait_for(lambda: [each["number"] for each in state()["upstreams"]] == [0, 2])
        for wrong, said in (("http://x y z", "3 words"), ("nonsense", "upstream"), ("http://[::1:80", "upstream"), ("", "no upstream")):  # fmt: skip
            file.write_text(wrong)
            wait_for(lambda said=said: said in state()["list_failure"])
            assert names() == {"one", "three"}
        file.unlink()
        wait_for(lambda: "cannot read" in state()["list_failure"])
        file.write_text(f"{urls[1]}\n")
        wait_for(lambda: [each["number"] for each in state()["upstreams"]] == [1])
        assert state()["list_failure"] == ""
        wait_for(lambda: router.proxy.upstreams[0].is_well)
        assert names() == {"two"}


def test_a_name_stands_for_all_its_addresses_and_is_asked_from_time_to_time():
    answers, now, asked = [["10.0.0.1", "fd00::1"]], [0.0], []

    async def resolve(host, port):
        asked.append((host, port))
        if isinstance(answers[0], Exception):
            raise answers[0]
        return answers[0]

    made = UpstreamList(
        [Listed("dns+http://servers:8000/v1")], resolve=resolve, clock=lambda: now[0]
    )
    assert made.changes
    assert made.fixed == []

    def urls():
        return [each.url for each in asyncio.run(made.now())]

    both = ["http://10.0.0.1:8000/v1", "http://[fd00::1]:8000/v1"]
    assert urls() == urls() == both
    assert asked == [("servers", 8000)]
    for error in (UnicodeError("no name"), OSError("no such name")):
        now[0] += RESOLVE_S
        answers[0] = error
        assert urls() == both
        assert f"servers has no address: {error}" in made.failure
    now[0] += RESOLVE_S
    answers[0] = ["10.0.0.2"]
    assert urls() == ["http://10.0.0.2:8000/v1"]
    assert made.failure == ""


def test_localhost_is_resolved_by_the_system():
    made = UpstreamList([Listed("dns+http://localhost:8000")])
    assert "http://127.0.0.1:8000" in [each.url for each in asyncio.run(made.now())]


def test_lists_that_cannot_be_are_refused(tmp_path):
    file = tmp_path / "upstreams"
    for text, said in (
        ("http://a:1\nhttp://a:1/", "given once"),
        ("http://a:1 tcp://a:2\nhttp://b:1", "no FOLLOW"),
        ("http://a:1\nhttp://b:1 tcp://b:2", "FOLLOW; give one for each"),
        ("dns+http://a:1 tcp://a:2", "list each"),
        ("dns+https://a:1", "upstream is http"),
        ("http://a:1 b c", "line 1"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            UpstreamList([], file)
    assert listed(b"\n# none\n", "x") == []


def test_a_request_under_way_does_not_go_to_an_upstream_that_was_removed():
    ones = [Upstream(f"http://127.0.0.1:{port}", port) for port in (1, 2, 3)]
    choice = Candidates(ones, RoundRobin(), ones[1:2], Known({}), None)
    ones[1].is_leaving = True
    assert choice.next() in (ones[0], ones[2])
    ones[0].is_leaving = ones[2].is_leaving = True
    choice.stale = ones[1]
    assert choice.next() is None

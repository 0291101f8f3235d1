"""An operator purges a tenant of a running server: its requests end, others' streams go on, tiers are empty of it."""

import json
import sys
import threading
from pathlib import Path

import openai
import pytest
from serve_help import running, together, wait_for

sys.path.insert(0, str(Path(__file__).parents[1] / "tiers"))

from searching import found_in_files

from cli_help import refusal, shown
from quire.core import Scope
from quire.exchange.hashing import tenant_tag
from quire.web.keys import OPERATOR_ENV, ApiKeys

KEYS = ApiKeys([("ann", "key-of-ann"), ("bob", "key-of-bob")], "the-operators")
OPERATOR = {"Authorization": "Bearer the-operators"}
TEXT = "A tenant's own words that nobody else is to find in here any more. " * 2
MANY = 300
"""Tokens of a stream that goes on while a tenant is purged."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("purged")


@pytest.fixture(scope="module")
def server(folder):
    with running(keys=KEYS, tiers=[f"files:{folder}/kv"]) as made:
        yield made
        made.quiet()


def complete(server, key, **more):
    asked = {"model": "quire-tiny", "prompt": TEXT, "max_tokens": 1, "temperature": 0} | more
    return server.client(key).completions.create(**asked)


def cached(server, key):
    return complete(server, key).usage.prompt_tokens_details.cached_tokens


@pytest.mark.ci
def test_the_tenant_goes_while_anothers_stream_goes_on(server, folder):
    assert cached(server, "key-of-ann") == cached(server, "key-of-bob") == 0
    endless = {"stream": True, "extra_body": {"ignore_eos": True}}
    pin = server.post(
        "/v1/cache/pin", {"prompt": TEXT, "ttl_s": 600, "tenant": "ann"}, headers=OPERATOR
    )
    assert pin.json()["num_tokens"] > 60
    plain = complete(server, "key-of-bob", max_tokens=MANY, extra_body={"ignore_eos": True})
    streamed, ended = [], []

    def stream():
        asked = complete(server, "key-of-bob", max_tokens=MANY, **endless)
        streamed.extend(each.choices[0].text for each in asked)

    def fails():
        try:
            for _ in complete(server, "key-of-ann", max_tokens=1500, **endless):
                pass
        except openai.APIError as error:
            ended.append(error)

    def refused():
        body = {"prompt": TEXT, "max_tokens": 1500, "ignore_eos": True}
        headers = {"Authorization": "Bearer key-of-ann"}
        ended.append(server.post("/v1/completions", body, headers=headers))

    threads = [threading.Thread(target=each) for each in (stream, fails, refused)]
    with together(server, 3):
        for thread in threads:
            thread.start()
    wait_for(lambda: streamed and server.service.running.engine.scheduler.queues.num_running == 3)
    tag = tenant_tag(Scope(tenant="ann"))
    answer = server.post("/v1/cache/purge", {"tenant": "ann"}, headers=OPERATOR)
    assert answer.status_code == 200
    found = answer.json()
    assert (found["complete"], found["reason"], found["requests"]) == (True, "", 2)
    assert found["pins"] == 1
    assert found["blocks"]["full"] > 4
    assert found["tiers"]["files"]["is_complete"]
    assert found_in_files(folder, tag) == []
    for thread in threads:
        thread.join(60)
    whole, broken_off = sorted(ended, key=lambda each: isinstance(each, Exception))
    assert "purged" in str(broken_off)
    assert (whole.status_code, whole.json()["error"]["code"]) == (503, "purged")
    assert whole.headers["retry-after"] == "1"
    assert "".join(streamed) == plain.choices[0].text
    server.quiet()
    server.service.running.engine.tiers.drain(10)
    assert found_in_files(folder, tag) == []
    assert server.get("/v1/cache/pins", headers=OPERATOR).json()["data"] == []
    assert cached(server, "key-of-ann") == 0
    assert cached(server, "key-of-bob") > 60
    assert server.get("/metrics", headers=OPERATOR).status_code == 200


@pytest.mark.parametrize(
    "document", [{}, {"tenant": ""}, {"tenant": 3}, {"tenant": None}, {"tenant": "a", "all": True}]
)
def test_a_body_that_names_no_tenant_is_refused(server, document):
    answer = server.post("/v1/cache/purge", document, headers=OPERATOR)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_clients_and_strangers_may_not_purge(server):
    for headers in ({}, {"Authorization": "Bearer key-of-ann"}):
        assert server.post("/v1/cache/purge", {"tenant": "ann"}, headers=headers).status_code == 401


def test_the_command_purges_a_server_with_the_operators_key(server, tmp_path):
    cached(server, "key-of-ann")
    ask = ("cache", "purge", "--url", server.url, "--tenant", "ann")
    assert "401" in refusal(*ask)
    found = json.loads(shown(*ask, "--json", env={OPERATOR_ENV: "the-operators"}))
    assert (found["complete"], found["server"]) == (True, server.url)
    assert found["blocks"]["full"] > 0
    assert cached(server, "key-of-ann") == 0
    assert "one of a tier's PLACE and --url" in refusal(*ask, str(tmp_path))
    assert "http://" in refusal("cache", "purge", "--url", "file:///etc", "--tenant", "a")
    assert "cannot be asked" in refusal(
        "cache", "purge", "--url", "http://127.0.0.1:9", "--tenant", "a"
    )

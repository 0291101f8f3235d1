"""Responses behind a router: a request that names one goes to the server that keeps it."""

import sys
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest
from upstream_help import routed

import plain_http

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))

from serve_help import running

from quire.routing import RoundRobin
from quire.web.clients import HOME


@pytest.fixture(scope="module")
def two():
    """Two servers of quire-tiny, and a router before them that takes turns."""
    with ExitStack() as stack:
        servers = [stack.enter_context(running(num_blocks=256)) for _ in range(2)]
        router = stack.enter_context(routed([each.url for each in servers], RoundRobin()))
        router.well(True, True)
        yield router, servers


def client_of(router):
    return plain_http.openai_client(router.url, "none")


def respond(client, **given):
    return client.responses.create(
        model="quire-tiny", input="What is a list?", max_output_tokens=4, **given
    )


def test_a_response_is_gone_on_from_read_and_dropped_where_it_is_kept(two):
    router, servers = two
    client = client_of(router)
    firsts = [respond(client) for _ in range(4)]
    homes = {each.home for each in router.proxy.upstreams}
    assert {each.id[5:13] for each in firsts} == homes
    for first in firsts * 2:
        second = respond(client, previous_response_id=first.id)
        assert second.id[5:13] == first.id[5:13]
        assert second.usage.input_tokens > first.usage.input_tokens
        assert second.usage.input_tokens_details.cached_tokens >= 16
        assert client.responses.retrieve(first.id).id == first.id
        assert client.responses.input_items.list(second.id).data
        counted = client.responses.input_tokens.count(
            model="quire-tiny", input="What is a list?", previous_response_id=first.id
        )
        assert counted.input_tokens == second.usage.input_tokens
    for first in firsts:
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
    router.idle()
    for server in servers:
        server.quiet()


def test_a_stream_goes_on_from_a_response(two):
    client = client_of(two[0])
    first = respond(client)
    *_, last = respond(client, previous_response_id=first.id, stream=True)
    assert last.response.id[5:13] == first.id[5:13]
    assert last.response.previous_response_id == first.id


def test_a_response_whose_server_is_gone_is_not_found(two):
    client = client_of(two[0])
    for name in ("resp_0123abcd_1", "resp_1", "nonsense"):
        with pytest.raises(openai.BadRequestError, match=r"previous response .* not found"):
            respond(client, previous_response_id=name)


def test_a_client_names_no_home_through_a_router(two):
    router, _ = two
    for home in ("0123abcd", "no digest"):
        said = respond(client_of(router), extra_headers={HOME: home})
        assert said.id[5:13] in {each.home for each in router.proxy.upstreams}

"""Clients that the tests have, by each feature: the cells of `benchmarks/clients`, whose table docs/clients.md has."""

import asyncio
import copy
import sys
from pathlib import Path

import pytest
from serve_help import running, tiny

from quire.serve.service import Bounds
from quire.web.keys import ApiKeys

FOLDER = Path(__file__).parents[2] / "benchmarks" / "clients"
sys.path.append(str(FOLDER))

import cells  # noqa: E402
import client_anthropic  # noqa: E402
import client_openai  # noqa: E402


@pytest.fixture(scope="module")
def server():
    keys = ApiKeys([("clients", cells.KEY)], cells.OPERATOR_KEY)
    bounds = Bounds(max_inflight=cells.MAX_INFLIGHT)
    with running(keys=keys, bounds=bounds) as made:
        yield made
        made.quiet()


@pytest.fixture(scope="module")
def thinking():
    """A server whose model reasons if a request wants that."""
    tokenizer = copy.deepcopy(tiny()[1])
    tokenizer.chat_template += cells.THINKING
    with running(
        keys=ApiKeys([("clients", cells.KEY)], cells.OPERATOR_KEY), tokenizer=tokenizer
    ) as made:
        yield made
        made.quiet()


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("client", "feature"),
    [
        pytest.param(each, feature, id=f"{each.__name__}-{feature}")
        for each in (client_openai, client_anthropic)
        for feature in cells.features(vars(each))
        if feature != "reasoning"
    ],
)
def test_a_client_has_a_feature(server, client, feature):
    with asyncio.Runner() as loop:
        cells.call(getattr(client, feature), cells.Server(server.url, "quire-tiny"), loop)
    server.quiet()


@pytest.mark.parametrize("client", [client_openai, client_anthropic])
def test_a_client_shows_reasoning(thinking, client):
    with asyncio.Runner() as loop:
        cells.call(client.reasoning, cells.Server(thinking.url, "quire-tiny"), loop)


def test_a_cell_that_fails_is_told_by_its_line(capsys, monkeypatch, server):
    def chat(server):
        raise ValueError("no\nanswer")

    monkeypatch.setattr(sys, "argv", ["client", server.url, "quire-tiny", "", "chat,stream"])
    cells.main({"chat": chat, "stream": lambda server: None, "n": chat, "__file__": __file__})
    assert capsys.readouterr().out.splitlines() == [
        '{"feature": "chat", "said": "ValueError: no answer"}',
        '{"feature": "stream", "said": "yes"}',
    ]

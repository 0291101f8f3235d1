"""Answers of all APIs tell their `timings`: llama-server's names, and the steps of quire's engine."""

import json

import anthropic
import pytest
from serve_help import fixtures

from quire.serve.replies import ENGINE

server, nothing_stays = fixtures()

CHAT = {"model": "quire-tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ASKED = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
    ("/v1/messages", CHAT),
]


def events(answer):
    lines = [line[5:].strip() for line in answer.text.splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def check(timings, prompt_tokens):
    assert timings["engine"] == ENGINE
    assert timings["cache_n"] + timings["prompt_n"] == prompt_tokens
    assert timings["predicted_n"] == 4
    steps = timings["prompt_steps"]
    assert sum(tokens for _, tokens, _ in steps) == timings["prompt_n"]
    assert steps[-1][2] == 0
    assert timings["arrived_step"] < steps[0][0] <= steps[-1][0] == timings["last_step"] - 3
    assert timings["prompt_ms"] > 0
    assert timings["predicted_ms"] > 0
    assert timings["queue_ms"] >= 0


def prompt_tokens(usage):
    if "cache_read_input_tokens" in usage:
        return (
            usage["input_tokens"]
            + usage["cache_read_input_tokens"]
            + usage["cache_creation_input_tokens"]
        )
    return usage.get("prompt_tokens") or usage["input_tokens"]


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_whole_answers_tell_the_steps(server, path, body):
    answer = server.post(path, body).json()
    check(answer["timings"], prompt_tokens(answer["usage"]))


@pytest.mark.parametrize(("path", "body"), ASKED)
@pytest.mark.parametrize("with_usage", [False, True])
def test_streams_tell_the_steps_once_at_their_end(server, path, body, with_usage):
    if with_usage and path not in {"/v1/messages", "/v1/responses"}:
        body = body | {"stream_options": {"include_usage": True}}
    told = events(server.post(path, body | {"stream": True}))
    places = [each.get("response", each) for each in told]
    with_timings = [each for each in places if "timings" in each]
    (last,) = with_timings
    usage = last.get("usage")
    check(last["timings"], prompt_tokens(usage) if usage else 8 if "chat" in path else 5)


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"n": 2},
        {"prompt": ["a", "b"], "max_tokens": 2},
        {"prompt": "a", "n": 2, "max_tokens": 2},
    ],
)
def test_several_answers_tell_no_steps(server, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert "timings" not in server.post(path, body).json()
    assert not any("timings" in each for each in events(server.post(path, body | {"stream": True})))


def test_the_steps_of_one_engine_go_on(server):
    asked = CHAT | {"messages": [{"role": "user", "content": "Hello again, " * 8}]}
    first, second = (server.post("/v1/chat/completions", asked).json()["timings"] for _ in range(2))
    assert second["arrived_step"] == first["last_step"]
    assert second["cache_n"] > 0
    assert second["cache_n"] + second["prompt_n"] == first["prompt_n"]


def test_the_openai_client_reads_answers_with_timings(server):
    client = server.client()
    whole = client.chat.completions.create(**CHAT)
    assert whole.choices[0].message.content is not None
    assert whole.model_extra["timings"]["prompt_steps"]
    *_, last = client.chat.completions.create(**CHAT, stream=True)
    assert last.model_extra["timings"]["predicted_n"] == 4
    made = client.responses.create(model="quire-tiny", input="Hello", max_output_tokens=4)
    assert made.model_extra["timings"]["predicted_n"] == 4


def test_the_anthropic_client_reads_answers_with_timings(server):
    http = anthropic.DefaultHttpxClient(verify=False)
    client = anthropic.Anthropic(
        base_url=server.url, api_key="none-needed", http_client=http, max_retries=0
    )
    made = client.messages.create(**CHAT)
    assert made.model_extra["timings"]["predicted_n"] == 4
    with client.messages.stream(**CHAT) as stream:
        told = [*stream]
        final = stream.get_final_message()
    assert final.usage.output_tokens == 4
    assert any(
        "timings" in (each.model_extra or {}) for each in told if each.type == "message_delta"
    )

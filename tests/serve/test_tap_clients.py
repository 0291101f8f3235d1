"""`quire tap` before `quire serve`: OpenAI's and Anthropic's clients get the same bytes, and each request is told."""

import json
import re

import anthropic
import pytest
from serve_help import fixtures

import plain_http
from quire_sim.logs import open_log
from quire_sim.logs.streams import answer_of_stream
from quire_sim.tap.records import RecordFile
from tap_help import tapped, wait_for

server, nothing_stays = fixtures()

SYSTEM = "You tell short stories of lighthouses and of those who keep them. " * 8
TIMINGS = re.compile(rb',"timings":{[^}]*}')
VARIES = re.compile(
    rb'"(id|created|created_at|completed_at|item_id|request_id|system_fingerprint)": ?("[^"]*"|[\d.]+)'
)


def chat(*texts, system=SYSTEM):
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages]


@pytest.fixture
def tap(server, tmp_path):
    file = RecordFile(tmp_path / "log.jsonl", 1 << 24)
    with tapped(server.url, file=file) as (url, made):
        made.url, made.path = url, tmp_path / "log.jsonl"
        yield made
    file.close()


BODIES = [
    ("/v1/chat/completions", {"messages": chat("Who?"), "max_tokens": 5}),
    ("/v1/chat/completions", {"messages": chat("Who?"), "max_tokens": 5, "stream": True,
                              "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": chat("Who?"), "max_tokens": 4, "stream": True}),
    ("/v1/completions", {"prompt": "Once upon", "max_tokens": 5, "stop": ["a"]}),
    ("/v1/responses", {"input": "Who?", "max_output_tokens": 5, "stream": True}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 5, "stream": True}),
    ("/v1/messages", {"messages": [], "max_tokens": 5}),
    ("/v1/chat/completions", {"messages": chat("Who?"), "max_tokens": -1}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_answers_through_a_relay_are_equal(server, tap, path, body):
    body = {"model": "quire-tiny", "temperature": 0} | body
    server.post(path, body)  # so that both find the same in the cache
    answers = []
    for url in (server.url, tap.url):
        with plain_http.stream("POST", f"{url}{path}", json=body, timeout=20) as answer:
            body_told = b"".join(answer.iter_raw())
            named = {name: text for name, text in answer.headers.items()
                     if name not in ("date", "x-request-id", "request-id") and "duration" not in name}  # fmt: skip
            answers.append((answer.status_code, named, body_told))
    assert _clean(answers[1]) == _clean(answers[0])


def _clean(answer):
    status, headers, body = answer
    if headers["content-type"].startswith("text/event-stream"):  # a busy server joins events
        return status, headers, answer_of_stream(body.decode())
    body = TIMINGS.sub(b"", VARIES.sub(rb'"\1":0', body))
    return status, {k: v for k, v in headers.items() if k != "content-length"}, body


def test_a_talk_of_openais_client_is_told_as_kinds_and_reuse(tap):
    client = plain_http.openai_client(tap.url)
    ask = {"model": "quire-tiny", "max_tokens": 4, "temperature": 0}
    said = [client.chat.completions.create(messages=chat(*texts), **ask) for texts in (
        ("Who keeps the light?",),
        ("Who keeps the light?", "Ann.", "And by day?"),
    )]  # fmt: skip
    changed = chat("Who keeps the light?", "Ann.", "And by day?", system=f"It is 10:07. {SYSTEM}")
    client.chat.completions.create(messages=changed, **ask)
    stream = client.chat.completions.create(
        messages=chat("Who keeps the light?", "Ann.", "And by day?", "Bea.", "Why?"),
        stream=True, stream_options={"include_usage": True}, **ask,
    )  # fmt: skip
    last = [*stream][-1].usage
    wait_for(lambda: len(tap.page.watch.recent) == 4)
    seen = [*tap.page.watch.recent]
    assert [each.kind for each in seen] == ["cold", "continuation", "rewrite", "continuation"]
    assert [each.end for each in seen] == ["whole"] * 4
    assert (seen[2].path, seen[2].at, seen[2].nearest) == ("messages[0].content", 0, 2)
    assert seen[2].lost_tokens > 0
    assert seen[2].this.startswith("It is 10:07.")
    told = said[1].usage.prompt_tokens_details.cached_tokens
    assert (seen[1].cached_tokens, seen[1].prompt_tokens) == (told, said[1].usage.prompt_tokens)
    assert seen[3].cached_tokens == last.prompt_tokens_details.cached_tokens > 0
    requests = [*open_log(tap.path)]
    assert [each.usage.cached_tokens for each in requests] == [each.cached_tokens for each in seen]


@pytest.mark.parametrize("stream", [False, True])
def test_tools_of_anthropics_client_are_a_round_trip(tap, stream):
    client = anthropic.Anthropic(base_url=tap.url, api_key="k", max_retries=0)
    tools = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}]
    talk = [{"role": "user", "content": "Look out."}]
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Fog."}
    more = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    ask = {"model": "quire-tiny", "max_tokens": 4, "system": SYSTEM, "tools": tools}
    for messages in (talk, talk + more):
        if stream:
            with client.messages.stream(messages=messages, **ask) as events:
                usage = events.get_final_message().usage
        else:
            usage = client.messages.create(messages=messages, **ask).usage
    wait_for(lambda: len(tap.page.watch.recent) == 2)
    seen = [*tap.page.watch.recent]
    assert [each.kind for each in seen] == ["cold", "tool round trip"]
    assert seen[1].cached_tokens == usage.cache_read_input_tokens > 0
    whole = usage.input_tokens + usage.cache_read_input_tokens
    assert seen[1].prompt_tokens == whole + (usage.cache_creation_input_tokens or 0)
    assert b'"k"' not in tap.path.read_bytes()


def test_a_client_that_goes_frees_its_blocks(server, tap):
    client = plain_http.openai_client(tap.url)
    stream = client.completions.create(
        model="quire-tiny", prompt="Once", max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    )  # fmt: skip
    next(iter(stream))
    stream.close()
    server.quiet()
    wait_for(lambda: tap.page.watch.recent)
    assert tap.page.watch.recent[0].end == "client gone"


def test_the_records_of_a_stream_have_its_events(tap):
    client = plain_http.openai_client(tap.url)
    [*client.responses.create(model="quire-tiny", input="Who?", max_output_tokens=4, stream=True)]
    wait_for(lambda: tap.page.watch.recent)
    line = json.loads(tap.path.read_text())
    assert line["response"].startswith(("event:", "data:"))
    (request,) = open_log(tap.path)
    assert request.usage.prompt_tokens == tap.page.watch.recent[0].prompt_tokens > 0

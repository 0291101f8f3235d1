"""Fields of requests: offered, accepted without effect, refused by name, or told to be unknown."""

import json
from pathlib import Path

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serve_help import fixtures, wait_for

from quire.serve.fields import ACCEPTED, ELSEWHERE, MAX_TOLD, REFUSED, unknown_in
from quire.serve.message_requests import MessageRequest
from quire.serve.protocol import ChatRequest, CompletionRequest, Detokenize
from quire.serve.responses import ResponseRequest
from quire.web.errors import ApiError

TALK = [{"role": "user", "content": "What is a list?"}]
PATHS = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 2},
    "/v1/completions": {"prompt": "A list", "max_tokens": 2},
}
RESPONSES = {
    "/v1/responses": {"input": "A list", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "A list"},
}
MESSAGES = {
    "/v1/messages": {"messages": TALK, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": TALK},
}
KINDS = [ChatRequest, CompletionRequest]

server, nothing_stays = fixtures()


def offered(kind):
    return {*kind.__struct_fields__} - ELSEWHERE[kind]


def unknown(kind, **given):
    return unknown_in(kind, json.dumps(given).encode())


@pytest.mark.parametrize("kind", KINDS)
def test_a_known_field_that_is_not_offered_is_refused_by_name(kind):
    names = {*REFUSED} - offered(kind)
    assert {"suffix", "use_beam_search"} <= names
    for name in names:
        for value in ("much", 3, 0, ["x"], {"a": None}, 0.5):
            with pytest.raises(ApiError, match=f"^{name} is not offered here") as told:
                unknown(kind, **{name: value})
            assert (told.value.status, told.value.param) == (400, name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_refused_field_that_asks_for_nothing_is_as_if_it_were_absent(kind):
    for name in REFUSED:
        for value in (None, False, "", [], {}, REFUSED[name]):
            assert unknown(kind, **{name: value}) == []


@pytest.mark.parametrize("kind", KINDS)
def test_fields_that_are_offered_or_change_no_answer_are_taken_silently(kind):
    assert unknown(kind, **dict.fromkeys(offered(kind) | ACCEPTED, "x")) == []
    assert not ACCEPTED & ({*REFUSED} | {*kind.__struct_fields__})
    assert ELSEWHERE[kind] <= {*REFUSED}


def test_unknown_names_are_told_unless_null_and_never_as_a_header_cannot_have_them():
    names = {"temprature": 1, "top-q": None, "a\r\nb": 1, "": 2, "ü": 3, "x" * 65: 4}
    assert unknown(ChatRequest, **names) == ["temprature", "?", "?", "?", "?"]
    assert unknown(Detokenize, tokens=[], suffix="a", seed=1) == ["suffix", "seed"]


def test_the_client_is_told_of_ignored_fields_and_the_operator_how_many(server):
    def count():
        (line,) = (
            line
            for line in server.get("/metrics").text.splitlines()
            if line.startswith("quire_ignored_fields_total")
        )
        return float(line.split()[1])

    before = count()
    completions = server.client().chat.completions.with_raw_response
    asked = {"model": "quire-tiny", "messages": TALK, "max_tokens": 2, "user": "me", "store": True}
    given = {"temprature": 0, "top-q": 1, "nothing": None}
    for stream in (False, True):
        told = completions.create(**asked, stream=stream, extra_body=given)
        assert told.headers["X-Quire-Ignored"] == "temprature, top-q"
        assert told.parse()
    assert "X-Quire-Ignored" not in completions.create(**asked).headers
    assert count() == before + 4
    assert "temprature" not in server.get("/metrics").text
    many = {f"f{at}": at for at in range(MAX_TOLD + 5)}
    answer = server.post("/tokenize", {"prompt": "A"} | many)
    assert answer.headers["X-Quire-Ignored"] == ", ".join([*many][:MAX_TOLD])
    assert count() == before + 4 + len(many)


def test_the_official_client_is_refused_what_is_not_offered(server):
    client = server.client()
    asked = {"model": "quire-tiny", "max_tokens": 2}
    with pytest.raises(openai.BadRequestError, match="suffix is not offered"):
        client.completions.create(prompt="A", suffix="b", **asked)
    with pytest.raises(openai.BadRequestError, match="web_search_options is not offered"):
        client.chat.completions.create(messages=TALK, web_search_options={"a": 1}, **asked)
    with pytest.raises(openai.BadRequestError, match="messages is not offered"):
        client.completions.create(prompt="A", extra_body={"messages": TALK}, **asked)


@pytest.mark.parametrize("name", ["suffix", "never_heard_of"])
def test_a_value_of_such_a_field_that_is_no_json_is_a_bad_request(server, name):
    for value in (b"[" * 50_000, b'"\xff"', b'"\\ud800"'):
        body = b'{"prompt": "A", "max_tokens": 1, "%s": %s}' % (name.encode(), value)
        assert server.post("/v1/completions", content=body).status_code in (200, 400)


def test_the_page_of_the_server_lists_every_field():
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text("utf-8")
    of_requests = page.split("## Request fields")[1].split("\n## ")[0]
    names = {
        *REFUSED,
        *ACCEPTED,
        *ChatRequest.__struct_fields__,
        *CompletionRequest.__struct_fields__,
    }
    assert [name for name in sorted(names) if f"`{name}`" not in of_requests] == []
    of_responses = page.split("## OpenAI's responses")[1].split("\n## ")[0]
    names = {*ResponseRequest.__struct_encode_fields__} - {*ChatRequest.__struct_fields__}
    assert [name for name in sorted(names) if f"`{name}`" not in of_responses] == []


VALUES = st.sampled_from(
    [
        None, True, False, 0, 1, -1, 3, 2**40, 2**70, 0.5, -0.5, 1e300, "", "a", "none", "required",
        [], ["a"], [1], [[1, 2]], [None], ["a", 1], {}, {"a": 1}, {"type": "text"}, {"5": 1},
        {"type": "json_object"}, {"type": "regex", "regex": "ab|c"}, {"regex": "[a-c]{1,4}"},
        {"regex": "("}, {"include_usage": True}, {"choice": ["yes", "no"]}, "start: /[ab]{1,3}/",
        [{"type": "function", "function": {"name": "now"}}], {"name": "now"},
        [{"type": "function", "name": "now"}], {"type": "function", "name": "now"}, {"effort": "low"},
        [{"role": "user", "content": "A"}, {"type": "reasoning", "summary": None}], {"format": {"type": "text"}},
        [{"type": "function_call_output", "call_id": "a", "output": "b"}], ["message.output_text.logprobs"],
        {"type": "ephemeral"}, {"type": "enabled"}, {"type": "any"}, {"type": "tool", "name": "now"},
        [{"type": "text", "text": "a"}], [{"type": "image"}], [{"name": "now", "input_schema": {}}],
        [{"role": "assistant", "content": "A"}], [{"role": "user", "content": [{"type": "tool_result"}]}],
        {"edits": [{"type": "a"}]}, {"format": {"type": "json_schema", "schema": {"type": "null"}}},
    ]
)  # fmt: skip
"""Values of all types: each is right for some field, and wrong for others."""

NAMES = st.sampled_from(
    sorted(
        {
            *(*ACCEPTED, *REFUSED, *ChatRequest.__struct_fields__),
            *(*CompletionRequest.__struct_fields__, *ResponseRequest.__struct_encode_fields__),
            *MessageRequest.__struct_fields__,
        }
    )
)
DOCUMENTS = st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=6)


@pytest.mark.cases(20)
@settings(max_examples=150)
@given(
    path=st.sampled_from([*PATHS, "/tokenize", *RESPONSES, *MESSAGES]),
    document=DOCUMENTS,
    is_whole=st.booleans(),
)
def test_no_document_makes_the_server_fail_and_nothing_is_held_after_it(
    server, path, document, is_whole
):
    plain = (PATHS | RESPONSES | MESSAGES).get(path, {"prompt": "A"})
    if is_whole:
        document |= plain
    if document.get("max_tokens") not in (None, -1, 0, 1, 3):
        document["max_tokens"] = 3
    if path in RESPONSES and document.get("max_output_tokens") not in (None, -1, 0, 1, 3):
        document["max_output_tokens"] = 3
    if document.get("n") == document.get("best_of") == 2**40:
        document["n"] = 2
    answer = server.post(path, document)
    assert answer.status_code in (200, 400, 404, 504), (document, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]
        assert ("type" in answer.json()) == (path in MESSAGES)
    wait_for(lambda: server.service.places.num_taken == 0)

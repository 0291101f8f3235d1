"""OpenAI's responses on quire-tiny, asked by the official client."""

import json
import math
from pathlib import Path

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from serve_help import fixtures, in_pieces, running

import plain_http
from quire.serve.responses import ResponseRequest
from quire.web.keys import ApiKeys

TALK = "What is a list?"
EVENTS = TypeAdapter(ResponseStreamEvent)

server, nothing_stays = fixtures()


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def respond(client, said=TALK, **given):
    options = {"max_output_tokens": 12, "temperature": 0, **given}
    return client.responses.create(model="quire-tiny", input=said, **options)


def chat(client, messages, **given):
    options = {"max_tokens": 12, "temperature": 0, **given}
    return client.chat.completions.create(model="quire-tiny", messages=messages, **options)


def user(text):
    return {"role": "user", "content": text}


ADD = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


class OkOrNot(BaseModel):
    """A form of an answer that ends."""

    ok: bool


def test_a_response_says_what_a_chat_says(client):
    said, wanted = respond(client), chat(client, [user(TALK)])
    assert said.output_text == wanted.choices[0].message.content
    assert (said.status, said.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert said.usage.input_tokens == wanted.usage.prompt_tokens
    assert (said.usage.output_tokens, said.usage.total_tokens) == (12, wanted.usage.total_tokens)
    (message,) = said.output
    assert (message.role, message.status, message.content[0].annotations) == ("assistant", "incomplete", [])  # fmt: skip


def test_a_response_repeats_what_was_asked_and_is_one_of_the_clients_types(server):
    asked = {
        "input": [user(TALK)], "instructions": "Be short.", "metadata": {"a": "b"}, "tools": [ADD],
        "temperature": 0, "top_p": 0.5, "max_output_tokens": 3, "parallel_tool_calls": False, "user": "u",
        "tool_choice": "none", "text": {"format": {"type": "text"}}, "store": False, "service_tier": "auto",
        "truncation": "disabled", "reasoning": None, "include": ["reasoning.encrypted_content"], "max_tool_calls": 4,
        "safety_identifier": "s", "prompt_cache_key": "k", "stream_options": None, "background": False,
    }  # fmt: skip
    said = server.post("/v1/responses", asked).json()
    Response.model_validate(said)
    changed = {"input", "text", "service_tier", "reasoning", "include", "stream_options"}
    assert {name: said[name] for name in asked.keys() - changed} == {
        name: asked[name] for name in asked.keys() - changed
    }
    assert said["text"] == {"format": {"type": "text"}, "verbosity": "medium"}


def test_a_stream_has_typed_events_in_order(server, client, monkeypatch):
    in_pieces(monkeypatch)
    asked = {"input": TALK, "max_output_tokens": 12, "temperature": 0, "stream": True}
    lines = server.post("/v1/responses", asked).text.split("\n\n")
    assert lines.pop() == ""
    names, events = [], []
    for line in lines:
        name, data = line.split("\n")
        names.append(name.removeprefix("event: "))
        events.append(EVENTS.validate_json(data.removeprefix("data: ")))
    assert names == [each.type for each in events]
    assert [each.sequence_number for each in events] == [*range(len(events))]
    deltas = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert len(deltas) > 1
    assert names == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        *["response.output_text.delta"] * len(deltas), "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert "".join(deltas) == respond(client).output_text == events[-1].response.output_text
    assert {getattr(each, "item_id", None) for each in events} - {None} == {
        events[-1].response.output[0].id
    }


def test_the_clients_stream_helper_reads_a_structured_answer_to_its_end(client):
    given = {"model": "quire-tiny", "input": TALK, "text_format": OkOrNot}
    with client.responses.stream(**given) as stream:
        kinds = [each.type for each in stream]
        final = stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_parsed.ok in (True, False)
    parsed = client.responses.parse(**given)
    assert (parsed.status, parsed.output_parsed.ok in (True, False)) == ("completed", True)
    assert parsed.completed_at is not None
    said = respond(client, text={"format": {"type": "json_object"}}, max_output_tokens=200)
    assert said.text.format.type == "json_object"
    assert said.output_text.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_function_is_called_and_its_output_is_read(client, choice):
    given = {"tools": [ADD], "tool_choice": choice, "max_output_tokens": 60}
    said = respond(client, **given)
    (call,) = said.output
    assert (call.type, call.name, call.status, said.status) == ("function_call", "add", "completed", "completed")  # fmt: skip
    assert 0 <= json.loads(call.arguments)["a"] <= 9
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "It is 4."}
    went_on = respond(client, [output], previous_response_id=said.id, tools=[ADD])
    by_hand = respond(client, [user(TALK), call.model_dump(exclude_none=True), output], tools=[ADD])
    assert went_on.output_text == by_hand.output_text
    assert went_on.usage.input_tokens == by_hand.usage.input_tokens
    items = client.responses.input_items.list(went_on.id, order="asc").data
    assert [each.type for each in items] == ["message", "function_call", "function_call_output"]
    assert items[1].arguments == call.arguments
    parts = [{"type": "input_text", "text": "It is "}, {"type": "input_text", "text": "4."}]
    given = {"previous_response_id": said.id, "tools": [ADD]}
    in_parts = respond(client, [output | {"output": parts}], **given)
    assert in_parts.usage.input_tokens == went_on.usage.input_tokens


def test_a_streamed_call_has_its_events(client):
    given = {"tools": [ADD], "tool_choice": "required", "max_output_tokens": 60, "stream": True}
    events = list(respond(client, **given))
    kinds = [each.type.removeprefix("response.") for each in events]
    assert kinds == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    assert events[3].delta == events[4].arguments == events[5].item.arguments
    assert events[2].item.arguments == ""


def test_a_response_goes_on_from_another_which_is_found_in_the_cache(server, client):
    first = "Some words that fill blocks: " + " ".join(map(str, range(40)))
    said = respond(client, first, instructions="Be long.", max_output_tokens=40)
    more = respond(client, "Go on", previous_response_id=said.id, instructions="Be long.")
    system = {"role": "system", "content": "Be long."}
    answer = {"role": "assistant", "content": said.output_text}
    talk = [system, user(first), answer, user("Go on")]
    assert more.output_text == chat(client, talk).choices[0].message.content
    size = server.manager.block_size
    before = said.usage.total_tokens - 1  # the last token is not computed
    assert more.usage.input_tokens_details.cached_tokens == before // size * size
    assert more.previous_response_id == said.id
    without = respond(client, "Go on", previous_response_id=said.id)
    assert without.usage.input_tokens == more.usage.input_tokens - len(
        "sBe long."
    )  # one token of the role
    assert without.instructions is None
    third = respond(client, "And", previous_response_id=more.id)
    assert len(client.responses.input_items.list(third.id).data) == 5


def test_a_response_is_found_listed_and_deleted(client):
    said = respond(client, [user("one"), user("two"), user("three")], metadata={"a": "b"})
    assert client.responses.retrieve(said.id) == said
    listed = client.responses.input_items.list(said.id, limit=2)
    assert (listed.has_more, len(listed.data)) == (True, 2)
    texts = [each.content[0].text for each in client.responses.input_items.list(said.id, limit=1)]
    assert texts == ["three", "two", "one"]
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "msg_none"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.responses.input_items.list(said.id, **wrong)
    with pytest.raises(openai.BadRequestError, match="stream is not offered"):
        client.responses.retrieve(said.id, stream=True)
    client.responses.delete(said.id)
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):  # fmt: skip
        with pytest.raises(openai.NotFoundError, match="not found: the server keeps"):
            ask(said.id)


def test_an_item_stands_for_itself_by_reference(client):
    said = respond(client)
    reference = {"type": "item_reference", "id": said.output[0].id}
    by_id = respond(client, [user(TALK), reference, user("Go on")])
    whole = [user(TALK), {"role": "assistant", "content": said.output_text}, user("Go on")]
    assert by_id.usage.input_tokens == respond(client, whole).usage.input_tokens
    with pytest.raises(openai.NotFoundError, match="item 'msg_none' not found") as raised:
        respond(client, [{"id": "msg_none"}])
    assert raised.value.param == "input"


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_not_stored_is_not_kept(server, client, stream):
    before = dict(server.service.kept._kept[None])
    if stream:
        name = list(respond(client, store=False, stream=True))[-1].response.id
    else:
        name = respond(client, store=False).id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name)
    with pytest.raises(openai.BadRequestError, match="store: false") as raised:
        respond(client, previous_response_id=name)
    assert raised.value.code == "previous_response_not_found"
    assert raised.value.param == "previous_response_id"
    assert server.service.kept._kept[None] == before


def test_a_streamed_response_is_kept_before_its_end_is_told(client):
    for event in respond(client, stream=True):
        if event.type == "response.incomplete":
            assert respond(client, "Go on", previous_response_id=event.response.id).output
            assert client.responses.retrieve(event.response.id) == event.response


def test_log_probabilities_are_those_of_a_chat(client):
    include = ["message.output_text.logprobs"]
    given = {"include": include, "top_logprobs": 2}
    part = respond(client, **given).output[0].content[0]
    wanted = chat(client, [user(TALK)], logprobs=True, top_logprobs=2).choices[0].logprobs.content
    told = [(each.token, each.logprob, each.bytes) for each in part.logprobs]
    assert told == [(each.token, pytest.approx(each.logprob, abs=1e-3), each.bytes) for each in wanted]  # fmt: skip
    assert {len(each.top_logprobs) for each in part.logprobs} == {2}
    deltas = [each for each in respond(client, **given, stream=True) if "text.delta" in each.type]
    assert sum(len(each.logprobs) for each in deltas) == 12
    with pytest.raises(openai.BadRequestError, match="top_logprobs needs include"):
        respond(client, top_logprobs=2)


def test_tokens_of_an_input_are_counted_without_an_answer(client):
    given = {"instructions": "Be short.", "tools": [ADD]}
    told = client.responses.input_tokens.count(model="quire-tiny", input=TALK, **given)
    assert told.input_tokens == respond(client, **given).usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="- input is empty"):
        client.responses.input_tokens.count(model="quire-tiny", input=[])


def test_tenants_have_responses_of_their_own_and_a_purge_drops_them():
    keys = ApiKeys([("a", "key-of-a-0"), ("b", "key-of-b-0")], "operator-0")
    with running(keys=keys) as server:
        a, b = server.client("key-of-a-0"), server.client("key-of-b-0")
        said = respond(a)
        assert a.responses.retrieve(said.id).id == said.id
        with pytest.raises(openai.NotFoundError) as raised:
            b.responses.retrieve(said.id)
        with pytest.raises(openai.NotFoundError) as unknown:
            b.responses.retrieve("resp_none")
        assert str(raised.value) == str(unknown.value).replace("resp_none", said.id)
        with pytest.raises(openai.BadRequestError, match="previous response"):
            respond(b, previous_response_id=said.id)
        with pytest.raises(openai.NotFoundError, match="item"):
            respond(b, [{"type": "item_reference", "id": said.output[0].id}])
        with pytest.raises(openai.NotFoundError):
            b.responses.delete(said.id)
        kept = respond(b)
        operator = {"Authorization": "Bearer operator-0"}
        purged = server.post("/v1/cache/purge", {"tenant": "a"}, headers=operator).json()
        assert (purged["responses"], purged["complete"]) == (1, True)
        with pytest.raises(openai.NotFoundError):
            a.responses.retrieve(said.id)
        assert b.responses.retrieve(kept.id).id == kept.id


IMAGE = {"type": "input_image", "image_url": "https://a/b.png"}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}

BAD = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [user("a"), user([IMAGE])]}, "input[1].content[0]"),
    ({"input": [user([{"type": "input_file"}])]}, "input[0].content[0]"),
    ({"input": [{"type": "computer_call"}]}, "input[0]"),
    ({"input": [{"role": "user"}]}, "input[0]"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "name": "add"}]}, "input[0]"),
    ({"input": [CALL | {"arguments": "{"}]}, "input"),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "4"}]}, "input"),
    ({"input": "a" * 9000}, "input"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 10**6}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [ADD, {"type": "mcp", "server_label": "s"}]}, "tools[1]"),
    ({"tools": [{"type": "function", "function": ADD}]}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "name": "sub"}, "tools": [ADD]}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "name": "a"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"truncation": "none"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"include": ["file_search_call.results"]}, "include"),
    ({"metadata": {"a": "b" * 513}}, "metadata[...]"),
    ({"metadata": {str(at): "" for at in range(17)}}, "metadata"),
    ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ({"messages": [user("a")]}, "messages"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"n": 2}, "n"),
    ({"stream_options": {}}, "stream_options"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_is_refused_by_name_and_holds_nothing(server, stream):
    for given, param in BAD:
        asked = {"input": TALK, "max_output_tokens": 2, "stream": stream} | given
        if stream and "stream_options" in given:
            continue
        answer = server.post("/v1/responses", asked)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), given
        assert error["message"]
        assert not error["message"].startswith("messages: ")
        assert server.service.num_inflight == 0


@pytest.mark.parametrize("wrong", [[{}], [[]]])
def test_each_field_of_a_wrong_type_is_refused_by_its_name(server, wrong):
    for name in ResponseRequest.__struct_encode_fields__:
        answer = server.post("/v1/responses", {"input": TALK, name: wrong})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"].partition("[")[0].partition(".")[0] == name
    assert server.service.num_inflight == 0


def test_a_model_that_is_not_served_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.responses.create(model="gpt-5", input=TALK)


def test_fields_of_quire_are_those_of_chats(client):
    given = {"ignore_eos": True, "min_tokens": 3, "cache_salt": "mine", "session_id": "s"}
    said = respond(client, extra_body=given, max_output_tokens=5)
    assert said.usage.output_tokens == 5
    assert said.usage.input_tokens_details.cached_tokens == 0
    assert math.isclose(said.temperature, 0)


def test_a_client_that_goes_ends_its_request_and_nothing_is_kept(server):
    asked = {"input": TALK, "ignore_eos": True, "max_output_tokens": 4000, "stream": True}
    before = len(server.service.kept._kept[None])
    with plain_http.stream("POST", f"{server.url}/v1/responses", json=asked, timeout=20) as answer:
        next(answer.iter_lines())
    server.quiet()
    assert len(server.service.kept._kept[None]) == before


def test_a_forced_schema_that_leads_nowhere_is_refused(client):
    form = {"type": "json_schema", "name": "a", "schema": {"$ref": "#"}, "strict": True}
    with pytest.raises(openai.BadRequestError, match=r"text\.format leads to a place"):
        respond(client, text={"format": form})


def test_the_example_of_the_page_runs(server, capsys):
    page = (Path(__file__).parents[2] / "docs/serve.md").read_text("utf-8")
    section = page.split("## OpenAI's responses")[1]
    example = section.split("```")[1].replace("http://127.0.0.1:8000", server.url)
    told = {}
    exec(example, told)
    *_, cached = capsys.readouterr().out.split()
    assert int(cached) == told["first"].usage.total_tokens // 16 * 16

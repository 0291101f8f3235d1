"""Answers of a required form, by vLLM's names and OpenAI's, asked by the official client."""

import json
import re

import openai
import pytest
from serve_help import fixtures

TALK = [{"role": "user", "content": "What is a list?"}]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
          "additionalProperties": False}  # fmt: skip
LARK = 'start: "Lists" rest\nrest: " are" | " hold " /[a-z]{2,4}/'
GBNF = 'root ::= "Lists" rest\nrest ::= " are" | " hold " [a-z] [a-z]'
LISTS = r"Lists( are| hold [a-z]{2,4})"

server, nothing_stays = fixtures()


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def chat(client, **extra):
    asked = {"model": "quire-tiny", "messages": TALK, "max_tokens": 60, "temperature": 0}
    return client.chat.completions.create(**asked, extra_body=extra).choices[0].message.content


def complete(client, **extra):
    asked = {"model": "quire-tiny", "prompt": "A", "max_tokens": 60, "temperature": 2, "seed": 3}
    return client.completions.create(**asked, extra_body=extra).choices[0].text


def is_ok(text):
    return json.loads(text)["ok"] in (True, False)


def is_object(text):
    return isinstance(json.loads(text), dict)


FORMS = {
    "json": (SCHEMA, is_ok),
    "regex": ("[a-c]{4}-[0-9]{1,4}!", lambda text: re.fullmatch("[a-c]{4}-[0-9]{1,4}!", text)),
    "choice": (["yes", "no", "[a-z]+"], ["yes", "no", "[a-z]+"].__contains__),
    "grammar": (LARK, lambda text: re.fullmatch(LISTS, text)),
}
ASKED = [
    *(({f"guided_{kind}": given}, matches) for kind, (given, matches) in FORMS.items()),
    *(({"structured_outputs": {kind: given}}, matches) for kind, (given, matches) in FORMS.items()),
    ({"guided_json": json.dumps(SCHEMA)}, is_ok),
    ({"guided_grammar": GBNF}, lambda text: re.fullmatch(LISTS, text)),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, is_ok),
    ({"response_format": {"type": "regex", "regex": "ab+c"}}, lambda text: re.fullmatch("ab+c", text)),
    ({"response_format": {"type": "grammar", "grammar": LARK}}, lambda text: re.fullmatch(LISTS, text)),
    ({"response_format": {"type": "text"}, "guided_choice": ["a"], "guided_regex": None}, "a".__eq__),
]  # fmt: skip


@pytest.mark.cases(6)
@pytest.mark.parametrize(("asked", "matches"), ASKED)
@pytest.mark.parametrize("say", [chat, complete])
def test_an_answer_has_the_form_that_a_field_asks_for(client, say, asked, matches):
    text = say(client, **asked)
    assert matches(text), text


@pytest.mark.parametrize(
    "asked",
    [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
)
def test_an_answer_is_any_json_object(server, asked):
    bias = {str(ord("}")): 100}
    text = chat(server.client(), **asked, logit_bias=bias)
    assert json.loads(text) == {}


BAD = [
    ({"guided_regex": "a(b"}, "guided_regex", r"regex parse error:\n    a\(b\n     \^\nerror: unclosed group"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
    ({"guided_grammar": "start: a\na: nothing"}, "guided_grammar", r"2\(4\): unknown name: \"nothing\""),
    ({"guided_grammar": 'root ::= "a" | ('}, "guided_grammar", "line 1"),
    ({"guided_json": {"type": "objct"}}, "guided_json", "objct"),
    ({"guided_choice": []}, "guided_choice", "length >= 1"),
    ({"structured_outputs": {"regex": "["}}, "structured_outputs", "unclosed character class"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "regex and choice"),
    ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs", "structural_tag"),
    ({"response_format": {"type": "regex"}}, "response_format", "needs regex"),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "structural_tag"),
    ({"response_format": {"type": "regex", "regex": "["}}, "response_format", "unclosed character class"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex", "guided_regex and guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "and guided_regex"),
    ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "structured_outputs", "and guided_json"),
    ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "structured_outputs"),
]  # fmt: skip


@pytest.mark.cases(6)
@pytest.mark.parametrize(("asked", "param", "says"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_that_cannot_be_is_refused_by_the_field_and_place(
    server, asked, param, says, stream
):
    document = {"messages": TALK, "max_tokens": 4, "stream": stream} | asked
    answer = server.post("/v1/chat/completions", document)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert re.search(says, error["message"]), error["message"]


def test_a_forced_call_leaves_no_room_for_another_form(client):
    tool = {"type": "function", "function": {"name": "now"}}
    with pytest.raises(openai.BadRequestError, match="tool_choice and guided_regex both say"):
        chat(client, tools=[tool], tool_choice="required", guided_regex="a")


def test_a_forced_call_precedes_the_form_of_text(server):
    tool = {"type": "function", "function": {"name": "now"}}
    form = {"type": "json_schema", "json_schema": {"name": "ok", "schema": SCHEMA}}
    asked = {"messages": TALK, "tools": [tool], "max_tokens": 60, "response_format": form}
    called, told = (
        server.post("/v1/chat/completions", asked | {"tool_choice": choice}).json()["choices"][0]
        for choice in ("required", "none")
    )
    assert called["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert called["message"]["content"] is None
    assert is_ok(told["message"]["content"])


def test_a_tool_whose_schema_cannot_be_is_refused_as_such(client):
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "objct"}}}
    with pytest.raises(openai.BadRequestError, match=r"tools cannot be used: .*objct"):
        chat(client, tools=[tool], tool_choice="required")

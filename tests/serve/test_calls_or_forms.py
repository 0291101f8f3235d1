"""`tool_choice: "auto"` beside a form: an answer has the form, or calls a tool as the chat template writes it."""

import copy
import json
import sys
from pathlib import Path

import msgspec
import pytest
from serve_help import tiny

from quire.chat import StructuredOutputs
from quire.chat.calls import called_or_formed
from quire.chat.grammars import Grammars
from quire.serve.protocol import ChatRequest

sys.path.insert(0, str(Path(__file__).parents[1] / "chat"))

from templates_help import dressed
from test_forced_calls import FORMS, TOOLS, served

TALK = [{"role": "user", "content": "Look."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "look"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


def asked(**more):
    return {"messages": TALK, "tools": TOOLS, "response_format": FORM, "max_tokens": 200, **more}


def is_formed(text):
    said = json.loads(text)
    return said["name"] in ("Ann", "look") and said["old"] in (True, False)


def check_choice(choice):
    """Check an answer, and return whether it calls a tool."""
    message = choice["message"]
    if not message.get("tool_calls"):
        assert choice["finish_reason"] == "stop"
        assert is_formed(message["content"])
        return False
    assert (choice["finish_reason"], message["content"]) == ("tool_calls", None)
    (call,) = message["tool_calls"]
    assert call["function"]["name"] in ("look", "find", "now")
    json.loads(call["function"]["arguments"])
    return True


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_has_its_form_or_is_a_call(name):
    with served(name) as server:
        url, kinds = "/v1/chat/completions", set()
        for seed in range(6):
            more = {"n": 8, "temperature": 3, "seed": seed}
            said = server.post(url, asked(**more)).json()
            kinds |= {check_choice(each) for each in said["choices"]}
            if kinds == {True, False}:
                break
        assert kinds == {True, False}
        for choice, kind in (("none", False), ("required", True)):
            said = server.post(url, asked(tool_choice=choice)).json()
            assert check_choice(said["choices"][0]) == kind
        server.quiet()


def test_a_stream_and_a_response_have_the_form_or_the_call():
    with served("hermes") as server:
        opener = server.service.reader.tokenizer.convert_tokens_to_ids("<tool_call>")
        for bias in (100, -100):
            biased = {"logit_bias": {opener: bias}, "temperature": 0}
            lines = server.post("/v1/chat/completions", asked(stream=True, **biased)).text
            deltas = [json.loads(each[6:])["choices"][0] for each in lines.split("\n\n")[:-2]]
            calls = [call for each in deltas for call in each["delta"].get("tool_calls", ())]
            text = "".join(each["delta"].get("content") or "" for each in deltas)
            assert deltas[-1]["finish_reason"] == ("tool_calls" if bias > 0 else "stop")
            assert (len(calls), bool(text)) == ((1, False) if bias > 0 else (0, True))
            flat = [{"type": "function", "parameters": None, **each["function"]} for each in TOOLS]
            form = {"type": "json_schema", "name": "person", "schema": PERSON}
            given = {"input": "Look.", "tools": flat, "text": {"format": form}, "max_output_tokens": 200}  # fmt: skip
            (item,) = server.post("/v1/responses", given | biased).json()["output"]
            assert item["type"] == ("function_call" if bias > 0 else "message")
            assert bias > 0 or is_formed(item["content"][0]["text"])
        server.quiet()


def test_a_template_without_json_leaves_the_form_alone():
    with served("xml") as server:
        said = server.post("/v1/chat/completions", asked(n=4, temperature=3, seed=1)).json()
        assert not any(check_choice(each) for each in said["choices"])


def test_a_form_or_a_tool_that_cannot_be_is_refused_and_a_schema_s_unknown_words_are_not():
    with served("hermes") as server:
        url = "/v1/chat/completions"
        for form in ({"type": "regex", "regex": "["}, {"type": "grammar", "grammar": "start: a"}):
            error = server.post(url, asked(response_format=form)).json()["error"]
            assert error["param"] == "response_format"
        odd = {"type": "object", "properties": {"a": {"type": "string", "contentEncoding": "x"}}, "unevaluatedItems": 3}  # fmt: skip
        tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
        assert server.post(url, asked(tools=[tool], max_tokens=3)).status_code == 200
        server.quiet()


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"regex": r"a/b\/[/}]"}, "a/b//", "a/b/x"),
        ({"regex": "(?i:a)|b"}, "A", "B"),
        ({"choice": ["a{", "b/c", ""]}, "b/c", "a"),
        ({"json_object": True}, '{"a": 1}', "[1]"),
        ({"json": PERSON}, '{"name": "Ann", "old": true}', '{"name": "Bob", "old": true}'),
        ({"grammar": 'start: "a" call_0 /[}]/\ncall_0: "b"'}, "ab}", "b"),
        ({"grammar": 'root ::= "a" | "b" "}"'}, "b}", "b"),
    ],
)
@pytest.mark.parametrize("tags", [None, ("<think>", "</think>"), ("", "</think>")])
def test_forms_of_all_kinds_stand_beside_calls(form, right, wrong, tags):
    tokenizer = copy.deepcopy(tiny()[1])
    end = dressed(tokenizer, "hermes")
    request = msgspec.convert({"messages": TALK, "tools": TOOLS}, ChatRequest)
    made = called_or_formed(request, StructuredOutputs(**form), tokenizer)
    grammars = Grammars(tokenizer, len(tokenizer), [end])
    call = '<tool_call>\n{"name": "look", "arguments": ' + json.dumps(
        {"path": "the file", "lines": [1, 20], "deep": {"is": "on"}}
    )
    before = "" if tags is None else f"{tags[0]}some thought</think>\n"
    for text, is_right in ((right, True), (call + "}\n</tool_call>", True), (wrong, False)):
        grammar = grammars.open(*made.grammar_of, tags)
        ids = tokenizer(before + text, add_special_tokens=False)["input_ids"]
        taken = grammar._matcher.try_consume_tokens(ids)
        assert (taken == len(ids) and grammar._matcher.is_accepting()) == is_right, text

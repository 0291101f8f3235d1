"""`functions` and `function_call` of chats, the old form of tools: the same prompts, and answers in the old form."""

import json

import openai
import pytest
from serve_help import fixtures

from quire.chat.conversation import ANY_ID

server, nothing_stays = fixtures()

SAID = [{"role": "user", "content": "Add one and two."}]
ADD = {
    "name": "add",
    "description": "adds",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
NOW = {"name": "now"}
TOOLS = [{"type": "function", "function": each} for each in (ADD, NOW)]
CALLED = {"name": "add", "arguments": '{"a": 1}'}
BACK = [
    {"role": "assistant", "content": None, "function_call": CALLED},
    {"role": "function", "name": "add", "content": "3"},
]
BACK_IN_TOOLS = [
    {"role": "assistant", "content": None, "tool_calls": [{"id": ANY_ID, "type": "function", "function": CALLED}]},
    {"role": "tool", "tool_call_id": ANY_ID, "name": "add", "content": "3"},
]  # fmt: skip


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def chat(client, messages=SAID, **given):
    options = {"max_tokens": 60, "temperature": 0, **given}
    return client.chat.completions.create(model="quire-tiny", messages=messages, **options)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (None, None),
        ("auto", "auto"),
        ("none", "none"),
        ({"name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
@pytest.mark.parametrize(("old_back", "new_back"), [([], []), (BACK, BACK_IN_TOOLS)])
def test_functions_make_the_prompt_and_the_answer_of_tools(client, old, new, old_back, new_back):
    more = {"extra_body": {"return_token_ids": True}}
    said = chat(client, SAID + old_back, functions=[ADD, NOW], **more, **({"function_call": old} if old else {}))  # fmt: skip
    wanted = chat(client, SAID + new_back, tools=TOOLS, **more, **({"tool_choice": new} if new else {}))  # fmt: skip
    assert said.prompt_token_ids == wanted.prompt_token_ids
    (choice,), (like,) = said.choices, wanted.choices
    assert choice.token_ids == like.token_ids
    assert choice.message.content == like.message.content
    assert choice.message.tool_calls is None
    if like.message.tool_calls:
        assert (choice.finish_reason, like.finish_reason) == ("function_call", "tool_calls")
        assert choice.message.function_call.name == "add"
        assert choice.message.function_call.arguments == like.message.tool_calls[0].function.arguments  # fmt: skip
    else:
        assert (choice.finish_reason, choice.message.function_call) == (like.finish_reason, None)


def test_a_stream_has_the_call_in_the_old_form(client):
    given = {"functions": [ADD], "function_call": {"name": "add"}, "n": 2, "seed": 3}
    whole = chat(client, temperature=1, **given)
    name, arguments, ends = ["", ""], ["", ""], {}
    for chunk in chat(client, temperature=1, stream=True, **given):
        for choice in chunk.choices:
            assert choice.delta.tool_calls is None
            if called := choice.delta.function_call:
                name[choice.index] += called.name or ""
                arguments[choice.index] += called.arguments or ""
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    assert ends == {0: "function_call", 1: "function_call"}
    assert name == ["add", "add"]
    assert arguments == [each.message.function_call.arguments for each in whole.choices]
    for each in arguments:
        assert 0 <= json.loads(each)["a"] <= 9


def test_a_call_that_is_cut_is_none(client):
    said = chat(client, functions=[ADD], function_call={"name": "add"}, max_tokens=5).choices[0]
    assert (said.finish_reason, said.message.function_call) == ("length", None)


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"functions": [ADD], "tools": TOOLS}, "functions"),
        ({"functions": [ADD], "tool_choice": "required"}, "functions"),
        ({"functions": [ADD], "function_call": {"name": "sub"}}, "function_call"),
        ({"functions": [ADD], "function_call": "required"}, "function_call"),
        ({"function_call": {"name": "add"}}, "function_call"),
        ({"functions": [{"description": "adds"}]}, "functions[0]"),
        ({"messages": [*SAID, BACK[0] | BACK_IN_TOOLS[0]]}, "messages[1]"),
        ({"messages": [*SAID, BACK[0] | {"function_call": {"name": "add", "arguments": "{"}}]}, "messages"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(server, client, given, param):
    with pytest.raises(openai.BadRequestError) as told:
        chat(client, **{"messages": SAID} | given)
    assert told.value.body["param"] == param
    assert server.service.num_inflight == 0


def test_other_paths_refuse_functions_and_what_asks_for_nothing_is_no_function(server):
    asked = {"functions": [ADD]}
    for path, base in (("completions", {"prompt": "a"}), ("responses", {"input": "a"})):
        answer = server.post(f"/v1/{path}", base | asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "functions")
    asked = {"messages": SAID, "functions": [], "function_call": "none", "max_tokens": 2}
    said = server.post("/v1/chat/completions", asked | {"tools": TOOLS}).json()
    assert said["choices"][0]["finish_reason"] == "length"

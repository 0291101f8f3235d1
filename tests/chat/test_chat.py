"""Conversations to prompts, and tool calls found in answers."""

import copy
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quire import demo_model
from quire.chat import Conversation, ToolCall, parse_tools, tool_format
from quire.chat.tools import held_from, without_cut_call
from quire.errors import ConfigError

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "now"}},
]
ANSWERS = {
    "hermes": 'Let me see. <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "mistral": 'Let me see.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
    "json": '{"name": "add", "arguments": {"a": 1}}',
    "harmony": 'Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
    "<|end|><|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model())


def chat(*messages, **given):
    return msgspec.convert({"messages": messages, **given}, Conversation)


def prompt_of(tokenizer, conversation):
    return conversation.text(tokenizer)


def test_a_conversation_is_what_the_template_says(tokenizer):
    asked = chat({"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi ü"})
    text = "<bos><system>Be kind.<user>Hi ü<assistant>"
    assert prompt_of(tokenizer, asked) == text


def test_content_in_parts_is_joined_and_none_is_empty(tokenizer):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = prompt_of(tokenizer, chat({"role": "user", "content": parts}))
    assert joined == prompt_of(tokenizer, chat({"role": "user", "content": "ab"}))
    assert prompt_of(tokenizer, chat({"role": "user"})) == prompt_of(
        tokenizer, chat({"role": "user", "content": ""})
    )


def test_a_developers_message_is_the_systems_unless_the_template_knows_developers(tokenizer):
    asked = chat({"role": "developer", "content": "Be kind."}, {"role": "user", "content": "Hi"})
    assert prompt_of(tokenizer, asked) == "<bos><system>Be kind.<user>Hi<assistant>"
    knows = copy.copy(tokenizer)
    knows.chat_template = "{% for m in messages %}{% if m.role == 'developer' %}D{{ m.content }}{% endif %}{% endfor %}"
    assert prompt_of(knows, asked) == "DBe kind."


def test_a_conversation_that_no_template_lays_out_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="messages is empty"):
        prompt_of(tokenizer, chat())
    with pytest.raises(ConfigError, match=r"arguments of a call are JSON, got '\{'"):
        prompt_of(
            tokenizer,
            chat(
                {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}
            ),
        )

    own = {"chat_template": "{% for each in range(10**9) %}{% endfor %}"}
    with pytest.raises(ConfigError, match="chat_template is not for the template"):
        prompt_of(tokenizer, chat({"role": "user", "content": "a"}, chat_template_kwargs=own))

    class Broken:
        chat_template = "x"

        def apply_chat_template(self, messages, **_):
            return messages[7]

    with pytest.raises(ConfigError, match="template refuses this: list index out of range"):
        prompt_of(Broken(), chat({"role": "user", "content": "a"}))

    class Bare:
        chat_template = None

    with pytest.raises(ConfigError, match="no chat template"):
        prompt_of(Bare(), chat({"role": "user", "content": "a"}))


def test_tools_and_the_arguments_of_calls_reach_the_template_as_data(tokenizer):
    class Spy:
        chat_template = "{{ tools }}"

        def apply_chat_template(self, messages, **given):
            self.messages, self.given = messages, given
            return ""

    spy = Spy()
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    said = (
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "1"},
    )
    prompt_of(spy, chat(*said, tools=TOOLS, chat_template_kwargs={"thinking": False}))
    assert spy.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert spy.messages[0]["content"] == ""
    assert spy.messages[1] == {"role": "tool", "content": "1", "tool_call_id": "1"}
    assert spy.given["tools"] == TOOLS
    assert spy.given["thinking"] is False


@pytest.mark.parametrize(
    "template", ["{{ messages }}", "{{ my_tools }}", {"default": "{{ messages }}"}]
)
@pytest.mark.parametrize("choice", [None, "auto", "required"])
def test_tools_are_refused_where_the_template_has_no_place_for_them(template, choice):
    class Deaf:
        chat_template = template

        def apply_chat_template(self, messages, **given):
            return ""

    said = {"role": "user", "content": "a"}
    with pytest.raises(ConfigError, match=r"^tools: the model's chat template has no place for"):
        prompt_of(Deaf(), chat(said, tools=TOOLS, tool_choice=choice))
    assert prompt_of(Deaf(), chat(said, tools=TOOLS, tool_choice="none")) == ""
    assert prompt_of(Deaf(), chat(said, tools=[])) == ""
    Deaf.chat_template = {"default": "x", "tool_use": "{% for tool in tools %}"}
    assert prompt_of(Deaf(), chat(said, tools=TOOLS, tool_choice=choice)) == ""


def test_tool_choice_none_offers_no_tools():
    assert [tool.function.name for tool in chat(tools=TOOLS).callable_tools] == ["add", "now"]
    assert chat(tools=TOOLS, tool_choice="none").callable_tools == []


def test_a_choice_of_a_tool_is_a_schema():
    assert chat(tools=TOOLS).forced_call() is None
    assert chat(tools=TOOLS, tool_choice="auto").forced_call() is None
    named = {"type": "function", "function": {"name": "now"}}
    schema = chat(tools=TOOLS, tool_choice=named).forced_call()
    assert schema["properties"]["name"] == {"const": "now"}
    assert len(chat(tools=TOOLS, tool_choice="required").forced_call()["anyOf"]) == 2
    nothing = chat(tools=TOOLS, tool_choice=named).forced_call()["properties"]["arguments"]
    assert (nothing["properties"], nothing["additionalProperties"]) == ({}, False)
    for choice in ("add", {"function": {"name": "sub"}}):
        with pytest.raises(ConfigError, match="tool_choice is none, auto, required"):
            chat(tools=TOOLS, tool_choice=choice).forced_call()
    with pytest.raises(ConfigError, match="tool_choice"):
        chat(tool_choice="required").forced_call()


@pytest.mark.parametrize("form", ANSWERS)
def test_tool_calls_are_parsed_out_of_an_answer(form):
    text, calls = parse_tools(ANSWERS[form], form)
    assert text in ("Let me see.", "")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("add", {"a": 1}), ("now", {})][: 1 if form == "json" else 2]  # fmt: skip


def test_tool_calls_in_mistrals_newer_form_are_parsed():
    text = '[TOOL_CALLS]add{"a": 1}[TOOL_CALLS]now[ARGS]{}'
    assert parse_tools(text, "mistral") == (
        "", [ToolCall("add", '{"a": 1}'), ToolCall("now", "{}")])  # fmt: skip


@pytest.mark.parametrize(
    ("form", "text", "before", "calls"),
    [
        ("hermes", "<tool_call>%s</tool_call>\nThen:\n<tool_call>%s</tool_call>", "", 2),
        (
            "hermes",
            "Use <tool_call> tags.\n<tool_call>%s</tool_call> and on",
            "Use <tool_call> tags.",
            1,
        ),
        ("hermes", "<tool_call>{</tool_call> <tool_call>%s", "<tool_call>{</tool_call>", 1),
        ("mistral", "[TOOL_CALLS] [1, 2] [TOOL_CALLS] [%s, %s]", "[TOOL_CALLS] [1, 2]", 2),
        ("mistral", 'So: [TOOL_CALLS]add[CALL_ID]x-1[ARGS]{"a": 1}', "So:", 1),
        ("llama3", " %s; %s", "", 2),
        ("llama3", "Well <|python_tag|>%s", "Well", 1),
        ("harmony", ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}', "", 1),
        (
            "harmony",
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
            "",
            1,
        ),
        ("harmony", 'So.<|channel|>commentary to=add<|message|>{"a": 1}', "So.", 1),
    ],
)
def test_calls_are_found_wherever_they_stand(form, text, before, calls):
    made = '{"name": "add", "arguments": {"a": 1}}'
    said = text.replace("%s", made)
    own_id = "x-1" if "[CALL_ID]" in text else None
    assert parse_tools(said, form) == (before, [ToolCall("add", '{"a": 1}', own_id)] * calls)
    for cut in range(len(said) + 1):
        assert before.startswith(said[: held_from(said[:cut], form)])


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        (r'{"s": "\ud83d"}', r'{"s": "\ud83d"}'),
        (r'{"\ude00": "é\ud83d\ude00"}', '{"\\ude00": "é😀"}'),
        ('{"n": 1e400}', None),
        ('{"n": NaN}', None),
        ('{"n": -Infinity}', None),
    ],
)
def test_arguments_are_json_that_can_be_sent(written, arguments):
    text = f'<tool_call>{{"name": "add", "arguments": {written}}}</tool_call>'
    _, calls = parse_tools(text, "hermes")
    assert calls == ([] if arguments is None else [ToolCall("add", arguments)])
    for call in calls:
        assert json.loads(call.arguments.encode()) == json.loads(written)


def test_a_name_that_cannot_be_sent_is_no_call():
    text = r'<tool_call>{"name": "\ud83d", "arguments": {}}</tool_call>'
    assert parse_tools(text, "hermes") == (text, [])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "plain text"),
        ("hermes", "<tool_call>no json</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '{"name": "add", "arguments": {}}'),
        ("mistral", "[TOOL_CALLS]"),
        ("llama3", 'I mean {"name": "add"}'),
        ("llama3", '{"name": 1}'),
        ("llama3", "{" * 5000),
        ("json", "[" * 5000),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("json", ""),
        ("hermes", "<tool_call>x" * 5000),
        ("mistral", "[TOOL_CALLS]" + "x" * 20_000 + " " * 20_000),
        ("mistral", "[TOOL_CALLS]" + "[CALL_ID]" * 5000),
        ("harmony", "<|channel|>commentary to=functions.add <|constrain|>json<|message|>no"),
        ("harmony", "<|channel|>commentary to=" + " to=functions." * 5000),
        ("harmony", "It is up to=functions. to"),
    ],
)
def test_text_without_a_call_stays_whole(form, text):
    assert parse_tools(text, form) == (text, [])


@pytest.mark.parametrize("form", ANSWERS)
@pytest.mark.parametrize("text", [*ANSWERS.values(), "a < b <tool> [TOO", "  {", "plain"])
def test_streamed_text_never_has_part_of_a_tool_call(form, text):
    """Cut anywhere: what was sent is the beginning of what is the text in the end."""
    whole, _ = parse_tools(text, form)
    for cut in range(len(text) + 1):
        assert whole.startswith(text[: held_from(text[:cut], form)])


CUT = [
    *ANSWERS.items(),
    ("mistral", 'Let me see.[TOOL_CALLS]add[CALL_ID]x-1[ARGS]{"a": 1}'),
    ("hermes", r'Let me see.<tool_call>{"name": "a\u0064d", "arguments": {"a": [1.5e-3, -2, true, false, null, "\"\n"]}}'),
    ("llama3", '  {"name": "add", "parameters": {"a": [1, {"b": "}"}]}}'),
    ("hermes", 'A <tool_call> tag. <tool_call>{"arguments": {"a": 1}, "name": "add"}'),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text"), CUT)
def test_a_call_that_is_cut_anywhere_is_no_text(form, text):
    before, calls = parse_tools(text, form)
    assert calls
    for cut in range(len(text)):
        said, whole = parse_tools(text[:cut], form)
        if not whole:
            said = without_cut_call(said, form)
            assert before.startswith(said.rstrip()) or said in {
                f"{before}{a}{b}" for a in (" ", "") for b in "<["
            }
            assert said.startswith(text[: held_from(text[:cut], form)])


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "Lists are <b"),
        ("hermes", "The tag <tool_call> is for tools, and"),
        ("llama3", '{"colour": "red", "size'),
        ("llama3", '{"name'),
        ("llama3", "So {"),
        ("mistral", "an [TO-DO] list"),
        ("hermes", '<tool_call>{"name": 1}</tool_call> and'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("mistral", "[TOOL_CALLS] [1, 2] and"),
        ("harmony", "It is up to"),
    ],
)
def test_text_that_is_cut_outside_of_a_call_stays_whole(form, text):
    wanted = "" if text == '{"name' else text
    assert without_cut_call(text, form) == wanted


@pytest.mark.parametrize("form", ANSWERS)
@given(text=st.text('<tool_call>[TOOL_CALLS]{"name": 1}\n\\', max_size=40))
def test_text_without_its_cut_call_is_a_beginning_of_it(form, text):
    assert text.startswith(said := without_cut_call(text, form))
    assert said.startswith(text[: held_from(text, form)])


def test_text_that_can_be_no_call_is_sent_at_once():
    assert held_from("a <b", "hermes") == 4
    assert held_from("a <b ", "hermes") == 4
    assert held_from("a <tool_", "hermes") == 1
    assert held_from("text {", "json") == 6


def test_a_template_tells_how_its_model_writes_calls(tokenizer):
    assert tool_format("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert tool_format("Environment: ipython") == "llama3"
    assert tool_format("<|channel|>commentary to=functions.") == "harmony"
    assert tool_format("<tool_call>") == tool_format("") == "hermes"

"""Anthropic's requests as chats, and outputs of an engine as its messages."""

import json
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.chat.reasoning import FORMATS
from quire.core import Scope
from quire.errors import ConfigError, TokensError
from quire.serve.message_requests import MessagePrompt, MessageRequest
from quire.serve.messages import MessageReply
from quire.serve.replies import AnswerMarks
from quire.serve.retention import RetentionBudget
from quire.web.bodies import read
from quire.web.errors import MESSAGES, ApiError, error_document

TEXT = st.text(max_size=8)
BREAK = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {"type": st.just("ephemeral")}, optional={"ttl": st.sampled_from(["5m", "1h"])}
    ),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(TEXT, each, max_size=2),
    max_leaves=4,
)


def block(kind, **fields):
    return st.fixed_dictionaries(
        {"type": st.just(kind), **fields}, optional={"cache_control": BREAK, "unknown": VALUES}
    )


TEXTS = block("text", text=TEXT)
CONTENT = TEXT | st.lists(TEXTS, min_size=1, max_size=3)
RESULTS = block(
    "tool_result", tool_use_id=TEXT, content=st.none() | CONTENT, is_error=st.booleans()
)
CALLS = block("tool_use", id=TEXT, name=TEXT, input=st.dictionaries(TEXT, VALUES, max_size=3))
THOUGHTS = block("thinking", thinking=TEXT, signature=TEXT) | block("redacted_thinking", data=TEXT)
TURNS = st.one_of(
    st.fixed_dictionaries(
        {
            "role": st.just("user"),
            "content": TEXT | st.lists(TEXTS | RESULTS, min_size=1, max_size=4),
        }
    ),
    st.fixed_dictionaries(
        {
            "role": st.just("assistant"),
            "content": TEXT | st.lists(TEXTS | CALLS | THOUGHTS, min_size=1, max_size=4),
        }
    ),
    st.fixed_dictionaries({"role": st.just("system"), "content": CONTENT}),
)
TOOLS = st.fixed_dictionaries(
    {
        "name": st.text(min_size=1, max_size=5),
        "input_schema": st.dictionaries(TEXT, VALUES, max_size=2),
    },
    optional={"description": TEXT, "cache_control": BREAK, "type": st.just("custom")},
)
REQUESTS = st.fixed_dictionaries(
    {"messages": st.lists(TURNS, min_size=1, max_size=6), "max_tokens": st.just(4)},
    optional={"system": CONTENT, "tools": st.lists(TOOLS, max_size=3), "cache_control": BREAK},
)


def listed(content):
    return [{"type": "text", "text": content}] if isinstance(content, str) else content or []


def joined(content):
    return "\n".join(each["text"] for each in listed(content))


def specified(asked):
    """The chat's messages by a plain rule: blocks come one by one, and go on with the message that they may."""
    told = []
    if system := "\n".join(each["text"] for each in listed(asked.get("system")) if each["text"]):
        told.append({"role": "system", "content": system})
    before = None
    for turn in asked["messages"]:
        for each in listed(turn["content"]):
            role = turn["role"]
            if each["type"] == "tool_result":
                said = joined(each["content"])
                told.append(
                    {
                        "role": "tool",
                        "tool_call_id": each["tool_use_id"],
                        "content": "Error: " + said if each["is_error"] else said,
                    }
                )
                before = role
                continue
            if before != role or told[-1]["role"] != role:
                told.append({"role": role, "content": None})
            before, message = role, told[-1]
            match each["type"]:
                case "text" if message["content"] is None or role == "assistant":
                    message["content"] = (message["content"] or "") + each["text"]
                case "text":
                    message["content"] += "\n" + each["text"]
                case "thinking":
                    message["reasoning_content"] = (
                        message.get("reasoning_content", "") + each["thinking"]
                    )
                case "tool_use":
                    function = {"name": each["name"], "arguments": each["input"]}
                    message.setdefault("tool_calls", []).append(
                        {"id": each["id"], "type": "function", "function": function}
                    )
    for message in told:
        message["content"] = message["content"] or ""
        if not message.get("reasoning_content", True):
            del message["reasoning_content"]
    return told


def seconds(value):
    """The seconds of all breakpoints in a request, wherever they stand but in inputs and schemas."""
    if isinstance(value, dict):
        own = value.get("cache_control")
        yield from [{"5m": 300.0, "1h": 3600.0}[own.get("ttl", "5m")]] if own else []
        value = [
            each
            for name, each in value.items()
            if name in ("system", "messages", "tools", "content")
        ]
    for each in value if isinstance(value, list) else ():
        yield from seconds(each)


@given(asked=REQUESTS)
def test_every_conversation_of_blocks_is_the_specified_chat(asked):
    right = specified(asked)
    request = read(MessageRequest, json.dumps(asked).encode())
    if right[-1]["role"] == "assistant" and "tool_calls" in right[-1]:
        with pytest.raises(ConfigError, match="messages end with a tool_use"):
            request.chat()
        return
    chat = request.chat()
    assert [each.plain() for each in chat.messages] == right
    assert chat.continue_final_message == (right[-1]["role"] == "assistant")
    assert chat.retain_s == max(seconds(asked), default=None)
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    tools = [
        {"function": {own: each[name] for name, own in names.items() if name in each}, "type": "function"}
        for each in asked.get("tools", ())
    ]  # fmt: skip
    assert json.dumps(msgspec.to_builtins(chat.tools or [])) == json.dumps(tools)


@given(asked=REQUESTS)
def test_breakpoints_change_nothing_of_a_prompt(asked):
    def without(value):
        if isinstance(value, dict):
            return {name: without(each) for name, each in value.items() if name != "cache_control"}
        return [without(each) for each in value] if isinstance(value, list) else value

    def told(document):
        chat = read(MessagePrompt, json.dumps(document).encode()).chat()
        return msgspec.json.encode([chat.messages, chat.tools])

    try:
        right = told(asked)
    except ConfigError:
        return
    assert told(without(asked)) == right


@pytest.mark.parametrize(
    "system",
    [
        "x-anthropic-billing-header: cc_version=2; cch=1;\nBe short.",
        [{"type": "text", "text": "x-anthropic-billing-header: cch=2;"}, {"type": "text", "text": "Be short."}],
    ],
)  # fmt: skip
def test_the_line_that_no_two_requests_share_is_left_out(system):
    asked = read(
        MessageRequest,
        json.dumps(
            {"system": system, "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        ).encode(),
    )
    assert next(each.plain() for each in asked.chat().messages) == {
        "role": "system",
        "content": "Be short.",
    }


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def output(text, *, reason=None, stop=None):
    return SimpleNamespace(
        text=text, num_tokens=len(text), logprobs=None, finish_reason=reason, stop_reason=stop
    )


def reply(**given):
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 999} | given
    chat = read(MessageRequest, json.dumps(asked).encode()).chat()
    return MessageReply(
        chat, "tiny", None, marks=AnswerMarks("hermes", FORMATS["qwen3"]), block_size=16
    )


def events_of(made, outputs):
    """The events of a stream, each checked to be named as its document says."""
    raw = b"".join(made.opening())
    for each in outputs:
        made.choices[0].take(each)
        raw += made.chunk(made.choices[0])
    told = []
    for event in (raw + b"".join(made.closing())).split(b"\n\n")[:-1]:
        name, data = event.split(b"\ndata: ")
        told.append(json.loads(data))
        assert name == b"event: " + told[-1]["type"].encode()
    return told


def put_together(events):
    """The content of a message by its stream's events, whose order is checked: one block is open at a time."""
    content, open_at, pieces = [], None, ""
    for each in events:
        match each["type"]:
            case "content_block_start":
                assert (open_at, each["index"]) == (None, len(content))
                open_at, pieces = each["index"], ""
                content.append(each["content_block"])
            case "content_block_delta":
                assert each["index"] == open_at
                delta = each["delta"]
                if (kind := delta["type"].removesuffix("_delta")) in (
                    "text",
                    "thinking",
                    "signature",
                ):
                    content[-1][kind] += delta[kind]
                else:
                    pieces += delta["partial_json"]
            case "content_block_stop":
                assert each["index"] == open_at
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = json.loads(pieces)
                open_at = None
    assert open_at is None
    return content


@given(
    text=st.sampled_from(["", "Hello, world", "So: " + CALL, CALL, f"{CALL}\n{CALL}", "a <tool"]),
    thought=st.sampled_from(["", "<think>\nLet me.\n</think>\n\n", "<think>So</think>"]),
    cuts=st.lists(st.integers(0, 150), max_size=5),
    reason=st.sampled_from(["stop", "length"]),
    is_parallel=st.booleans(),
)
def test_a_stream_puts_together_the_whole_message(text, thought, cuts, reason, is_parallel):
    text = thought + text
    given = {"tools": [{"name": "add", "input_schema": {}}]}
    given["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": not is_parallel}
    last = output(text, reason=reason)
    streamed, whole = reply(**given), reply(**given)
    events = events_of(streamed, [*(output(text[:cut]) for cut in sorted(cuts)), last])
    whole.choices[0].take(last)
    right = whole.whole()
    content = put_together(events)
    for each in (*content, *right["content"]):
        each.pop("id", None)
    assert [each | {"text": each.get("text", "").rstrip()} for each in content] == [
        each | {"text": each.get("text", "").rstrip()} for each in right["content"]
    ]
    assert [each["type"] for each in events][:1] == ["message_start"]
    assert [each["type"] for each in events][-2:] == ["message_delta", "message_stop"]
    assert events[-2]["delta"] == {name: right[name] for name in ("stop_reason", "stop_sequence")}
    assert events[-2]["usage"] == right["usage"]
    thoughts = [each["thinking"] for each in content if each["type"] == "thinking"]
    assert thoughts == [each for each in ("Let me.", "So") if each in thought]
    calls = [each for each in content if each["type"] == "tool_use"]
    assert len(calls) == min(text.count("<tool_call>"), 2 if is_parallel else 1)
    assert all(each["input"] == {"a": 1} for each in calls)


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (output("a", reason="stop"), "end_turn", None),
        (output("a", reason="stop", stop=7), "end_turn", None),
        (output("a", reason="stop", stop="b"), "stop_sequence", "b"),
        (output("a" * 999, reason="length"), "max_tokens", None),
        (output("a" * 998, reason="length"), "model_context_window_exceeded", None),
        (output(CALL, reason="stop"), "tool_use", None),
        (output(CALL, reason="stop", stop="b"), "tool_use", None),
    ],
)
def test_an_answer_says_why_it_ended(last, reason, sequence):
    made = reply()
    made.choices[0].take(last)
    said = made.whole()
    assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)


@given(prompt=st.integers(1, 200), share=st.floats(0, 1))
def test_the_parts_of_the_usage_are_the_prompt(prompt, share):
    made = reply()
    made.prompt_tokens, made.cached_tokens = prompt, int(share * (prompt - 1))
    made.choices[0].take(output("a"))
    usage = made.whole()["usage"]
    assert usage.pop("output_tokens") == 1
    assert sum(usage.values()) == prompt
    assert min(usage.values()) >= 0
    assert usage["input_tokens"] < 16


def test_a_stream_that_breaks_ends_with_an_error_and_nothing_else():
    made = reply()
    events = [*made.opening(), made.broken(ApiError(503, "gone")), *made.closing()]
    assert events[-1].startswith(b"event: error\ndata: ")
    said = json.loads(events[-1].split(b"data: ")[1])
    assert said["error"] == {"type": "overloaded_error", "message": "gone"}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_errors_are_anthropics_objects(status, kind):
    said = error_document(MESSAGES, ApiError(status, "why"))
    assert said["error"] == {"type": kind, "message": "why"}
    assert (said["type"], said["request_id"][:4]) == ("error", "req_")


class Retained:
    """A tenant's prompts by a plain rule: a list of tuples, searched whole."""

    def __init__(self, most):
        self.most, self.kept = most, []

    def held(self, tenant, now):
        return sum(len(each[1]) for each in self.kept if each[0].tenant == tenant and each[2] > now)

    def grant(self, scope, prompts, until, now):
        before = self.kept
        self.kept = [each for each in before if each[2] > now]
        for prompt in prompts:
            for each in self.kept:
                size = min(len(each[1]), len(prompt))
                if each[0] == scope and each[1][:size] == prompt[:size]:
                    self.kept.remove(each)
                    longest = max(prompt, each[1], key=len)
                    self.kept.append((scope, longest, max(until, each[2])))
                    break
            else:
                self.kept.append((scope, prompt, until))
        if self.held(scope.tenant, now) > self.most:
            self.kept = before
            return False
        return True


SCOPES = [Scope(tenant=tenant, salt=salt) for tenant in ("a", "b") for salt in (None, "x")]
ENDS = ["whole", "refused", "broken", "gone"]


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(SCOPES),
            st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=2),
            st.sampled_from([None, 1, 3]),
            st.integers(0, 2),
            st.sampled_from(ENDS),
        ),
        max_size=12,
    )
)
def test_each_tenant_retains_no_more_than_its_share(steps):
    now = 0
    budget, model = RetentionBudget(8, lambda: now), Retained(8)
    for scope, prompts, wanted, passed, end in steps:
        now += passed
        before = model.kept
        right = wanted is not None and model.grant(scope, prompts, now + wanted, now)
        with suppress(ConfigError, RuntimeError), budget.granting(scope, prompts, wanted) as grant:
            assert grant.seconds == (wanted if right else None)
            grant.is_used = end in ("whole", "broken")
            if end in ("refused", "broken"):
                raise ConfigError(end)
            if end == "gone":
                raise RuntimeError(end)
        if end == "refused":
            model.kept = before
        for tenant in ("a", "b"):
            assert budget.num_tokens(tenant) == model.held(tenant, now) <= 8


@pytest.mark.parametrize(("prompt", "wanted"), [([-1], 5), ([2**40], 5), ([1], -5), ([1], 1e12)])
def test_a_retention_that_cannot_be_is_refused_and_holds_nothing(prompt, wanted):
    budget = RetentionBudget(8, lambda: 0.0)
    with pytest.raises((TokensError, ConfigError)), budget.granting(Scope(), [[1], prompt], wanted):
        pass
    assert budget.num_tokens(None) == 0

"""Anthropic's messages, asked by its own client: texts, tools, streams, usage, and refusals."""

import copy
import json
import re

import anthropic
import pytest
from serve_help import fixtures, running, tiny

from quire import ops
from quire.serve.service import Bounds
from quire.web.keys import ApiKeys

TEMPLATE = (
    "<bos>{% if tools %}{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The chat template of quire-tiny, with tools in the form of Hermes."""

TALK = [{"role": "user", "content": "What is a list?"}]


def with_tools():
    tokenizer = copy.deepcopy(tiny()[1])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


server, nothing_stays = fixtures(tokenizer=with_tools())


def client_of(server, key="none-needed"):
    http = anthropic.DefaultHttpxClient(verify=False)
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def client(server):
    return client_of(server)


def say(client, messages=TALK, *, temperature=0, **given):
    options = {"model": "quire-tiny", "max_tokens": 12, **given}
    return client.messages.create(
        messages=messages, extra_body={"temperature": temperature}, **options
    )


def chatted(server, messages=TALK, **given):
    """The same chat, asked in OpenAI's shape."""
    options = {"model": "quire-tiny", "max_tokens": 12, "temperature": 0, **given}
    return server.client().chat.completions.create(messages=messages, **options)


def tool(name="look", **more):
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    return {"name": name, "description": f"It {name}s.", "input_schema": schema} | more


def test_a_message_is_the_chats_answer(server, client):
    said, right = (
        say(client, system="Be short."),
        chatted(server, [{"role": "system", "content": "Be short."}, *TALK]),
    )
    (block,) = said.content
    assert (block.type, block.text) == ("text", right.choices[0].message.content)
    assert (said.type, said.role, said.model) == ("message", "assistant", "quire-tiny")
    assert (said.stop_reason, said.stop_sequence) == ("max_tokens", None)
    assert said.usage.output_tokens == 12
    assert prompt_tokens(said.usage) == right.usage.prompt_tokens


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_the_clients_beta_its_models_and_its_tool_runner_are_served(server, client):
    assert [each.id for each in client.models.list()] == ["quire-tiny"]
    given = {"model": "quire-tiny", "max_tokens": 90, "messages": TALK}
    said = client.beta.messages.create(betas=["context-management-2025-06-27"], **given)
    assert said.content[0].text
    called = []

    @anthropic.beta_tool
    def look() -> str:
        """Look."""
        called.append(1)
        return "It is."

    choice = {"type": "tool", "name": "look"}
    runner = client.beta.messages.tool_runner(
        tools=[look], tool_choice=choice, max_iterations=2, thread=False, **given
    )
    messages = list(runner)
    assert len(called) == len(messages) == 2
    assert [each.stop_reason for each in messages] == ["tool_use"] * 2
    assert messages[1].usage.cache_read_input_tokens > 100


def test_a_stream_is_the_same_message_in_events(client):
    whole = say(client)
    options = {"model": "quire-tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}
    with client.messages.stream(messages=TALK, **options) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        said = stream.get_final_message()
    assert said.content[0].text == whole.content[0].text
    assert (said.stop_reason, said.usage.output_tokens) == ("max_tokens", 12)
    assert prompt_tokens(said.usage) == prompt_tokens(whole.usage)
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_a_stop_sequence_ends_and_is_named(client):
    text = say(client, max_tokens=24).content[0].text
    stop = text[8:10]
    said = say(client, max_tokens=24, stop_sequences=["never said", stop])
    assert said.content[0].text == text[: text.index(stop)]
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", stop)


def test_an_answer_ends_where_the_window_does():
    with running(max_model_len=200) as server:
        client = client_of(server)
        talk = [{"role": "user", "content": "a" * 160}]
        said = say(client, talk, max_tokens=8_000)
        assert said.stop_reason == "model_context_window_exceeded"
        assert prompt_tokens(said.usage) + said.usage.output_tokens == 200
        talk[0]["content"] += "a" * 40
        long = r"prompt is too long: 203 tokens > 199 maximum"
        with pytest.raises(anthropic.BadRequestError, match=long):
            say(client, talk)
        server.quiet()


def test_a_message_of_no_tokens_stores_its_prompt_and_says_nothing(client):
    talk = [{"role": "user", "content": "Warm this prompt, which is long enough."}]
    said = say(client, talk, max_tokens=0)
    assert (said.content, said.stop_reason, said.usage.output_tokens) == ([], "max_tokens", 0)
    stored = said.usage.cache_creation_input_tokens + said.usage.cache_read_input_tokens
    assert stored >= 32
    assert say(client, talk).usage.cache_read_input_tokens >= stored
    options = {"model": "quire-tiny", "max_tokens": 0, "messages": talk, "tools": [tool()]}
    with client.messages.stream(tool_choice={"type": "any"}, **options) as stream:
        kinds = [event.type for event in stream]
    assert kinds == ["message_start", "message_delta", "message_stop"]


def test_an_answer_goes_on_with_the_last_message(server, client):
    text = say(client, max_tokens=24).content[0].text
    begun = [*TALK, {"role": "assistant", "content": [{"type": "text", "text": text[:9]}]}]
    assert say(client, begun, max_tokens=24).content[0].text.startswith(text[9:20])
    chat = chatted(server, begun, extra_body={"continue_final_message": True}, max_tokens=24)
    assert chat.choices[0].message.content.startswith(text[9:20])


def test_a_tool_that_must_be_called_is_called_whole_and_streamed(client):
    given = {
        "model": "quire-tiny",
        "max_tokens": 90,
        "messages": TALK,
        "tools": [tool(), tool("find")],
    }
    for choice in ({"type": "any"}, {"type": "tool", "name": "find"}):
        said = client.messages.create(tool_choice=choice, **given)
        (call,) = said.content
        assert call.type == "tool_use"
        assert call.name in ({"find"} if "name" in choice else {"look", "find"})
        assert call.input in ({"n": 1}, {"n": 2})
        assert re.fullmatch("toolu_[0-9a-f]{24}", call.id)
        assert said.stop_reason == "tool_use"
        with client.messages.stream(tool_choice=choice, **given) as stream:
            streamed = stream.get_final_message()
        (call,) = streamed.content
        assert call.input in ({"n": 1}, {"n": 2})
        assert streamed.stop_reason == "tool_use"


def test_an_answer_has_the_form_that_is_asked_for(client):
    schema = tool()["input_schema"]
    form = {"format": {"type": "json_schema", "schema": schema}}
    said = say(client, output_config=form, max_tokens=40)
    assert json.loads(said.content[0].text) in ({"n": 1}, {"n": 2})


def test_tokens_are_counted_as_they_are_read(server, client):
    asked = {"system": [{"type": "text", "text": "Be short."}], "tools": [tool()], "messages": TALK}
    counted = client.messages.count_tokens(model="quire-tiny", **asked)
    said = client.messages.create(model="quire-tiny", max_tokens=1, **asked)
    assert counted.input_tokens == prompt_tokens(said.usage)
    read = server.post("/v1/messages/tokenize", {"max_tokens": 1} | asked)
    assert len(read.json()["tokens"]) == counted.input_tokens
    assert "X-Quire-Ignored" not in read.headers


def test_usage_says_what_was_found_and_what_was_stored(server, client):
    size = server.manager.block_size
    talk = [{"role": "user", "content": "Tell me about usage, " + "at some length, " * 20}]
    first, second = (say(client, talk).usage for _ in range(2))
    total = prompt_tokens(first)
    assert first.cache_read_input_tokens < size
    assert first.input_tokens == total % size
    assert (total - 1) // size * size <= second.cache_read_input_tokens < total
    assert prompt_tokens(second) == total


NO_INPUT = {"type": "object", "properties": {}, "additionalProperties": False}


def agent(**more):
    """A request in the shape of Claude Code's: a system of blocks, many tools, breakpoints, unknown fields."""
    return {
        "model": "quire-tiny",
        "max_tokens": 90,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.1; cch=0;"},
            {
                "type": "text",
                "text": "You look things up. " * 60,
                "cache_control": {"type": "ephemeral"},
            },
        ],
        "tools": [
            *(tool(f"tool_{at}") for at in range(19)),
            tool(input_schema=NO_INPUT, cache_control={"type": "ephemeral", "ttl": "1h"}),
        ],
        "metadata": {"user_id": "user_1_session_2"},
        "thinking": {"type": "disabled"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "an_unknown_field": {"a": 1},
    } | more


@pytest.mark.ci
def test_a_session_of_thirty_tool_calls_computes_only_what_is_new(server):
    size, before = server.manager.block_size, copy.copy(server.manager.stats)
    talk = [{"role": "user", "content": [{"type": "text", "text": "Look."}]}]
    found, totals = [], []
    for at in range(30):
        asked = agent(messages=talk, tool_choice={"type": "tool", "name": "look"})
        asked["system"][0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.1; cch={at:05x};"
        said = server.post("/v1/messages?beta=true", asked).json()
        usage = said["usage"]
        found.append(usage["cache_read_input_tokens"])
        totals.append(sum(value for name, value in usage.items() if name != "output_tokens"))
        (call,) = said["content"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "is_error": at % 7 == 0}
        result |= {"content": [{"type": "text", "text": f"It is {at}."}]}
        for turn in talk:
            if isinstance(turn["content"], list):
                turn["content"][-1].pop("cache_control", None)
        talk += [
            {"role": "assistant", "content": said["content"]},
            {"role": "user", "content": [result | {"cache_control": {"type": "ephemeral"}}]},
        ]
    assert found[0] < size
    assert totals[-1] > 5000
    for old, new_found in zip(totals[:-1], found[1:], strict=True):
        assert new_found > old - size
    after = server.manager.stats
    assert after.hit_tokens - before.hit_tokens == sum(found)
    assert after.prompt_tokens - before.prompt_tokens == sum(totals)
    assert (
        f'quire_hit_tokens_total{{cache="main"}} {float(after.hit_tokens)}'
        in server.get("/metrics").text
    )


def test_calls_in_parallel_and_their_results_are_read_in_order(server, client):
    ids = ["toolu_1", "toolu_2"]
    calls = [{"type": "tool_use", "id": each, "name": "look", "input": {"n": 1}} for each in ids]
    results = [{"type": "tool_result", "tool_use_id": each, "content": each} for each in ids]
    talk = [*TALK, {"role": "assistant", "content": [{"type": "text", "text": "So:"}, *calls]},
            {"role": "user", "content": [*results, {"type": "text", "text": "And?"}]}]  # fmt: skip
    function = {"name": "look", "arguments": '{"n": 1}'}
    chat = [*TALK,
            {"role": "assistant", "content": "So:",
             "tool_calls": [{"id": each, "type": "function", "function": function} for each in ids]},
            *({"role": "tool", "tool_call_id": each, "content": each} for each in ids),
            {"role": "user", "content": "And?"}]  # fmt: skip
    said = say(client, talk, tools=[tool()])
    shape = {"name": "look", "description": "It looks.", "parameters": tool()["input_schema"]}
    right = chatted(server, chat, tools=[{"type": "function", "function": shape}])
    assert said.content[0].text == right.choices[0].message.content
    assert right.usage.prompt_tokens_details.cached_tokens >= prompt_tokens(said.usage) - 16


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://localhost/a.png"}}
CALL = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
WRONG = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": 2e6}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [*TALK, {"role": "user", "content": [{"type": "text"}]}]}, "messages[1].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]},
     "messages[0].content[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [{"role": "user", "content": [CALL]}]}, "messages[0].content[0]"),
    ({"messages": [*TALK, {"role": "assistant", "content": [CALL]}]}, "messages"),
    ({"messages": [*TALK, {"role": "assistant", "content": [{**CALL, "input": None}]}]}, "messages[1].content[0].input"),
    ({"system": [IMAGE]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
    ({"tools": [{"name": "look"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tools": [tool(defer_loading=True)]}, "tools[0].defer_loading"),
    ({"tools": [tool()], "tool_choice": {"type": "tool", "name": "find"}}, "tool_choice.name"),
    ({"tools": [tool()], "tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "a"}, "container"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"thread": {}}, "thread"),
    ({"compaction": {"type": "auto"}}, "compaction"),
    ({"fallbacks": "default"}, "fallbacks"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}}, "output_config.format"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "field"), WRONG, ids=[f"{field}-{at}" for at, (_, field) in enumerate(WRONG)]
)
def test_a_field_that_is_wrong_or_not_offered_is_refused_by_name(server, given, field):
    asked = {"model": "quire-tiny", "max_tokens": 4, "messages": TALK}
    asked |= {"cache_control": {"type": "ephemeral"}} | given
    retained = server.service.retention.num_tokens(None)
    for stream in (False, True):
        answer = server.post("/v1/messages", asked | {"stream": stream})
        assert answer.status_code == 400
        said = answer.json()
        assert (said["type"], said["error"]["type"]) == ("error", "invalid_request_error")
        assert re.search(
            rf"(^|\W){re.escape(field)}\b" if field[-1] != "]" else re.escape(field),
            said["error"]["message"],
        )
        assert said["request_id"].startswith("req_")
    assert server.service.num_inflight == 0
    assert server.service.retention.num_tokens(None) == retained


def test_errors_have_anthropics_shape_on_its_paths_alone(server, client):
    with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here") as raised:
        say(client, model="claude")
    assert raised.value.request_id == raised.value.body["request_id"]
    with pytest.raises(anthropic.NotFoundError, match="'claude' is not served here"):
        client.messages.count_tokens(model="claude", messages=TALK)
    missing = server.get("/v1/messages")
    assert (missing.status_code, missing.json()["error"]["type"]) == (405, "invalid_request_error")
    assert server.post("/v1/messages/batches", {}).json()["error"]["type"] == "not_found_error"
    assert server.post("/v1/messages", content=b"{").json()["type"] == "error"
    assert "type" not in server.post("/v1/chat/completions", content=b"{").json()


def test_a_key_comes_in_either_header_and_too_much_is_refused():
    keys = ApiKeys([("ann", "key-of-ann"), ("bob", "key-of-bob")], "the-operators")
    with running(keys=keys, bounds=Bounds(max_inflight=2, max_body=1 << 12)) as server:
        assert say(client_of(server, "key-of-ann")).usage.cache_read_input_tokens == 0
        assert say(client_of(server, "key-of-ann")).usage.cache_read_input_tokens > 0
        assert say(client_of(server, "key-of-bob")).usage.cache_read_input_tokens == 0
        http = anthropic.DefaultHttpxClient(verify=False)
        bearer = anthropic.Anthropic(base_url=server.url, auth_token="key-of-bob", http_client=http)  # noqa: S106
        assert say(bearer).usage.cache_read_input_tokens > 0
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key"):
            say(client_of(server, "key-of-eve"))
        with pytest.raises(anthropic.APIStatusError) as raised:
            say(client_of(server, "key-of-ann"), [{"role": "user", "content": "a" * 5000}])
        assert raised.value.status_code == 413
        assert raised.value.body["error"]["type"] == "request_too_large"
        assert (
            server.get("/v1/cache/pins", headers={"x-api-key": "the-operators"}).status_code == 200
        )
        server.quiet()


@pytest.mark.parametrize(
    ("path", "given"),
    [
        ("/v1/messages", {"cache_control": {"type": "ephemeral"}}),
        ("/v1/chat/completions", {"retain_s": 60}),
    ],
)
def test_a_retained_prompt_stays_under_pressure(path, given):
    with running(num_blocks=64) as server:
        kept = {
            "model": "quire-tiny",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "Keep this, please. " * 10}],
        }
        plain = kept | {"messages": [{"role": "user", "content": "This one is not kept. " * 10}]}
        server.post(path, kept | given)
        server.post(path, plain)
        assert server.service.retention.num_tokens(None) > 190
        for at in range(6):
            server.post("/v1/completions", {"prompt": f"{at} presses. " * 20, "max_tokens": 2})
        read = [
            server.post("/v1/messages", each).json()["usage"]["cache_read_input_tokens"]
            for each in (kept, plain)
        ]
        assert read[0] > 190
        assert read[1] < 16
        server.quiet()
        ops.check(server.manager)

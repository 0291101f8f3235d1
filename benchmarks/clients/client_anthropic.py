"""Anthropic's SDK for Python, by `/v1/messages`."""

from functools import cache

import anthropic
from cells import SCHEMA, SYSTEM, TALK, TOOL, Server, main, raised

TOOLS = [{k.replace("parameters", "input_schema"): v for k, v in TOOL.items()}]


@cache
def client(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=server.key, max_retries=0)


def ask(server, messages=TALK, **given):
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    cold = {"temperature": 0} | given.pop("extra_body", {})
    options = {"model": server.model, "max_tokens": 16, "system": SYSTEM, "extra_body": cold}
    return client(server).messages.create(messages=messages, **options | given)


def messages(server):
    said = ask(server)
    (block,) = said.content
    assert (said.role, block.type, said.stop_reason) == ("assistant", "text", "max_tokens")
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}]
    parts = [{"role": "user", "content": [{"type": "text", "text": TALK}]}]
    assert ask(server, parts, system=system).content[0].text == block.text
    turns = [*parts, {"role": "assistant", "content": said.content}, {"role": "user", "content": "And a tuple?"}]  # fmt: skip
    assert ask(server, turns).content[0].text
    bearer = anthropic.Anthropic(base_url=server.url, api_key=None, auth_token=server.key)
    assert [each.id for each in bearer.models.list()] == [server.model]


chat = messages


def stream(server):
    said = ask(server).content[0].text
    asked = {"model": server.model, "max_tokens": 16, "system": SYSTEM}
    asked |= {"messages": [{"role": "user", "content": TALK}], "extra_body": {"temperature": 0}}
    with client(server).messages.stream(**asked) as streamed:
        assert "".join(streamed.text_stream) == said
        final = streamed.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (said, "max_tokens")
    assert final.usage.output_tokens == 16


def tools(server):
    turns = [{"role": "user", "content": TALK}]
    given = {"tools": TOOLS, "max_tokens": 120}
    said = ask(server, turns, tool_choice={"type": "any"}, **given)
    (made,) = said.content
    assert (said.stop_reason, made.type, made.name) == ("tool_use", "tool_use", "now")
    assert made.input["zone"] in {"UTC", "CET"}
    result = {"type": "tool_result", "tool_use_id": made.id, "content": "noon"}
    turns += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
    assert ask(server, turns, **given).content[0].text
    with client(server).messages.stream(
        model=server.model, messages=turns[:1], tool_choice={"type": "any"}, **given
    ) as streamed:
        final = streamed.get_final_message()
    assert final.content[0].input["zone"] in {"UTC", "CET"}


def forced_tool(server):
    named = {"type": "tool", "name": "now", "disable_parallel_tool_use": True}
    (made,) = ask(server, tools=TOOLS, tool_choice=named, max_tokens=120).content
    assert made.name == "now"


def json_schema(server):
    form = {"type": "json_schema", "schema": SCHEMA}
    said = ask(server, output_config={"format": form})
    assert said.content[0].text.replace(" ", "") in ('{"ok":true}', '{"ok":false}')


def stop(server):
    text = ask(server).content[0].text
    said = ask(server, stop_sequences=[text[4:7]])
    assert said.content[0].text == text[: text.index(text[4:7])]
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", text[4:7])


def cancel(server):
    with server.cancelled(), ask(server, stream=True, max_tokens=1500) as streamed:
        next(iter(streamed))


def count_tokens(server):
    turns = [{"role": "user", "content": TALK}]
    asked = {"model": server.model, "messages": turns, "system": SYSTEM}
    told = ask(server).usage
    whole = told.input_tokens + told.cache_read_input_tokens + told.cache_creation_input_tokens
    assert client(server).messages.count_tokens(**asked).input_tokens == whole
    assert client(server).messages.count_tokens(**asked, tools=TOOLS).input_tokens > whole


def reasoning(server):
    thinking = {"type": "enabled", "budget_tokens": 16}
    block = ask(server, thinking=thinking).content[0]
    assert block.type == "thinking"
    assert block.thinking
    asked = {"model": server.model, "max_tokens": 16, "system": SYSTEM, "thinking": thinking}
    asked |= {"messages": [{"role": "user", "content": TALK}], "extra_body": {"temperature": 0}}
    with client(server).messages.stream(**asked) as streamed:
        assert streamed.get_final_message().content[0].thinking == block.thinking


def errors(server):
    wrong = server._replace(key="no-such-key")
    raised(anthropic.AuthenticationError, lambda: ask(wrong))
    raised(anthropic.NotFoundError, lambda: ask(server, model="none"), "none")
    raised(anthropic.BadRequestError, lambda: ask(server, extra_body={"temperature": -1}), "temperature")  # fmt: skip
    long = [{"role": "user", "content": TALK * 3000}]
    raised(anthropic.BadRequestError, lambda: ask(server, long), "prompt is too long")
    with server.full():
        raised(anthropic.RateLimitError, lambda: ask(server))


def usage(server):
    ask(server)
    told = ask(server).usage
    assert told.cache_read_input_tokens > 0
    assert told.output_tokens == 16


if __name__ == "__main__":
    main(globals())

"""OpenAI's SDK for Python, by all of its APIs that the server has."""

import json
from functools import cache

import openai
from cells import CALL, SCHEMA, SYSTEM, TALK, THINKS, TOOL, Server, main, raised
from pydantic import BaseModel

TOOLS = [{"type": "function", "function": TOOL | {"strict": True}}]
FLAT = [{"type": "function", "strict": True, **TOOL}]
NAMED = {"type": "function", "function": {"name": "now"}}


class OkOrNot(BaseModel):
    """A form of an answer."""

    ok: bool


@cache
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key=server.key, max_retries=0)


def ask(server, messages=TALK, **given):
    if isinstance(messages, str):
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": messages}]
    options = {"model": server.model, "temperature": 0, "max_tokens": 16, **given}
    return client(server).chat.completions.create(messages=messages, **options)


def chat(server):
    said = ask(server)
    (choice,) = said.choices
    assert choice.message.content
    assert choice.message.role == "assistant"
    assert choice.finish_reason in {"stop", "length"}
    assert said.model == server.model
    parts = [{"type": "text", "text": SYSTEM[:40]}, {"type": "text", "text": SYSTEM[40:]}]
    other = [{"role": "developer", "content": parts}, {"role": "user", "content": TALK}]
    nulls = dict.fromkeys(("stop", "tools", "tool_choice", "response_format", "logprobs", "seed"))
    given = {"max_tokens": None, "max_completion_tokens": 16, "parallel_tool_calls": True, **nulls}
    again = ask(server, other, **given)
    assert again.choices[0].message.content == choice.message.content
    turns = [
        {"role": "user", "content": TALK},
        choice.message.model_dump(exclude_none=True),
        {"role": "user", "content": [{"type": "text", "text": "And a tuple?"}]},
    ]
    assert ask(server, turns).choices[0].message.content
    assert [each.id for each in client(server).models.list()] == [server.model]


def stream(server):
    said = ask(server).choices[0]
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    *chunks, last = chunks
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == said.message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({each.id for each in (*chunks, last)}) == 1
    ends = [each.choices[0].finish_reason for each in chunks]
    assert ends == [None] * (len(ends) - 1) + [said.finish_reason]
    assert last.choices == []
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert all(each.usage is None for each in chunks)
    plain = ask(server, stream=True)
    assert all(each.choices for each in plain)


def tools(server):
    calling = {"tools": TOOLS, "max_tokens": 120}
    form = {"extra_body": {"structured_outputs": {"regex": CALL}}}
    said = ask(server, **calling, **form).choices[0]
    assert said.finish_reason == "tool_calls"
    (made,) = said.message.tool_calls
    assert (made.type, made.function.name) == ("function", "now")
    assert json.loads(made.function.arguments)["zone"] in {"UTC", "CET"}
    result = {"role": "tool", "tool_call_id": made.id, "content": "noon"}
    turns = [{"role": "user", "content": TALK}, said.message.model_dump(exclude_none=True), result]
    assert ask(server, turns, tools=TOOLS).choices[0].message.content
    with client(server).chat.completions.stream(
        model=server.model, messages=[{"role": "user", "content": TALK}], temperature=0, **calling, **form
    ) as streamed:  # fmt: skip
        kinds = [each.type for each in streamed]
        final = streamed.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert final.message.tool_calls[0].id.startswith("call_")
    assert final.finish_reason == "tool_calls"


def forced_tool(server):
    for choice in ("required", NAMED):
        said = ask(server, tools=TOOLS, tool_choice=choice, max_tokens=120).choices[0]
        (made,) = said.message.tool_calls
        assert json.loads(made.function.arguments)["zone"] in {"UTC", "CET"}
        assert not said.message.content
        chunks = list(ask(server, tools=TOOLS, tool_choice=choice, max_tokens=120, stream=True))
        deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(each.function.arguments for each in deltas) == made.function.arguments
        assert len([each.id for each in deltas if each.id]) == 1
    assert not ask(server, tools=TOOLS, tool_choice="none").choices[0].message.tool_calls


def json_schema(server):
    asked = {"model": server.model, "messages": [{"role": "user", "content": TALK}]}
    made = client(server).chat.completions.parse(**asked, response_format=OkOrNot)
    assert made.choices[0].message.parsed.ok in (True, False)
    schema = {"name": "ok", "strict": True, "schema": SCHEMA}
    said = ask(server, response_format={"type": "json_schema", "json_schema": schema})
    OkOrNot.model_validate_json(said.choices[0].message.content)
    free = ask(server, response_format={"type": "json_object"}, max_tokens=120)
    assert free.choices[0].message.content.startswith("{")


def stop(server):
    text = ask(server).choices[0].message.content
    said = ask(server, stop=[text[4:7]]).choices[0]
    assert (said.message.content, said.finish_reason) == (text[: text.index(text[4:7])], "stop")


def cancel(server):
    asked = {"stream": True, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with server.cancelled(), ask(server, **asked) as streamed:
        next(iter(streamed))
        assert server.num_requests == 1


def n(server):
    said = ask(server, n=2, temperature=1, seed=1)
    assert [each.index for each in said.choices] == [0, 1]
    indices = {each.choices[0].index for each in ask(server, n=2, stream=True)}
    assert indices == {0, 1}


def logprobs(server):
    entries = ask(server, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert all(len(each.top_logprobs) == 3 and each.logprob <= 0 for each in entries)
    entries = ask(server, logprobs=True).choices[0].logprobs.content
    assert all(each.top_logprobs == [] for each in entries)


def responses(server):
    asked = {"model": server.model, "input": TALK, "temperature": 0, "max_output_tokens": 16}
    api = client(server).responses
    said = api.create(instructions=SYSTEM, **asked)
    assert said.output_text == ask(server).choices[0].message.content
    with api.stream(instructions=SYSTEM, **asked) as streamed:
        text = "".join(each.delta for each in streamed if each.type == "response.output_text.delta")
    assert text == said.output_text
    calling = asked | {"max_output_tokens": 60, "tools": FLAT, "tool_choice": "required"}
    (made,) = api.create(**calling).output
    output = {"type": "function_call_output", "call_id": made.call_id, "output": "noon"}
    turns = [{"role": "user", "content": TALK}, made.model_dump(exclude_none=True), output]
    assert api.create(**asked | {"input": turns}, tools=FLAT).output_text
    assert api.parse(model=server.model, input=TALK, text_format=OkOrNot).output_parsed


def previous_response(server):
    api = client(server).responses
    asked = {"model": server.model, "max_output_tokens": 16}
    first = api.create(input=SYSTEM + TALK, **asked)
    second = api.create(input="And a tuple?", previous_response_id=first.id, **asked)
    assert second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert api.retrieve(first.id).output_text == first.output_text
    api.delete(first.id)
    raised(openai.NotFoundError, lambda: api.retrieve(first.id))


def count_tokens(server):
    counted = client(server).responses.input_tokens.count(model=server.model, input=TALK)
    said = client(server).responses.create(model=server.model, input=TALK, max_output_tokens=1)
    assert counted.input_tokens == said.usage.input_tokens


def embeddings(server):
    asked = client(server).embeddings.create
    raised(openai.NotFoundError, lambda: asked(model=server.model, input="a"), "embeddings")


def reasoning(server):
    message = ask(server, extra_body=THINKS).choices[0].message
    assert message.reasoning_content
    deltas = [each.choices[0].delta for each in ask(server, stream=True, extra_body=THINKS)]
    thought = "".join(getattr(each, "reasoning_content", "") for each in deltas)
    assert thought == message.reasoning_content
    asked = {"model": server.model, "input": TALK, "max_output_tokens": 16, "temperature": 0}
    asked |= {"reasoning": {"effort": "low"}, "instructions": SYSTEM}
    item = client(server).responses.create(**asked).output[0]
    assert (item.type, item.content[0].text) == ("reasoning", thought)
    events = client(server).responses.create(**asked, stream=True)
    told = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
    assert "".join(told) == thought


def errors(server):
    wrong = server._replace(key="no-such-key")
    raised(openai.AuthenticationError, lambda: ask(wrong))
    raised(openai.NotFoundError, lambda: ask(server, model="none"), "none")
    raised(openai.BadRequestError, lambda: ask(server, temperature=-1), "temperature")
    raised(openai.BadRequestError, lambda: ask(server, [{"role": "user", "content": TALK}] * 3000))
    with server.full():
        raised(openai.RateLimitError, lambda: ask(server))


def usage(server):
    ask(server)
    told = ask(server).usage
    assert told.total_tokens == told.prompt_tokens + told.completion_tokens
    assert 0 < told.prompt_tokens_details.cached_tokens < told.prompt_tokens


def scoring(server):
    asked = {"model": server.model, "prompt": SYSTEM, "echo": True, "logprobs": 1, "max_tokens": 0}
    first = client(server).completions.create(**asked).choices[0]
    assert first.text == SYSTEM
    told = first.logprobs.token_logprobs
    assert told[0] is None
    assert all(each <= 0 for each in told[1:])
    again = client(server).completions.create(**asked).choices[0].logprobs.token_logprobs
    assert all(abs(a - b) < 1e-4 for a, b in zip(told[1:], again[1:], strict=True))


if __name__ == "__main__":
    main(globals())

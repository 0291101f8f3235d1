"""LiteLLM, by chats, `/v1/responses` and `/v1/messages`."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # which it else loads from afar

import litellm
from cells import SCHEMA, SYSTEM, TALK, THINKS, TOOL, main, raised

litellm.suppress_debug_info = True

TOOLS = [{"type": "function", "function": TOOL}]
USER = [{"role": "user", "content": TALK}]


def place(server):
    return {"model": f"openai/{server.model}", "api_base": server.v1, "api_key": server.key, "max_retries": 0}  # fmt: skip


def ask(server, messages=USER, **given):
    options = place(server) | {"temperature": 0, "max_tokens": 16} | given
    messages = [{"role": "system", "content": SYSTEM}, *messages]
    return litellm.completion(messages=messages, **options)


def chat(server):
    said = ask(server).choices[0]
    assert said.message.content
    assert said.finish_reason == "length"
    turns = [*USER, said.message.model_dump(exclude_none=True), *USER]
    assert ask(server, turns).choices[0].message.content


def stream(server):
    said = ask(server).choices[0].message.content
    chunks = list(ask(server, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == said
    assert len({each.id for each in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == 16
    built = litellm.stream_chunk_builder(chunks)
    assert built.choices[0].message.content == said


def tools(server, choice="required"):
    asked = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 120}
    said = ask(server, **asked).choices[0]
    assert said.finish_reason in {"tool_calls", "stop"}
    (made,) = said.message.tool_calls
    assert json.loads(made.function.arguments)["zone"] in {"UTC", "CET"}
    result = {"role": "tool", "tool_call_id": made.id, "content": "noon"}
    assert ask(server, [*USER, said.message, result], tools=TOOLS).choices[0].message.content
    built = litellm.stream_chunk_builder(list(ask(server, stream=True, **asked)))
    (again,) = built.choices[0].message.tool_calls
    assert again.function.arguments == made.function.arguments


def forced_tool(server):
    tools(server, {"type": "function", "function": {"name": "now"}})


def json_schema(server):
    schema = {"name": "ok", "strict": True, "schema": SCHEMA}
    said = ask(server, response_format={"type": "json_schema", "json_schema": schema})
    assert json.loads(said.choices[0].message.content)["ok"] in (True, False)


def stop(server):
    text = ask(server).choices[0].message.content
    said = ask(server, stop=[text[4:7]]).choices[0]
    assert said.message.content == text[: text.index(text[4:7])]


def cancel(server):
    with server.cancelled():
        streamed = ask(server, stream=True, max_tokens=1500)
        next(iter(streamed))
        streamed.completion_stream.close()


def n(server):
    said = ask(server, n=2, temperature=1)
    assert [each.index for each in said.choices] == [0, 1]


def logprobs(server):
    said = ask(server, logprobs=True, top_logprobs=2)
    assert all(len(each.top_logprobs) == 2 for each in said.choices[0].logprobs.content)


def responses(server):
    asked = place(server) | {"input": TALK, "temperature": 0, "max_output_tokens": 16}
    said = litellm.responses(**asked).output[0].content[0].text
    events = list(litellm.responses(stream=True, **asked))
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    assert text == said
    raised(
        litellm.BadRequestError, lambda: litellm.responses(tools=[{"type": "web_search"}], **asked)
    )


def previous_response(server):
    asked = place(server) | {"max_output_tokens": 16}
    said = litellm.responses(input=TALK, **asked)
    more = litellm.responses(input="And a tuple?", previous_response_id=said.id, **asked)
    assert more.usage.input_tokens > said.usage.total_tokens


async def messages(server):
    asked = {"max_tokens": 16, "messages": USER, "api_key": server.key}
    asked |= {"model": f"anthropic/{server.model}", "api_base": server.url}
    said = await litellm.anthropic.messages.acreate(**asked)
    assert said["content"][0]["text"]
    assert litellm.completion(**asked).choices[0].message.content


def embeddings(server):
    raised(litellm.NotFoundError, lambda: litellm.embedding(input=["a"], **place(server)), "embeddings")  # fmt: skip


def reasoning(server):
    thought = ask(server, extra_body=THINKS).choices[0].message.reasoning_content
    assert thought
    built = litellm.stream_chunk_builder(list(ask(server, stream=True, extra_body=THINKS)))
    assert built.choices[0].message.reasoning_content == thought


def errors(server):
    raised(litellm.AuthenticationError, lambda: ask(server, api_key="no-such-key"))
    raised(litellm.NotFoundError, lambda: ask(server, model="openai/none"), "none")
    raised(litellm.BadRequestError, lambda: ask(server, temperature=-1), "temperature")
    long = [{"role": "user", "content": TALK * 3000}]
    raised(litellm.ContextWindowExceededError, lambda: ask(server, long))
    with server.full():
        raised(litellm.RateLimitError, lambda: ask(server))


def usage(server):
    ask(server)
    assert ask(server).usage.prompt_tokens_details.cached_tokens > 0


def scoring(server):
    asked = place(server) | {"model": f"text-completion-openai/{server.model}"}
    asked |= {"prompt": SYSTEM, "echo": True, "logprobs": 1, "max_tokens": 0}
    (choice,) = litellm.text_completion(**asked).choices
    assert choice.text == SYSTEM
    assert all(each <= 0 for each in choice.logprobs.token_logprobs[1:])


if __name__ == "__main__":
    main(globals())

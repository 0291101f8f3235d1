"""OpenAI's Agents SDK, by `/v1/responses` and by chats."""

from functools import cache

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cells import SYSTEM, TALK, Server, main
from pydantic import BaseModel

set_tracing_disabled(True)
ENDS = {"extra_body": {"stop": ["."]}}
"""Ends answers of any model: the SDK raises an error for one that `max_tokens` cuts."""


class OkOrNot(BaseModel):
    """A form of an answer."""

    ok: bool


@cache
def agents(server: Server, *, is_chat: bool):
    """Return a function that makes agents."""
    client = openai.AsyncOpenAI(base_url=server.v1, api_key=server.key, max_retries=0)
    kind = OpenAIChatCompletionsModel if is_chat else OpenAIResponsesModel
    model = kind(model=server.model, openai_client=client)

    def agent(**given):
        settings = {"temperature": 0, "max_tokens": 400, **ENDS} | given.pop("settings", {})
        options = {"instructions": SYSTEM, **given}
        return Agent("a", model=model, model_settings=ModelSettings(**settings), **options)

    return agent


async def chat(server):
    agent = agents(server, is_chat=True)()
    said = await Runner.run(agent, TALK)
    assert said.final_output
    more = await Runner.run(agent, [*said.to_input_list(), {"role": "user", "content": "And?"}])
    assert more.final_output


async def stream(server):
    for is_chat in (True, False):
        agent = agents(server, is_chat=is_chat)()
        said = await Runner.run(agent, TALK)
        streamed = Runner.run_streamed(agent, TALK)
        kinds = [each.type async for each in streamed.stream_events()]
        assert "raw_response_event" in kinds
        assert streamed.final_output == said.final_output


async def tools(server, choice="required"):
    called = []

    @function_tool
    def now(zone: bool) -> str:
        """Tell the time."""
        called.append(zone)
        return "noon"

    for is_chat in (True, False):
        called.clear()
        settings = {"tool_choice": choice}
        agent = agents(server, is_chat=is_chat)(tools=[now], settings=settings)
        said = await Runner.run(agent, TALK, max_turns=3)
        assert said.final_output
        assert called[0] in (True, False)
        streamed = Runner.run_streamed(agent, TALK, max_turns=3)
        names = [each.name async for each in streamed.stream_events() if each.type == "run_item_stream_event"]  # fmt: skip
        assert {"tool_called", "tool_output"} <= {*names}


async def forced_tool(server):
    await tools(server, choice="now")


async def json_schema(server):
    for is_chat in (True, False):
        agent = agents(server, is_chat=is_chat)(output_type=OkOrNot)
        said = await Runner.run(agent, TALK)
        assert said.final_output.ok in (True, False)


async def responses(server):
    said = await Runner.run(agents(server, is_chat=False)(), TALK)
    assert said.final_output


async def previous_response(server):
    agent = agents(server, is_chat=False)()
    said = await Runner.run(agent, TALK)
    more = await Runner.run(agent, "And a tuple?", previous_response_id=said.last_response_id)
    assert more.raw_responses[0].usage.input_tokens_details.cached_tokens > 0


async def errors(server):
    agent = agents(server._replace(key="no-such-key"), is_chat=False)()
    await _raised(openai.AuthenticationError, agent)
    await _raised(openai.BadRequestError, agents(server, is_chat=False)(), TALK * 3000)
    with server.full():
        await _raised(openai.RateLimitError, agents(server, is_chat=True)())


async def _raised(kind, agent, said=TALK):
    try:
        await Runner.run(agent, said)
    except kind:
        return
    raise AssertionError(f"no {kind.__name__} was raised")


async def usage(server):
    for is_chat in (True, False):
        agent = agents(server, is_chat=is_chat)()
        await Runner.run(agent, TALK)
        said = await Runner.run(agent, TALK)
        assert said.context_wrapper.usage.input_tokens_details.cached_tokens > 0


if __name__ == "__main__":
    main(globals())

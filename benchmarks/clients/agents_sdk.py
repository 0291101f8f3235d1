"""OpenAI's Agents SDK against `quire serve`, by `/v1/responses`: text, a tool, a stream, a form, two turns.

    pip install openai-agents
    quire serve --port 8000 &
    python benchmarks/clients/agents_sdk.py http://127.0.0.1:8000/v1

quire-tiny calls no tool by itself: the first turn has to call one. Prints a line per check, and fails at the first wrong one.
"""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

called = []


@function_tool
def now(zone: int) -> str:
    """Tell the time."""
    called.append(zone)
    return "noon"


class OkOrNot(BaseModel):
    """A form of an answer."""

    ok: bool


async def main(url):
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    (found,) = (await client.models.list()).data
    model = OpenAIResponsesModel(model=found.id, openai_client=client)
    plain = ModelSettings(max_tokens=400, temperature=0)

    agent = Agent("short", instructions="Be short.", model=model, model_settings=plain)
    said = await Runner.run(agent, "What is a list?")
    print("text:", said.final_output)
    assert said.final_output

    more = await Runner.run(
        agent, [*said.to_input_list(), {"role": "user", "content": "And a tuple?"}]
    )
    cached = more.raw_responses[0].usage.input_tokens_details.cached_tokens
    print("second turn by items, cached tokens:", cached)
    assert cached >= said.raw_responses[0].usage.input_tokens // 16 * 16 > 0

    by_id = await Runner.run(agent, "And a dict?", previous_response_id=said.last_response_id)
    cached = by_id.raw_responses[0].usage.input_tokens_details.cached_tokens
    print("second turn by previous_response_id, cached tokens:", cached)
    assert cached > 0

    streamed = Runner.run_streamed(agent, "What is a list?")
    kinds = [
        each.data.type
        async for each in streamed.stream_events()
        if each.type == "raw_response_event"
    ]
    print("stream:", len(kinds), "events, the last", kinds[-1])
    assert streamed.final_output == said.final_output

    calls = ModelSettings(max_tokens=400, temperature=0, tool_choice="required")
    tooled = Agent("tools", model=model, model_settings=calls, tools=[now])
    told = await Runner.run(tooled, "What time is it?", max_turns=3)
    print("tool:", called, [each.type for each in told.new_items], repr(told.final_output))
    assert called
    assert told.final_output

    shaped = Agent(
        "form", model=model, output_type=OkOrNot, model_settings=ModelSettings(temperature=0)
    )
    formed = await Runner.run(shaped, "Is it?")
    print("form:", formed.final_output)
    assert formed.final_output.ok in (True, False)


asyncio.run(main(sys.argv[1]))

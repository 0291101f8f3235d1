"""Pydantic AI, by chats, `/v1/responses` and `/v1/messages`."""

from cells import SYSTEM, TALK, THINKS, main
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError, UnexpectedModelBehavior
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class OkOrNot(BaseModel, extra="forbid"):
    """A form of an answer; small models would add to one that is open."""

    ok: bool


def chats(server, name=None):
    provider = OpenAIProvider(base_url=server.v1, api_key=server.key)
    return OpenAIChatModel(name or server.model, provider=provider)


def responding(server):
    provider = OpenAIProvider(base_url=server.v1, api_key=server.key)
    return OpenAIResponsesModel(server.model, provider=provider)


def messaging(server):
    provider = AnthropicProvider(base_url=server.url, api_key=server.key)
    return AnthropicModel(server.model, provider=provider)


KINDS = (chats, responding, messaging)


def agent(model, *, settings=None, **given):
    own = {"temperature": 0, "max_tokens": 16} | (settings or {})
    if isinstance(model, AnthropicModel):
        own.pop("temperature")
    return Agent(model, model_settings=own, instructions=SYSTEM, **given)


async def _talk(model):
    said = await agent(model).run(TALK)
    assert said.output
    more = await agent(model).run("And a tuple?", message_history=said.all_messages())
    assert more.output


async def chat(server):
    await _talk(chats(server))


async def responses(server):
    await _talk(responding(server))


async def messages(server):
    await _talk(messaging(server))


async def stream(server):
    for kind in KINDS:
        async with agent(kind(server)).run_stream(TALK) as streamed:
            pieces = [each async for each in streamed.stream_text(delta=True)]
        assert "".join(pieces) == await streamed.get_output()


async def tools(server, choice="required"):
    for kind in KINDS:
        called = []

        def now(zone: bool, called=called) -> str:
            """Tell the time."""
            called.append(zone)
            return "noon"

        def choose(_, called=called):
            return {"tool_choice": "none" if called else choice, "max_tokens": 120}

        made = Agent(kind(server), model_settings=choose, instructions=SYSTEM)
        made.tool_plain(_plain(now))
        assert (await made.run(TALK)).output
        assert called


def _plain(now):
    def tool(zone: bool) -> str:
        """Tell the time."""
        return now(zone)

    tool.__name__ = "now"
    return tool


async def forced_tool(server):
    for kind in KINDS:
        made = agent(kind(server), output_type=ToolOutput(OkOrNot), settings={"max_tokens": 200})
        assert (await made.run(TALK)).output.ok in (True, False)


async def json_schema(server):
    for kind in (chats, responding):  # of Anthropic's models it knows by name which have schemas
        made = agent(kind(server), output_type=NativeOutput(OkOrNot), settings={"max_tokens": 60})
        assert (await made.run(TALK)).output.ok in (True, False)


async def stop(server):
    text = (await agent(chats(server)).run(TALK)).output
    said = await agent(chats(server), settings={"stop_sequences": [text[4:7]]}).run(TALK)
    assert said.output == text[: text.index(text[4:7])]


async def logprobs(server):
    settings = {"openai_logprobs": True, "openai_top_logprobs": 2}
    said = await agent(chats(server), settings=settings).run(TALK)
    assert said.response.provider_details["logprobs"]


async def reasoning(server):
    asked = {"extra_body": THINKS}, {"anthropic_thinking": {"type": "enabled", "budget_tokens": 16}}
    for kind, settings in zip((chats, messaging), asked, strict=True):
        parts = []
        async with agent(kind(server), settings=settings).iter(TALK) as run:
            try:
                async for node in run:
                    parts += getattr(getattr(node, "model_response", None), "parts", ())
            except UnexpectedModelBehavior:  # the answer is cut before its text
                pass
        assert any(isinstance(each, ThinkingPart) and each.content for each in parts)


async def errors(server):
    wrong = agent(chats(server._replace(key="no-such-key")))
    await _raised(401, wrong)
    await _raised(404, agent(chats(server, "none")))
    await _raised(400, agent(chats(server), settings={"temperature": -1}))
    with server.full():
        await _raised(429, agent(chats(server), settings={"max_retries": 0}))


async def _raised(status, made):
    try:
        await made.run(TALK)
    except ModelHTTPError as error:
        told = error.status_code
    else:
        raise AssertionError("nothing was raised")
    assert told == status


async def usage(server):
    for kind in KINDS:
        for _ in range(2):
            said = await agent(kind(server)).run(TALK)
        assert said.usage.cache_read_tokens > 0, kind.__name__


if __name__ == "__main__":
    main(globals())

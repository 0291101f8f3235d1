"""LlamaIndex, by `OpenAILike` and `OpenAILikeResponses`."""

import gc

import openai
from cells import SYSTEM, TALK, main, raised
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel

ASKED = [ChatMessage(role="system", content=SYSTEM), ChatMessage(role="user", content=TALK)]


class OkOrNot(BaseModel, extra="forbid"):
    """A form of an answer; small models would add to one that is open."""

    ok: bool


def now(zone: bool) -> str:  # noqa: ARG001 - the model gives it
    """Tell the time."""
    return "noon"


NOW = FunctionTool.from_defaults(now)


def model(server, **given):
    options = {"model": server.model, "api_base": server.v1, "api_key": server.key}
    options |= {"is_chat_model": True, "is_function_calling_model": True, "context_window": 4000}
    return OpenAILike(**options | {"temperature": 0, "max_tokens": 16, "max_retries": 0} | given)


def chat(server):
    said = model(server).chat(ASKED)
    assert said.message.content
    more = [*ASKED, said.message, ChatMessage(role="user", content="And a tuple?")]
    assert model(server).chat(more).message.content
    assert model(server).complete(TALK).text


def stream(server):
    pieces = [each.delta for each in model(server).stream_chat(ASKED)]
    assert "".join(pieces) == model(server).chat(ASKED).message.content


def tools(server):
    made = model(server, max_tokens=120)
    said = made.chat_with_tools([NOW], chat_history=ASKED, tool_required=True)
    (call,) = made.get_tool_calls_from_response(said)
    assert call.tool_kwargs["zone"] in (True, False)
    result = ChatMessage(role="tool", content="noon", additional_kwargs={"tool_call_id": call.tool_id})  # fmt: skip
    assert made.chat_with_tools([NOW], chat_history=[*ASKED, said.message, result]).message.content
    *_, last = made.stream_chat_with_tools([NOW], chat_history=ASKED, tool_required=True)
    assert made.get_tool_calls_from_response(last)[0].tool_name == "now"


def forced_tool(server):
    made = model(server, max_tokens=120)
    said = made.chat_with_tools([NOW], chat_history=ASKED, tool_choice="now")
    assert made.get_tool_calls_from_response(said)[0].tool_name == "now"


def json_schema(server):
    made = model(server, max_tokens=60, should_use_structured_outputs=True)
    assert made.as_structured_llm(OkOrNot).chat(ASKED).raw.ok in (True, False)
    called = FunctionCallingProgram.from_defaults(
        OkOrNot, prompt_template_str=TALK, llm=model(server, max_tokens=120), tool_required=True
    )
    assert called().ok in (True, False)


def stop(server):
    text = model(server).chat(ASKED).message.content
    said = model(server).chat(ASKED, stop=[text[4:7]])
    assert said.message.content == text[: text.index(text[4:7])]


def cancel(server):
    with server.cancelled():
        streamed = model(server, max_tokens=1500).stream_chat(ASKED)
        next(streamed)
        streamed.close()
        del streamed
        gc.collect()  # it keeps the connection in a reference cycle


def logprobs(server):
    said = model(server, logprobs=True, top_logprobs=2).chat(ASKED)
    assert all(len(each) == 2 for each in said.logprobs)


def responses(server):
    options = {"model": server.model, "api_base": server.v1, "api_key": server.key}
    options |= {"temperature": 0, "max_output_tokens": 16, "max_retries": 0}
    made = OpenAILikeResponses(**options, context_window=4000)
    said = made.chat(ASKED)
    assert said.message.content
    assert "".join(each.delta for each in made.stream_chat(ASKED)) == said.message.content


def previous_response(server):
    options = {"model": server.model, "api_base": server.v1, "api_key": server.key}
    options |= {"max_output_tokens": 16, "track_previous_responses": True, "max_retries": 0}
    made = OpenAILikeResponses(**options, context_window=4000)
    made.chat(ASKED)
    more = made.chat([ChatMessage(role="user", content="And a tuple?")])
    assert more.raw.previous_response_id


def errors(server):
    wrong = model(server._replace(key="no-such-key"))
    raised(openai.AuthenticationError, lambda: wrong.chat(ASKED))
    raised(openai.NotFoundError, lambda: model(server, model="none").chat(ASKED), "none")
    raised(openai.BadRequestError, lambda: model(server).chat(ASKED, top_p=2))
    with server.full():
        raised(openai.RateLimitError, lambda: model(server).chat(ASKED))


def usage(server):
    model(server).chat(ASKED)
    assert model(server).chat(ASKED).raw.usage.prompt_tokens_details.cached_tokens > 0


if __name__ == "__main__":
    main(globals())

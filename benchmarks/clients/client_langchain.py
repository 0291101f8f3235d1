"""LangChain, by `langchain-openai` (chats and `/v1/responses`) and `langchain-anthropic`."""

import openai
from cells import SYSTEM, TALK, TOOL, main, raised
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

TOOLS = [{"type": "function", "function": TOOL}]
ASKED = [SystemMessage(SYSTEM), HumanMessage(TALK)]


class OkOrNot(BaseModel, extra="forbid"):
    """A form of an answer; small models would add to one that is open."""

    ok: bool


def model(server, **given):
    options = {"model": server.model, "base_url": server.v1, "api_key": server.key}
    return ChatOpenAI(**options | {"temperature": 0, "max_tokens": 16, "max_retries": 0} | given)


def claude(server, **given):
    options = {"model": server.model, "base_url": server.url, "api_key": server.key}
    return ChatAnthropic(**options | {"max_tokens": 16, "max_retries": 0} | given)


def chat(server):
    said = model(server).invoke(ASKED)
    assert said.content
    assert model(server).invoke([*ASKED, said, HumanMessage("And a tuple?")]).content


def stream(server):
    chunks = list(model(server, stream_usage=True).stream(ASKED))
    assert "".join(each.content for each in chunks) == model(server).invoke(ASKED).content
    total = sum(each.usage_metadata["output_tokens"] for each in chunks if each.usage_metadata)
    assert total == 16


def tools(server, choice="any"):
    for made in (model(server, max_tokens=120), claude(server, max_tokens=120)):
        called = made.bind_tools(TOOLS, tool_choice=choice).invoke(ASKED)
        (call,) = called.tool_calls
        assert call["args"]["zone"] in {"UTC", "CET"}
        turns = [*ASKED, called, ToolMessage("noon", tool_call_id=call["id"])]
        assert made.bind_tools(TOOLS).invoke(turns).content
        total = None
        for chunk in made.bind_tools(TOOLS, tool_choice=choice).stream(ASKED):
            total = chunk if total is None else total + chunk
        assert total.tool_calls[0]["args"]["zone"] in {"UTC", "CET"}


def forced_tool(server):
    tools(server, "now")


def json_schema(server):
    for method in ("json_schema", "function_calling"):
        made = model(server, max_tokens=120).with_structured_output(OkOrNot, method=method)
        assert made.invoke(ASKED).ok in (True, False)


def stop(server):
    text = model(server).invoke(ASKED).content
    said = model(server).invoke(ASKED, stop=[text[4:7]])
    assert said.content == text[: text.index(text[4:7])]


def cancel(server):
    with server.cancelled():
        streamed = model(server, max_tokens=1500).stream(ASKED)
        next(streamed)
        streamed.close()


def n(server):
    (made,) = model(server, n=2, temperature=1).generate([ASKED]).generations
    assert len(made) == 2


def logprobs(server):
    said = model(server, logprobs=True, top_logprobs=2).invoke(ASKED)
    assert all(len(e["top_logprobs"]) == 2 for e in said.response_metadata["logprobs"]["content"])


def responses(server):
    made = model(server, use_responses_api=True)
    said = made.invoke(ASKED)
    assert said.text
    assert "".join(each.text for each in made.stream(ASKED)) == said.text
    called = model(server, use_responses_api=True, max_tokens=120).bind_tools(TOOLS, tool_choice="now").invoke(ASKED)  # fmt: skip
    turns = [*ASKED, called, ToolMessage("noon", tool_call_id=called.tool_calls[0]["id"])]
    assert made.bind_tools(TOOLS).invoke(turns).text


def previous_response(server):
    made = model(server, use_previous_response_id=True, use_responses_api=True, store=True)
    said = made.invoke(ASKED)
    more = made.invoke([*ASKED, said, HumanMessage("And a tuple?")])
    assert more.usage_metadata["input_token_details"]["cache_read"] > 0


def messages(server):
    said = claude(server).invoke(ASKED)
    assert said.content
    assert "".join(each.text for each in claude(server).stream(ASKED))


def count_tokens(server):
    assert claude(server).get_num_tokens_from_messages(ASKED) > 0


def embeddings(server):
    given = {"model": server.model, "base_url": server.v1, "api_key": server.key, "max_retries": 0}
    made = OpenAIEmbeddings(check_embedding_ctx_length=False, **given)
    raised(openai.NotFoundError, lambda: made.embed_query("a"), "embeddings")


def reasoning(server):
    made = claude(server, thinking={"type": "enabled", "budget_tokens": 16})
    (block,) = made.invoke(ASKED).content
    assert block["type"] == "thinking"
    assert block["thinking"]
    total = None
    for chunk in made.stream(ASKED):
        total = chunk if total is None else total + chunk
    assert total.content[0]["thinking"]


def errors(server):
    wrong = model(server._replace(key="no-such-key"))
    raised(openai.AuthenticationError, lambda: wrong.invoke(ASKED))
    raised(openai.NotFoundError, lambda: model(server, model="none").invoke(ASKED), "none")
    raised(openai.BadRequestError, lambda: model(server, temperature=-1).invoke(ASKED))
    with server.full():
        raised(openai.RateLimitError, lambda: model(server).invoke(ASKED))


def usage(server):
    model(server).invoke(ASKED)
    assert model(server).invoke(ASKED).usage_metadata["input_token_details"]["cache_read"] > 0


def scoring(server):
    options = {"model": server.model, "base_url": server.v1, "api_key": server.key}
    kwargs = {"echo": True, "logprobs": 1}
    made = OpenAI(**options, max_tokens=0, model_kwargs=kwargs).generate([SYSTEM])
    ((generation,),) = made.generations
    assert generation.text == SYSTEM
    assert all(e <= 0 for e in generation.generation_info["logprobs"]["token_logprobs"][1:])


if __name__ == "__main__":
    main(globals())

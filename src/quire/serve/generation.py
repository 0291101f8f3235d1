"""Completions and chats: from a request to an answer, whole or as a stream, that ends with its client."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.engines.loop import RequestOutput, SamplingParams
from quire.errors import RequestFailed
from quire.serve import chat
from quire.serve.protocol import ChatRequest, CompletionRequest, refused
from quire.serve.replies import Reply, ReplyChoice
from quire.serve.service import Ids, ServedModel, ending
from quire.web.clients import EventStream, sse, until_gone
from quire.web.errors import ApiError
from quire.web.keys import scope_of

PARAMS = {*SamplingParams.__struct_fields__} - {"max_tokens", "logprobs"}


async def answered(
    service: ServedModel, request: Request, asked: ChatRequest | CompletionRequest
) -> Response | dict[str, Any]:
    """Return the answer to a request of `request.state.tenant`. Raises `ApiError` and what the engine refuses."""
    tenant: str | None = request.state.tenant
    asked.check()
    service.check_model(asked.model)
    given = asked.prompts() if isinstance(asked, CompletionRequest) else [asked]
    prompts = [await service.ids(each) for each in given]
    places = service.admitted(tenant, len(prompts) * asked.num_answers)
    params, tools = sampling_of(service, asked, prompts)
    usage = asked.stream_options is not None and asked.stream_options.include_usage
    reply = Reply(
        service.model,
        [ReplyChoice(at, service.tokenizer, tools=tools) for at in range(len(prompts) * asked.n)],
        n=asked.n,
        chat=isinstance(asked, ChatRequest),
        top=params.logprobs,
        usage=usage,
    )
    options = asked.options() | {"scope": scope_of(tenant, asked.cache_salt)}
    told = _told(service, reply, places, service.outputs(prompts, params, options))
    if not asked.stream:
        await until_gone(request, _drained(told))
        return reply.whole()
    first = await until_gone(request, anext(told))  # what the engine refuses is refused before
    return EventStream(_events(first, told, reply), service.bounds.slow_s)


def sampling_of(
    service: ServedModel, asked: ChatRequest | CompletionRequest, prompts: Sequence[Ids]
) -> tuple[SamplingParams, chat.ToolFormat | None]:
    """Return the engine's parameters, and how tool calls are looked for in the answer. Raises `ApiError`, `ConfigError`."""
    if not prompts or not all(prompts):
        raise ApiError(400, "the prompt is empty; send some text or token ids", param="prompt")
    given = {name: getattr(asked, name) for name in PARAMS & set(asked.__struct_fields__)}
    given = {name: value for name, value in given.items() if value is not None}
    tools: chat.ToolFormat | None = None
    schema: dict[str, Any] | None = None
    logprobs: int | None = asked.logprobs
    if isinstance(asked, ChatRequest):
        logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
        schema = chat.forced_schema(asked)
        if chat.tools_of(asked):
            tools = service.tool_format if schema is None else "json"
            given["skip_special_tokens"] &= tools not in ("mistral", "llama3")
    if schema is None and (form := asked.response_format) and form.type != "text":
        schema = form.json_schema.schema if form.json_schema else {"type": "object"}
    if schema is not None:
        given["json_schema"] = schema
    limit, longest = service.max_model_len, max(map(len, prompts))
    max_tokens = asked.most_tokens()
    if max_tokens is None:
        max_tokens = max(limit - longest, 1)
    if longest + max_tokens > limit:
        raise ApiError(
            400,
            f"the prompt has {longest} tokens and max_tokens is {max_tokens}, together "
            f"{longest + max_tokens}; the limit is {limit}: send a shorter prompt, or ask for less",
            param="messages" if isinstance(asked, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given), tools


async def _told(
    service: ServedModel,
    reply: Reply,
    places: AbstractAsyncContextManager[None],
    outputs: AsyncGenerator[tuple[int, RequestOutput]],
) -> AsyncGenerator[ReplyChoice]:
    """Yield the choices that have news, as long as the engine works for them."""
    begun = set[int]()
    took = service.metrics.took()
    async with places, aclosing(outputs):
        try:
            async for place, output in outputs:
                took(output)
                if place not in begun:
                    begun.add(place)
                    reply.prompt_tokens += len(output.prompt_token_ids)
                    reply.cached_tokens += output.num_cached_tokens
                for made in output.outputs:
                    choice = reply.choices[place * reply.n + made.index]
                    choice.take(made)
                    yield choice
        except RequestFailed as error:
            if service.is_ending:
                raise ending() from error
            raise


async def _drained(told: AsyncGenerator[ReplyChoice]) -> None:
    async for _ in told:
        pass


async def _events(
    first: ReplyChoice, told: AsyncGenerator[ReplyChoice], reply: Reply
) -> AsyncGenerator[bytes]:
    """Yield a stream that has begun, and its end; an error in it becomes its last event but one."""
    async with aclosing(told):
        for event in filter(None, (*reply.opening(), reply.chunk(first))):
            yield event
        try:
            async for choice in told:
                if event := reply.chunk(choice):
                    yield event
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is told
            yield sse(refused(error).document())
        for event in reply.closing():
            yield event

"""Completions and chats: from a request to an answer, whole or as a stream, that ends with its client."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from quire.chat.tools import FORMATS
from quire.engines.loop import SamplingParams
from quire.errors import ConfigError
from quire.serve.protocol import FIELDS, ChatRequest, CompletionRequest, Generation, Ids
from quire.serve.replies import Reply, ReplyChoice
from quire.serve.service import ServedModel
from quire.web.clients import EventStream, sse, until_gone
from quire.web.errors import ApiError, refused
from quire.web.keys import scope_of

PARAMS = {*SamplingParams.__struct_fields__} & {*Generation.__struct_fields__} - {"max_tokens"}
"""What the engine takes of a request as it is."""

Item = TypeVar("Item")


async def answered(
    service: ServedModel, request: Request, asked: ChatRequest | CompletionRequest
) -> Response | dict[str, Any]:
    """Return the answer to a request of `request.state.tenant`. Raises `ApiError` and what the engine refuses."""
    tenant: str | None = request.state.tenant
    service.check_model(asked.model)
    prompts = await service.ids(asked)
    is_chat = isinstance(asked, ChatRequest)
    forced = asked.forced_call() if is_chat else None
    tools = None
    if is_chat and asked.callable_tools:
        tools = service.tool_format if forced is None else "json"
    params = sampling_of(asked, prompts, service.max_model_len, tools, forced or asked.schema())
    scope = scope_of(tenant, asked.cache_salt)
    reply = Reply(
        service.model,
        [ReplyChoice(at, service.tokenizer, tools=tools) for at in range(len(prompts) * asked.n)],
        n=asked.n,
        chat=is_chat,
        top=asked.num_logprobs,
        usage=asked.stream_options is not None and asked.stream_options.include_usage,
    )

    async def told() -> AsyncGenerator[ReplyChoice]:
        """Yield the choices that have news, as long as the engine works for them."""
        async with service.admitted(tenant, len(prompts) * asked.num_answers):
            streams = [
                service.running.generate(each, params, scope=scope, **asked.options())
                for each in prompts
            ]
            took = service.times.begin()
            async with aclosing(merged(streams)) as outputs:
                async for place, output in outputs:
                    took(output)
                    for choice in reply.take(place, output):
                        yield choice

    async def events() -> AsyncGenerator[bytes]:
        """Yield a stream; once it has begun, an error becomes its last event but one."""
        has_begun = False
        async with aclosing(told()) as news:
            try:
                async for choice in news:
                    for event in () if has_begun else reply.opening():
                        yield event
                    has_begun = True
                    if event := reply.chunk(choice):
                        yield event
            except Exception as error:
                if not has_begun:
                    raise
                yield sse(refused(error, FIELDS).document())
            for event in reply.closing():
                yield event

    async def whole() -> dict[str, Any]:
        async with aclosing(told()) as news:
            async for _ in news:
                pass
        return reply.whole()

    if not asked.stream:
        return await until_gone(request, whole())
    stream = events()
    first = await until_gone(request, anext(stream))  # what the engine refuses is refused before
    return EventStream(stream, service.bounds.slow_s, first=first)


def sampling_of(
    asked: ChatRequest | CompletionRequest,
    prompts: Sequence[Ids],
    limit: int,
    tools: str | None,
    schema: dict[str, Any] | None,
) -> SamplingParams:
    """Return the engine's parameters: for an answer with tool calls in a format, that matches a schema. Raises `ApiError`, `ConfigError`."""
    if not all(prompts):
        raise ConfigError("prompt is empty; send some text or token ids")
    longest, most = max(map(len, prompts)), asked.max_tokens
    if longest + (most or 1) > limit:
        raise ApiError(
            400,
            f"the prompt has {longest} tokens and max_tokens is {most}; together they may have "
            f"{limit}: send a shorter prompt, or ask for less",
            param="messages" if isinstance(asked, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    given = {name: getattr(asked, name) for name in PARAMS if getattr(asked, name) is not None}
    if tools is not None and FORMATS[tools].is_special:
        given["skip_special_tokens"] = False
    return SamplingParams(max_tokens=most, logprobs=asked.num_logprobs, json_schema=schema, **given)


async def merged(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """Yield the items of generators as they come, each with its generator's place; closed early, all of them are."""
    if len(streams) == 1:  # most requests: without a task for each item
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(each, None)): at for at, each in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place, item = waiting.pop(task), task.result()
                if item is not None:
                    yield place, item
                    waiting[asyncio.ensure_future(anext(streams[place], None))] = place
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for each in streams:
            await each.aclose()

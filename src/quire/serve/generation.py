"""Completions and chats: from a request to an answer, whole or as a stream, that ends with its client."""

from asyncio import to_thread
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.chat import StructuredOutputs
from quire.chat.tools import FORMATS
from quire.engines.loop import SamplingParams
from quire.errors import ConfigError
from quire.serve.next_turn import demote_dropped, has_next_turn
from quire.serve.protocol import FIELDS, ChatRequest, CompletionRequest, Generation, Ids
from quire.serve.replies import AnswerMarks, Reply, ReplyChoice
from quire.serve.service import ServedModel
from quire.web.clients import EventStream, merged, until_gone
from quire.web.errors import refused
from quire.web.keys import scope_of

# What the engine takes of a request as it is
PARAMS = {*SamplingParams.__struct_fields__} & {*Generation.__struct_fields__} - {"max_tokens"}


async def answered(
    service: ServedModel,
    shape: Callable[..., Reply],
    asked: ChatRequest | CompletionRequest,
    request: Request,
) -> Response | dict[str, Any]:
    """Return the answer to a request of `request.state.tenant`, in a shape. Raises `ApiError` and what the engine refuses."""
    tenant: str | None = request.state.tenant
    service.check_model(asked.model)
    service.keys.check_priority(tenant, asked.priority)
    limit = service.max_model_len
    prompts = [asked.truncated(each, limit) for each in await service.ids(asked)]
    wanted = asked.response_format and asked.response_format.structured()
    call = await service.reader.call_form(asked, wanted)
    params, marks = sampling_of(service, asked, prompts, call)
    adapter = asked.adapter(service.adapters)
    reply = shape(asked, adapter or service.model, service.reader.tokenizer, len(prompts), marks)

    async def told() -> AsyncGenerator[ReplyChoice]:
        """Yield the choices that have news, as long as the engine works for them."""
        options: dict[str, Any] = asked.options() | {"max_wait_s": service.bounds.max_wait_s}
        options["scope"] = scope = scope_of(tenant, asked.cache_salt, adapter)
        retained = service.retention.granting(scope, prompts, asked.retain_s)
        with service.admitted(tenant, prompts, asked) as took, retained as grant:
            options["retain_s"] = grant.seconds
            service.log.num_by_adapter[adapter or ""] += len(prompts)
            streams = [service.running.generate(each, params, **options) for each in prompts]
            try:
                async with aclosing(merged(streams)) as outputs:
                    async for place, output in outputs:
                        grant.is_used = True
                        took(place, output)
                        for choice in reply.take(place, output):
                            yield choice
            except ConfigError as error:
                raise asked.in_its_words(error) from error
            request.state.usage = reply.prompt_tokens, reply.cached_tokens, reply.completion_tokens
            if seconds := asked.pin_s:
                await service.running.call(partial(service.pins.keep, scope, prompts[0], seconds))
        if isinstance(asked, ChatRequest) and service.drops_reasoning and has_next_turn(asked):
            service.do_later(demote_dropped(service, asked, prompts[0], reply, scope))

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
                yield reply.broken(refused(error, FIELDS))
            for event in reply.closing():
                yield event

    async def whole() -> dict[str, Any]:
        async with aclosing(told()) as news:
            async for _ in news:
                pass
        if asked.num_prompt_logprobs is None:
            return reply.whole()
        return await to_thread(reply.whole)  # long prompts have many tokens to decode

    if not asked.stream:
        return await until_gone(request, whole())
    stream = events()
    first = await until_gone(request, anext(stream))  # what the engine refuses is refused before
    return EventStream(stream, service.bounds.slow_s, first=first)


def sampling_of(
    service: ServedModel,
    asked: ChatRequest | CompletionRequest,
    prompts: Sequence[Ids],
    call: StructuredOutputs | None,
) -> tuple[SamplingParams, AnswerMarks]:
    """Return the engine's parameters, and how the answer marks its parts. Raises `ApiError`, `ConfigError`.

    `call`  the form of an answer that calls a tool as the chat template writes it, as it must or may
    """
    if not all(prompts):
        raise ConfigError("prompt is empty; send some text or token ids")
    asked.check_length(max(map(len, prompts)), service.max_model_len)
    given = {name: getattr(asked, name) for name in PARAMS if getattr(asked, name) is not None}
    marks, (field, form) = AnswerMarks(), asked.form() or ("", None)
    reasoning = None
    if isinstance(asked, ChatRequest):
        reasoning = service.reasoning_after(prompts[0], asked.continued)
    if field == "tools" and (call is None or reasoning):
        marks = AnswerMarks("json", has_short_ids=service.reader.needs_short_ids)
    elif isinstance(asked, ChatRequest) and asked.callable_tools:
        tools, short = service.reader.tool_format, service.reader.needs_short_ids
        form, marks = call or form, AnswerMarks(tools, has_short_ids=short)
        given["skip_special_tokens"] &= not FORMATS[tools].is_special
    if isinstance(asked, ChatRequest) and reasoning:
        marks = marks._replace(reasoning=reasoning, tells_reasoning=asked.include_reasoning)
        given["skip_special_tokens"] &= not reasoning.has_special(service.reader.tokenizer)
        given["reasoning_tags"] = form and reasoning.tags
    given = service.sampling | given
    own: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "logprobs": asked.num_logprobs,
        "prompt_logprobs": asked.num_prompt_logprobs,
        "structured_outputs": form,
    }
    return SamplingParams(**given | own), marks

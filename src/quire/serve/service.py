"""What all routes share: the engine, who may ask, how much is in flight, and the tokenizer."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from copy import deepcopy
from typing import Any

import msgspec
from starlette.requests import Request

from quire.engines.loop import AsyncEngine, RequestOutput, SamplingParams
from quire.serve import chat
from quire.serve.auth import ApiKeys
from quire.serve.metrics import Metrics
from quire.serve.protocol import ApiError, ChatRequest, PromptRequest

Ids = list[int]


class Bounds(msgspec.Struct, frozen=True):
    """What a server takes on.

    `max_inflight`  sequences that run or wait at once; more are told to come back (429)
    `max_body`      bytes of a request
    `slow_s`        seconds in which a body has to arrive, and in which a client has to take what it is sent
    """

    max_inflight: int = 256
    max_body: int = 4 << 20
    slow_s: float = 60.0


class ServedModel:
    """An engine as a server has it. `num_inflight`: the sequences of all requests that were admitted and have not ended."""

    def __init__(self, running: AsyncEngine, model: str, keys: ApiKeys, bounds: Bounds) -> None:
        self.running, self.model, self.keys, self.bounds = running, model, keys, bounds
        self.metrics = Metrics(running)
        self.max_model_len = running.engine.max_model_len
        self.num_inflight = 0
        self.created = int(time.time())
        self.tokenizer: Any = deepcopy(running.engine.tokenizer)  # its thread is not the engine's
        # What is longer than the model's tokens can be is not read: it would hold up the texts of others.
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))
        self.tool_format: chat.ToolFormat = chat.tool_format(
            getattr(self.tokenizer, "chat_template", None)
        )
        self._crew = ThreadPoolExecutor(1, "quire-text")

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` unless a model that a request names is this one."""
        if name not in (None, self.model):
            said = f"the model {name!r} is not served here; {self.model!r} is"
            raise ApiError(404, said, param="model", code="model_not_found")

    async def body(self, request: Request) -> bytes:
        """Return a request's body. Raises `ApiError` for one that is too large or too slow."""
        limit, body = self.bounds.max_body, bytearray()
        length = int(request.headers.get("content-length", "0"))
        try:
            async with asyncio.timeout(self.bounds.slow_s):
                if length <= limit:
                    async for piece in request.stream():
                        body += piece
                        if len(body) > limit:
                            break
        except TimeoutError:
            raise ApiError(408, f"the body did not come in {self.bounds.slow_s} seconds") from None
        if (size := max(length, len(body))) > limit:
            raise ApiError(
                413, f"the body has {size} bytes or more, the limit is {limit}; send less"
            )
        return bytes(body)

    async def ids(self, asked: PromptRequest | ChatRequest | str | Ids) -> Ids:
        """Return a prompt as token ids; one thread alone uses the tokenizer. Raises `ApiError`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._crew, self._ids, asked)

    async def text(self, ids: Ids) -> str:
        """Return token ids as text. Raises `ApiError`."""
        size = len(self.tokenizer)
        for token in ids:
            if not 0 <= token < size:
                raise ApiError(400, f"tokens are from 0 to {size - 1}, got {token}", param="tokens")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._crew, self.tokenizer.decode, ids)

    def _ids(self, asked: PromptRequest | ChatRequest | str | Ids) -> Ids:
        special = True
        if isinstance(asked, PromptRequest):
            if (asked.prompt is None) == (asked.messages is None):
                raise ApiError(400, "give prompt or messages, one of them", param="prompt")
            special, talk = asked.add_special_tokens, asked.messages
            asked = (
                ChatRequest(
                    messages=talk,
                    tools=asked.tools,
                    add_generation_prompt=asked.add_generation_prompt,
                )
                if talk is not None
                else asked.prompt or ""
            )
        if isinstance(asked, ChatRequest):
            special, asked = False, chat.prompt_of(self.tokenizer, asked)
        if not isinstance(asked, str):
            return asked
        if len(asked) > (most := self.max_model_len * self._longest_token):
            raise ApiError(
                400,
                f"a text of {len(asked)} characters has more than {self.max_model_len} tokens, the limit: "
                f"{most} characters are too many whatever they say; shorten it",
                param="prompt",
            )
        return self.tokenizer(asked, add_special_tokens=special)["input_ids"]

    @asynccontextmanager
    async def admitted(self, count: int) -> AsyncGenerator[None]:
        """Hold places for so many sequences. Raises `ApiError` 429 where there are none."""
        limit = self.bounds.max_inflight
        if count > limit:
            said = f"{count} sequences are asked for at once, the limit is {limit}; ask for fewer"
            raise ApiError(400, said, param="n")
        if self.num_inflight + count > limit:
            raise ApiError(
                429,
                f"{self.num_inflight} sequences run or wait and {count} more are asked for, the limit "
                f"is {limit}; come back later",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self.num_inflight += count
        try:
            yield
        finally:
            self.num_inflight -= count

    async def outputs(
        self, prompts: Sequence[Ids], params: SamplingParams, options: dict[str, Any]
    ) -> AsyncGenerator[tuple[int, RequestOutput]]:
        """Yield the outputs of all prompts as they come, each with the place of its prompt; closed early, all are aborted."""
        if len(prompts) == 1:
            async with aclosing(self.running.generate(prompts[0], params, **options)) as stream:
                async for output in stream:
                    yield 0, output
            return
        news: asyncio.Queue[tuple[int, RequestOutput] | Exception | None] = asyncio.Queue()

        async def follow(place: int, prompt: Ids) -> None:
            ended = None
            try:
                async with aclosing(self.running.generate(prompt, params, **options)) as stream:
                    async for output in stream:
                        news.put_nowait((place, output))
            except Exception as error:  # noqa: BLE001 - it is raised to whoever reads
                ended = error
            news.put_nowait(ended)

        tasks = [asyncio.create_task(follow(*each)) for each in enumerate(prompts)]
        try:
            running = len(tasks)
            while running:
                match await news.get():
                    case None:
                        running -= 1
                    case Exception() as error:
                        raise error
                    case told:
                        yield told
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

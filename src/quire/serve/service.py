"""What all routes share: the engine, who may ask, how much is in flight, and the tokenizer."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from copy import deepcopy
from typing import Any

import msgspec

from quire.engines.loop import AsyncEngine, RequestOutput, SamplingParams
from quire.serve import chat
from quire.serve.metrics import Metrics
from quire.serve.protocol import ChatRequest, PromptRequest
from quire.web.errors import ApiError
from quire.web.keys import ApiKeys

Ids = list[int]


def ending() -> ApiError:
    """Return what clients are told whom a server that ends does not answer."""
    return ApiError(
        503,
        "the server ends: it takes nothing new, and what ran too long is cut; ask again when there is another",
        code="shutting_down",
        headers={"Retry-After": "10"},
    )


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
    """An engine as a server has it.

    `inflight`   the sequences of each tenant's requests that were admitted and have not ended
    `is_ending`  whether what runs is finished, and nothing new is taken
    """

    def __init__(self, running: AsyncEngine, model: str, keys: ApiKeys, bounds: Bounds) -> None:
        self.running, self.model, self.keys, self.bounds = running, model, keys, bounds
        self.metrics = Metrics(running)
        self.max_model_len = running.engine.max_model_len
        self.inflight = Counter[str | None]()
        self.is_ending = False
        self.created = int(time.time())
        self.tokenizer: Any = deepcopy(running.engine.tokenizer)  # its thread is not the engine's
        # What is longer than the model's tokens can be is not read: it would hold up the texts of others.
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))
        self.tool_format: chat.ToolFormat = chat.tool_format(
            getattr(self.tokenizer, "chat_template", None)
        )
        self._crew = ThreadPoolExecutor(1, "quire-text")

    @property
    def num_inflight(self) -> int:
        """The sequences of all tenants."""
        return self.inflight.total()

    @property
    def is_taking(self) -> bool:
        """Whether requests are taken."""
        return self.running.is_alive and not self.is_ending

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` unless a model that a request names is this one."""
        if name not in (None, self.model):
            said = f"the model {name!r} is not served here; {self.model!r} is"
            raise ApiError(404, said, param="model", code="model_not_found")

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
            special = asked.add_special_tokens
            asked = asked if asked.prompt is None else asked.prompt
        if isinstance(asked, ChatRequest | PromptRequest):
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
    async def admitted(self, tenant: str | None, count: int) -> AsyncGenerator[None]:
        """Hold places for so many sequences of a tenant. Raises `ApiError` where there are none, or none any more.

        Half of all places is divided among the tenants; each gets its own, whatever others ask for.
        """
        limit, others = self.bounds.max_inflight, self.keys.names - {tenant}
        own = limit // (2 * (len(others) + 1))
        if count > (most := limit - own * len(others)):
            said = f"{count} sequences are asked for at once, the limit is {most}; ask for fewer"
            raise ApiError(400, said, param="n")
        if self.is_ending:
            raise ending()
        kept = sum(max(own - self.inflight[other], 0) for other in others)
        if self.num_inflight + count > limit - kept:
            raise ApiError(
                429,
                f"{self.num_inflight} sequences run or wait and {count} more are asked for, the limit "
                f"is {limit}, of which {kept} are kept for other keys; come back later",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self.inflight[tenant] += count
        try:
            yield
        finally:
            self.inflight[tenant] -= count

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

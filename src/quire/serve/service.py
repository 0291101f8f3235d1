"""What all routes share: the engine, who may ask, how much is in flight, and the tokenizer."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from copy import deepcopy
from typing import Any, TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from quire.chat import Conversation, tool_format
from quire.engines.loop import AsyncEngine
from quire.errors import ConfigError, RequestFailed
from quire.observe.prometheus import CacheCollector, RequestTimes
from quire.serve.protocol import Ids, PromptRequest
from quire.web.errors import ApiError
from quire.web.keys import ApiKeys

Made = TypeVar("Made")


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
        self.registry = CollectorRegistry()
        self.registry.register(CacheCollector(running.engine.manager, running.engine.tiers))
        self.times = RequestTimes(self.registry)
        self.max_model_len = running.engine.max_model_len
        self.inflight = Counter[str | None]()
        self.is_ending = False
        self._created = int(time.time())
        self.tokenizer: Any = deepcopy(running.engine.tokenizer)  # its thread is not the engine's
        self.tool_format = tool_format(getattr(self.tokenizer, "chat_template", None))
        # What is longer than the model's tokens can be is not read: it would hold up the texts of others.
        self._longest_text = self.max_model_len * max(map(len, self.tokenizer.get_vocab()))
        self._crew = ThreadPoolExecutor(1, "quire-text")

    @property
    def num_inflight(self) -> int:
        """The sequences of all tenants."""
        return self.inflight.total()

    @property
    def is_taking(self) -> bool:
        """Whether requests are taken."""
        return self.running.is_alive and not self.is_ending

    def card(self) -> dict[str, Any]:
        """Return what `/v1/models` says of it."""
        own = {"id": self.model, "object": "model", "created": self._created}
        return own | {"owned_by": "quire", "max_model_len": self.max_model_len}

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` unless a model that a request names is this one."""
        if name not in (None, self.model):
            said = f"the model {name!r} is not served here; {self.model!r} is"
            raise ApiError(404, said, param="model", code="model_not_found")

    async def ids(self, asked: PromptRequest) -> list[Ids]:
        """Return prompts as token ids; one thread alone uses the tokenizer. Raises `ConfigError`."""
        return await self._on_crew(lambda: [self._ids(asked, each) for each in asked.prompts()])

    async def one_prompt(self, asked: PromptRequest) -> Ids:
        """Return the prompt of a request that has one only. Raises `ConfigError`."""
        prompts = await self.ids(asked)
        if len(prompts) != 1:
            raise ConfigError(f"prompt is one text or list of token ids here, got {len(prompts)}")
        return prompts[0]

    async def text(self, ids: Ids) -> str:
        """Return token ids as text. Raises `ConfigError`."""
        last = len(self.tokenizer) - 1
        if outside := [token for token in ids if not 0 <= token <= last]:
            raise ConfigError(f"tokens are from 0 to {last}, got {outside[0]}")
        return await self._on_crew(lambda: self.tokenizer.decode(ids))

    async def _on_crew(self, work: Callable[[], Made]) -> Made:
        return await asyncio.get_running_loop().run_in_executor(self._crew, work)

    def _ids(self, asked: PromptRequest, given: str | Ids | Conversation) -> Ids:
        if isinstance(given, list):
            return given
        is_chat = not isinstance(given, str)
        text = given.text(self.tokenizer) if is_chat else given
        if len(text) > self._longest_text:
            raise ConfigError(
                f"prompt: a text of {len(text)} characters has more than {self.max_model_len} tokens, the "
                f"limit: {self._longest_text} characters are too many whatever they say; shorten it"
            )
        special = asked.add_special_tokens and not is_chat
        return self.tokenizer(text, add_special_tokens=special)["input_ids"]

    @asynccontextmanager
    async def admitted(self, tenant: str | None, count: int) -> AsyncGenerator[None]:
        """Hold places for so many sequences of a tenant. Raises `ApiError` where there are none, or none any more.

        Half of all places is divided among the tenants; each gets its own, whatever others ask for.
        """
        limit, others = self.bounds.max_inflight, self.keys.names - {tenant}
        own = limit // (2 * (len(others) + 1))
        if count > (most := limit - own * len(others)):
            raise ConfigError(
                f"n: {count} sequences are asked for at once, the limit is {most}; ask for fewer"
            )
        if self.is_ending:
            raise _ending()
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
        except RequestFailed as error:
            raise _ending() if self.is_ending else error from error
        finally:
            self.inflight[tenant] -= count


def _ending() -> ApiError:
    """Return what clients are told whom a server that ends does not answer."""
    said = "the server ends: it takes nothing new, and what ran too long is cut; ask again when there is another"
    return ApiError(503, said, code="shutting_down", headers={"Retry-After": "10"})

"""The state that all routes share: engine, API keys, requests in flight, tokenizer."""

import asyncio
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import msgspec

from quire.chat.conversation import drops_reasoning, template_of
from quire.chat.reader import PromptReader
from quire.chat.reasoning import TAIL, ReasoningFormat, reasoning_format
from quire.engines.loop import AsyncEngine, SamplingParams
from quire.errors import ConfigError, RequestFailed
from quire.observe.requests import RequestLog
from quire.ops.pins import pin_budget
from quire.serve.pins import ServerPins
from quire.serve.protocol import Generation, Ids, PromptRequest
from quire.serve.retention import RetentionBudget
from quire.serve.stored import KeptResponses
from quire.web.concurrency import ConcurrencyLimit
from quire.web.errors import ApiError
from quire.web.keys import ApiKeys
from quire.web.mends import Mends


class Bounds(msgspec.Struct, frozen=True):
    """Limits of a server.

    `max_inflight`  sequences that run or wait at once; more are told to come back (429)
    `max_wait_s`    seconds in which a request has to begin to be computed (503); None for any time
    `max_body`      bytes of a request
    `slow_s`        seconds in which a body has to arrive, and in which a client has to take what it is sent
    """

    max_inflight: int = 256
    max_wait_s: float | None = None
    max_body: int = 4 << 20
    slow_s: float = 60.0


class ServedModel:
    """An engine as a server has it.

    `names`      those of the model for clients, the first of them in answers
    `adapters`   those of its adapters, each a model for clients
    `sampling`   sampling parameters of requests that do not name them. Raises `ConfigError` for one that cannot be
    `reasoning`  how the model marks reasoning; None where it has none
    `drops_reasoning`  whether the chat template leaves out that of earlier turns
    `places`     those of sequences that were admitted and have not ended
    `retention`  prompts that tenants have retained: together at most as many tokens as pins may hold
    `pins`       pins of the operator, and of breakpoints
    `mends`      rules by which requests are changed before they are read
    `kept`       responses that a later request may go on from
    `is_ending`  whether what runs is finished, and nothing new is taken
    """

    def __init__(
        self,
        running: AsyncEngine,
        model: str,
        keys: ApiKeys,
        bounds: Bounds,
        *,
        other_names: Sequence[str] = (),
        sampling: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.running, self.model, self.keys, self.bounds = running, model, keys, bounds
        self.names, self.sampling = tuple(dict.fromkeys([model, *other_names])), dict(sampling)
        self.adapters = running.engine.adapters
        if taken := {*self.names}.intersection(self.adapters):
            raise ConfigError(
                f"{min(taken)!r} is the name of the model and of an adapter; rename one of them"
            )
        SamplingParams(**self.sampling)  # which a request would be refused for
        self.log = RequestLog(keys.in_order)
        self.max_model_len = running.engine.max_model_len
        self.reader = PromptReader(running.engine.tokenizer, self.max_model_len)
        self.read_reasoning("auto")
        manager = running.engine.manager
        share = pin_budget(manager) * manager.block_size // max(len(keys.names), 1)
        self.retention = RetentionBudget(share, manager.settings.clock or time.monotonic)
        self.places = ConcurrencyLimit(bounds.max_inflight, keys.names)
        self.mends = Mends(())
        self.kept, self.pins = KeptResponses(), ServerPins(keys.pins)
        self.is_ending = False
        self._later = set[asyncio.Task[None]]()
        self._created = int(time.time())

    @property
    def num_inflight(self) -> int:
        """The sequences of all tenants."""
        return self.places.num_taken

    def card(self, name: str) -> dict[str, Any]:
        """Return the entry in `/v1/models` of one of the model's names, or of an adapter."""
        parent = self.model if name in self.adapters else None
        own = {"id": name, "object": "model", "created": self._created, "parent": parent}
        own["root"] = self.model if parent is None else name
        return own | {"owned_by": "quire", "max_model_len": self.max_model_len}

    def check_model(self, name: str | None) -> None:
        """Raise `ApiError` unless a model that a request names is this one."""
        known = self.names + self.adapters
        if name is not None and name not in known:
            served = " and ".join(map(repr, known))
            said = f"the model {name!r} is not served here; {served} {'are' if known[1:] else 'is'}"
            raise ApiError(404, said, param="model", code="model_not_found")

    async def ids(self, asked: PromptRequest) -> list[Ids]:
        """Return the prompts of a request as token ids. Raises `ConfigError`."""
        prompts, special = asked.prompts(), asked.add_special_tokens
        return [await self.reader.ids(each, add_special_tokens=special) for each in prompts]

    def read_reasoning(self, parser: str) -> None:
        """Find reasoning by a parser's name, as `reasoning_format` does."""
        template = template_of(self.reader.tokenizer, with_tools=True)
        self.reasoning = reasoning_format(parser, template)
        self.drops_reasoning = self.reasoning is not None and drops_reasoning(self.reader.tokenizer)

    @property
    def num_later(self) -> int:
        """Works that no client waits for and that are not done."""
        return len(self._later)

    def do_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do work that no client waits for."""
        self._later.add(task := asyncio.create_task(work))
        task.add_done_callback(self._later.discard)

    def reasoning_after(self, prompt: Ids, continued: str) -> ReasoningFormat | None:
        """Return how the answer to a prompt, which goes on with a message, marks reasoning; None if it has none."""
        if self.reasoning is None:
            return None
        return self.reasoning.after(self.reader.tokenizer.decode(prompt[-TAIL:]), continued)

    def counted(self, ids: Ids) -> dict[str, Any]:
        """Return a prompt as vLLM's `/tokenize` tells it."""
        return {"count": len(ids), "max_model_len": self.max_model_len, "tokens": ids}

    async def one_prompt(self, asked: PromptRequest) -> Ids:
        """Return the prompt of a request that has one only. Raises `ConfigError`."""
        prompts = await self.ids(asked)
        if len(prompts) != 1:
            raise ConfigError(f"prompt is one text or list of token ids here, got {len(prompts)}")
        return prompts[0]

    @contextmanager
    def admitted(
        self, tenant: str | None, prompts: Sequence[Ids], asked: Generation
    ) -> Generator[Callable[[int, Any], None]]:
        """Hold places for a tenant's sequences, and follow them: the block tells each output by the index of its prompt.

        Raises what `ConcurrencyLimit.hold` does, and `ApiError` when the server ends.
        """
        said = "the server ends: it takes nothing new, and what ran too long is cut; ask again when there is another"
        ending = ApiError(503, said, code="shutting_down", headers={"Retry-After": "10"})
        if self.is_ending:
            raise ending
        lens, count = [len(each) for each in prompts], len(prompts) * asked.num_answers
        with self.places.hold(tenant, count), self.log.following(tenant, lens, asked.n) as told:
            try:
                yield told
            except RequestFailed as error:
                if self.is_ending:
                    raise ending from error
                raise

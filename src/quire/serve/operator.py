"""What the operator asks: the cache, its metrics, and the page that shows both."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from importlib.resources import files
from itertools import count
from typing import Any

import msgspec
from prometheus_client import generate_latest
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quire import ops
from quire.core import Scope
from quire.engines.loop import Engine
from quire.errors import ConfigError, QuireError
from quire.observe.overview import Overview
from quire.serve.protocol import CacheRequest, EvictRequest, PinRequest
from quire.serve.service import ServedModel
from quire.web.errors import ApiError
from quire.web.keys import scope_of

CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
FACTORS = (0.5, 1, 2, 4)
"""Memories that the page asks about, as factors of what there is."""

EVERY_S = 2.0
"""Seconds between two points of the page's curve."""


class Operator:
    """The operator's routes, and the pins that were made by them, which the engine's thread alone touches."""

    def __init__(self, service: ServedModel) -> None:
        self._service, self._call = service, service.running.call
        engine = service.running.engine
        self._overview = Overview(engine.manager, engine.tiers)
        self._pins: dict[int, ops.Pin] = {}
        self._numbers = count(1)

    @asynccontextmanager
    async def sampling(self, _: Any) -> AsyncGenerator[None]:
        """Take samples for the curve of the page while an application lives."""

        async def samples() -> None:
            while True:
                with suppress(QuireError):  # of a cache that was cut off there is none
                    await self._call(lambda _: self._overview.sample())
                await asyncio.sleep(EVERY_S)

        task = asyncio.create_task(samples())
        try:
            yield
        finally:
            task.cancel()

    async def page(self, asked: None, request: Request) -> Response:
        text = files("quire.serve").joinpath("page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": CSP})

    async def metrics(self, asked: None, request: Request) -> Response:
        text = await self._call(lambda _: generate_latest(self._service.registry))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def state(self, asked: None, request: Request) -> Any:
        # not on the engine's thread, which it would hold up
        curve = await asyncio.to_thread(self._overview.latest_what_if, FACTORS)
        state = await self._call(lambda _: self._overview.state())
        stats = asdict(await self._call(lambda engine: engine.stats()))
        own = {"model": self._service.model, "inflight": self._service.num_inflight}
        return state | own | {"engine": stats, "what_if": curve, "every_s": EVERY_S}

    async def what_if(self, asked: None, request: Request) -> Any:
        given = request.query_params.get("memory", "2")
        try:
            factors = [float(each) for each in given.split(",")]
        except ValueError:
            factors = [-1.0]
        if not all(0 <= factor <= 1e6 for factor in factors):
            raise ConfigError(
                f"memory is one or more factors, 0.5,2 for instance, got {given[:60]!r}"
            )
        return await asyncio.to_thread(self._overview.what_if, factors)

    async def explain(self, asked: CacheRequest, request: Request) -> Any:
        ids = await self._service.one_prompt(asked)

        def looked(engine: Engine) -> dict[str, Any]:
            scope = _scope(engine, asked)
            told = ops.explain(engine.manager, ids, scope)
            return {
                "num_tokens": told.num_tokens,
                "cached_tokens": told.hit.num_tokens,
                "segments": msgspec.to_builtins(told.segments),
                "in_tiers": engine.in_tiers(ids, scope),
                "in_other_scopes": [tokens for _, tokens in told.found_in],
            }

        return await self._call(looked)

    async def pin(self, asked: PinRequest, request: Request) -> Any:
        ids = await self._service.one_prompt(asked)

        def pinned(engine: Engine) -> dict[str, Any]:
            made = ops.pin(engine.manager, ids, _scope(engine, asked), ttl_s=asked.ttl_s)
            number = next(self._numbers)
            self._pins = self._held() | {number: made}
            return {"id": number, "num_tokens": made.num_tokens, "ttl_s": asked.ttl_s}

        return await self._call(pinned)

    async def pins(self, asked: None, request: Request) -> Any:
        held = await self._call(lambda _: self._held())
        return {"data": [{"id": at, "num_tokens": pin.num_tokens} for at, pin in held.items()]}

    async def unpin(self, asked: None, request: Request) -> Any:
        number = request.path_params["number"]

        def closed(_: Engine) -> dict[str, Any]:
            if number not in self._pins:
                raise ApiError(404, f"there is no pin {number}; it was closed, or its time is over")
            self._pins.pop(number).close()
            return {"id": number, "closed": True}

        return await self._call(closed)

    async def evict(self, asked: EvictRequest, request: Request) -> Any:
        by_prompt = asked.prompt is not None or asked.messages is not None
        ids = await self._service.one_prompt(asked) if by_prompt else None

        def evicted(engine: Engine) -> int:
            if asked.num_blocks is not None:
                return ops.reclaim(engine.manager, asked.num_blocks)
            return ops.invalidate(engine.manager, ids, _scope(engine, asked))

        return {"evicted_blocks": await self._call(evicted)}

    def _held(self) -> dict[int, ops.Pin]:
        """Return the pins that hold something still."""
        return {number: pin for number, pin in self._pins.items() if pin.is_held}


def _scope(engine: Engine, asked: CacheRequest) -> Scope:
    """Return whose cache is meant."""
    return engine.scope(scope_of(asked.tenant, asked.cache_salt))

"""What the operator asks: the cache, its metrics, and the page that shows both."""

from importlib.resources import files
from itertools import count
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from quire import ops
from quire.engines.loop import Engine
from quire.serve.protocol import EvictRequest, PinRequest, PromptRequest
from quire.serve.service import ServedModel
from quire.web.errors import ApiError
from quire.web.keys import scope_of

CSP = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Operator:
    """The operator's routes, and the pins that were made by them, each under a number of its own."""

    def __init__(self, service: ServedModel) -> None:
        self._service, self._call = service, service.running.call
        self._pins: dict[int, ops.Pin] = {}
        self._numbers = count(1)

    async def page(self, asked: None, request: Request) -> Response:
        """`/`."""
        text = files("quire.serve").joinpath("page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": CSP})

    async def metrics(self, asked: None, request: Request) -> Response:
        """`/metrics`."""
        text = await self._service.metrics.prometheus()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def state(self, asked: None, request: Request) -> Any:
        """`/v1/cache`."""
        own = {"model": self._service.model, "inflight": self._service.num_inflight}
        return await self._service.metrics.state() | own

    async def what_if(self, asked: None, request: Request) -> Any:
        """`/v1/cache/what-if?memory=2,4`: the hit rate with so many times the memory."""
        given = request.query_params.get("memory", "2")
        try:
            factors = tuple(map(float, given.split(",")))
        except ValueError:
            factors = ()
        if not factors or not all(0 <= factor <= 1e6 for factor in factors):
            said = f"memory is one or more factors, 2 or 0.5,2 for instance, got {given[:60]!r}"
            raise ApiError(400, said, param="memory")
        return await self._service.metrics.what_if(factors)

    async def explain(self, asked: PromptRequest, request: Request) -> Any:
        """`/v1/cache/explain`: what is cached of a prompt, and why not more."""
        ids, scope = await self._service.ids(asked), scope_of(asked.tenant, asked.cache_salt)

        def looked(engine: Engine) -> tuple[Any, dict[str, int]]:
            bound = engine.scope(scope)
            return ops.explain(engine.manager, ids, bound), engine.in_tiers(ids, bound)

        told, in_tiers = await self._call(looked)
        return {
            "num_tokens": told.num_tokens,
            "cached_tokens": told.hit.num_tokens,
            "segments": msgspec.to_builtins(told.segments),
            "in_tiers": in_tiers,
            "in_other_scopes": [tokens for _, tokens in told.found_in],
        }

    async def pin(self, asked: PinRequest, request: Request) -> Any:
        """`/v1/cache/pin`: a cached prefix stays for `ttl_s` seconds."""
        ids, scope = await self._service.ids(asked), scope_of(asked.tenant, asked.cache_salt)
        made = await self._call(
            lambda engine: ops.pin(engine.manager, ids, engine.scope(scope), ttl_s=asked.ttl_s)
        )
        await self._forget_those_let_go()
        number = next(self._numbers)
        self._pins[number] = made
        return {"id": number, "num_tokens": made.num_tokens, "ttl_s": asked.ttl_s}

    async def pins(self, asked: None, request: Request) -> Any:
        """`/v1/cache/pins`: those that hold something still."""
        await self._forget_those_let_go()
        pins = self._pins.items()
        return {"data": [{"id": number, "num_tokens": pin.num_tokens} for number, pin in pins]}

    async def _forget_those_let_go(self) -> None:
        """Forget the pins whose time is over."""
        known = list(self._pins.items())
        held = await self._call(lambda _: [pin.is_held for _, pin in known])
        for (number, _), is_held in zip(known, held, strict=True):
            if not is_held:
                self._pins.pop(number, None)

    async def unpin(self, asked: None, request: Request) -> Any:
        """`DELETE /v1/cache/pins/N`."""
        number = request.path_params["number"]
        pin = self._pins.pop(number, None)
        if pin is None:
            raise ApiError(404, f"there is no pin {number}; it was closed, or its time is over")
        await self._call(lambda _: pin.close())
        return {"id": number, "closed": True}

    async def evict(self, asked: EvictRequest, request: Request) -> Any:
        """`/v1/cache/evict`: the blocks of a prefix, of a scope, or so many by policy."""
        by_prompt = asked.prompt is not None or asked.messages is not None
        if by_prompt + asked.all + (asked.num_blocks is not None) != 1:
            raise ApiError(400, "give one of prompt, messages, all: true, and num_blocks")
        scope, blocks = scope_of(asked.tenant, asked.cache_salt), asked.num_blocks
        ids = await self._service.ids(asked) if by_prompt else None

        def drop(engine: Engine) -> int:
            if blocks is not None:
                return ops.reclaim(engine.manager, blocks)
            return ops.invalidate(engine.manager, ids, engine.scope(scope))

        return {"evicted_blocks": await self._call(drop)}

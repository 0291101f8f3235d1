"""The operator's routes: the cache, its metrics, and a page that shows both."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire import ops
from quire.engines.loop import Engine
from quire.engines.purging import PurgeRequest
from quire.observe.overview import Overview, read_numbers
from quire.observe.request_metrics import ServerMetrics
from quire.serve.protocol import CacheRequest, EvictRequest, PinRequest
from quire.serve.service import ServedModel
from quire.web.errors import ApiError
from quire.web.pages import page

DROPPED = "the chat template drops the reasoning of an earlier turn"
"""Why the server demotes blocks."""

REASONS = {"demoted": {"why": DROPPED}}

FACTORS = (0.5, 1, 2, 4)  # of the memory there is, which the page asks about


class Operator:
    """The operator's routes, and their `overview`."""

    def __init__(self, service: ServedModel) -> None:
        self._service, self._call = service, service.running.call
        engine = service.running.engine
        self.overview = Overview(engine.manager, engine.tiers, service.log)
        self._metrics = ServerMetrics(engine, service.log, service.model)
        self._pins = service.pins

    async def page(self, asked: None, request: Request) -> Response:
        return page("quire.serve", "page.html")

    async def metrics(self, asked: None, request: Request) -> Response:
        text = await asyncio.to_thread(self._metrics.text, await self._call(self._metrics.seen))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def state(self, asked: None, request: Request) -> Any:
        # not on the engine's thread, which it would hold up
        gains = await asyncio.to_thread(self.overview.latest_gains, FACTORS)
        since = read_numbers("since", request.query_params.get("since", "0"))[0]
        state = self.overview.state(await self._call(self.overview.seen), gains, since)
        state["mended"] = {**self._service.log.num_by_mend}
        return state | {"model": self._service.model, "inflight": self._service.num_inflight}

    async def tree(self, asked: None, request: Request) -> Any:
        return {"scopes": await self._call(lambda _: self.overview.tree())}

    async def what_if(self, asked: None, request: Request) -> Any:
        factors = read_numbers("memory", request.query_params.get("memory", "2"))
        return await asyncio.to_thread(self.overview.what_if, factors)

    async def explain(self, asked: CacheRequest, request: Request) -> Any:
        ids = await self._service.one_prompt(asked)

        def looked(engine: Engine) -> dict[str, Any]:
            scope = engine.scope(asked.scope(engine.adapters))
            told = ops.explain(engine.manager, ids, scope)
            return {
                "num_tokens": told.num_tokens,
                "cached_tokens": told.hit.num_tokens,
                "segments": [
                    msgspec.to_builtins(each) | REASONS.get(each.why, {}) for each in told.segments
                ],
                "in_tiers": engine.in_tiers(ids, scope),
                "in_other_scopes": [tokens for _, tokens in told.found_in],
            }

        told = await self._call(looked)
        at, reader = told["cached_tokens"], self._service.reader
        return told | {"first_missed": await reader.line(ids, at) if at < len(ids) - 1 else None}

    async def pin(self, asked: PinRequest, request: Request) -> Any:
        ids = await self._service.one_prompt(asked)

        def pinned(engine: Engine) -> dict[str, Any]:
            made = ops.pin(
                engine.manager, ids, engine.scope(asked.scope(engine.adapters)), ttl_s=asked.ttl_s
            )
            return {"id": self._pins.add(made), "ttl_s": asked.ttl_s} | made.counts

        return await self._call(pinned)

    async def pins(self, asked: None, request: Request) -> Any:
        held = await self._call(lambda _: self._pins.held)
        return {"data": [{"id": at} | pin.counts for at, pin in held.items()]}

    async def unpin(self, asked: None, request: Request) -> Any:
        number = request.path_params["number"]

        def closed(_: Engine) -> dict[str, Any]:
            if number not in (held := self._pins.held):
                raise ApiError(404, f"there is no pin {number}; it was closed, or its time is over")
            held[number].close()
            return {"id": number, "closed": True}

        return await self._call(closed)

    async def evict(self, asked: EvictRequest, request: Request) -> Any:
        whole = asked.all or asked.num_blocks is not None
        ids = None if whole else await self._service.one_prompt(asked)

        def evicted(engine: Engine) -> int:
            if asked.num_blocks is not None:
                return ops.reclaim(engine.manager, asked.num_blocks)
            return ops.invalidate(engine.manager, ids, engine.scope(asked.scope(engine.adapters)))

        return {"evicted_blocks": await self._call(evicted)}

    async def purge(self, asked: PurgeRequest, request: Request) -> Any:
        kept, tenant = self._service.kept, asked.tenant
        num_kept = kept.forget(tenant)
        counts = (await self._service.running.purge(tenant)).counts
        return counts | {"responses": num_kept + kept.forget(tenant)}

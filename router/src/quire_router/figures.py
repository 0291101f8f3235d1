"""The operator's view of replicas: page and metrics of each, and of all together."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.web.bodies import body_of
from quire.web.errors import ApiError, as_json
from quire.web.keys import ApiKeys
from quire.web.pages import page
from quire_router.counts import Families
from quire_router.sent import Sent, Told, to_replica

CACHE = "v1/cache"
SEEN = frozenset({"", "metrics"})
"""What is seen of one replica, beside what is below `CACHE`."""

Ask: TypeAlias = Callable[[Sent, str | None], Awaitable[list[Told]]]
"""Asks all replicas, or the one of that name, and returns what those say that answer."""


class ReplicaFigures:
    """The operator's routes before replicas.

    `/`               a page that lists them
    `/v1/replicas`    the same as JSON
    `/metrics`        of all, with the label `replica`
    `/replicas/NAME/` the page of one; below it, its `/metrics` and `/v1/cache`, as a server alone has them
    """

    def __init__(self, keys: ApiKeys, ask: Ask, *, max_body: int, slow_s: float) -> None:
        self._keys, self._ask, self._max_body, self._slow_s = keys, ask, max_body, slow_s

    def routes(self) -> list[Route]:
        """Return them."""
        one = ["GET", "POST", "DELETE"]
        return [
            Route("/", self._page),
            Route("/metrics", self._metrics),
            Route("/v1/replicas", self._list),
            Route("/replicas/{name}/{path:path}", self._one, methods=one),
        ]

    async def _page(self, request: Request) -> Response:
        self._keys.check_operator(request.headers)
        return page("quire_router", "replicas.html")

    async def _metrics(self, request: Request) -> Response:
        self._keys.check_operator(request.headers)
        said = await self._ask(to_replica(request, b"", "GET", "/metrics"), None)
        text = merged({each.replica: each.body.decode() for each in said})
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _list(self, request: Request) -> Response:
        self._keys.check_operator(request.headers)
        said = await self._ask(to_replica(request, b"", "GET", f"/{CACHE}"), None)
        states = {each.replica: msgspec.json.decode(each.body) for each in said}
        return as_json({"replicas": [_short(name, states[name]) for name in sorted(states)]})

    async def _one(self, request: Request) -> Response:
        self._keys.check_operator(request.headers)
        name, path = request.path_params["name"], request.path_params["path"]
        if path not in SEEN and path != CACHE and not path.startswith(f"{CACHE}/"):
            raise ApiError(404, f"one replica is not asked for /{path[:80]}; ask all at /")
        body = await body_of(request, self._max_body, self._slow_s)
        said = await self._ask(to_replica(request, body, request.method, f"/{path}"), name)
        if not said:
            raise ApiError(404, f"there is no replica {name[:80]!r}; /v1/replicas lists them")
        return Response(said[0].body, said[0].status, said[0].headers)


def _short(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """Return the list entry of one replica."""
    kept = {key: state[key] for key in ("model", "inflight", "groups", "stats", "tiers")}
    return {"replica": name, "page": f"replicas/{name}/"} | kept


def merged(texts: Mapping[str, str]) -> bytes:
    """Return the metrics of replicas, by their names, as one text: each sample with the label `replica`."""
    families: dict[str, Metric] = {}
    for name, text in texts.items():
        for family in text_string_to_metric_families(text):
            kind = (family.name, family.documentation, family.type)
            kept = families.setdefault(family.name, Metric(*kind))
            for sample in family.samples:
                kept.samples.append(sample._replace(labels=sample.labels | {"replica": name}))
    return generate_latest(Families(families.values()))

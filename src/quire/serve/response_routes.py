"""The routes of `/v1/responses`."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import ConfigError, ScopeError, TokensError
from quire.serve.generation import answered
from quire.serve.items import ResponseItem, items_from, places_of
from quire.serve.protocol import FIELDS, ChatRequest
from quire.serve.responses import INSTEAD, AskedResponse, ResponseReply, ResponseRequest
from quire.serve.service import ServedModel
from quire.serve.stored import KeptResponse
from quire.web.clients import HOME
from quire.web.errors import ApiError, refused

RENAMED = re.compile(r"^(messages|response_format|reasoning_effort)\b|\bmax_tokens\b")

MAX_LISTED = 100

ANSWER_PART = 8
"""The part of the context, 1/8, that a truncated prompt leaves to an answer without `max_output_tokens`."""


class ResponseRoutes:
    """The routes of `/v1/responses`."""

    def __init__(self, service: ServedModel) -> None:
        self._service, self._kept = service, service.kept

    async def create(self, asked: ResponseRequest, request: Request) -> Any:
        kept, tenant = self._kept, request.state.tenant
        with _in_its_words():
            items, chat = await self._read(asked, tenant)

            def keep(document: dict[str, Any]) -> None:
                if asked.store:
                    kept.keep(tenant, items, document)

            home = re.fullmatch("[0-9a-f]{8}", request.headers.get(HOME, ""))
            prefix = f"resp_{home[0]}" if home else "resp"
            shape = partial(ResponseReply, of=AskedResponse(asked, keep, prefix))
            return await answered(self._service, shape, chat, request)

    async def count(self, asked: ResponseRequest, request: Request) -> Any:
        count = (await self.tokenize(asked, request))["count"]
        return {"object": "response.input_tokens", "input_tokens": count}

    async def tokenize(self, asked: ResponseRequest, request: Request) -> dict[str, Any]:
        self._service.check_model(asked.model)
        with _in_its_words():
            _, chat = await self._read(asked, request.state.tenant)
            ids = await self._service.one_prompt(chat)
        return self._service.counted(ids)

    async def get(self, asked: None, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise ApiError(400, "stream is not offered here; leave it out", param="stream")
        return Response(self._found(request).document, media_type="application/json")

    async def delete(self, asked: None, request: Request) -> Any:
        name = request.path_params["name"]
        self._kept.delete(request.state.tenant, name)
        return {"id": name, "object": "response", "deleted": True}

    async def input_items(self, asked: None, request: Request) -> Any:
        """Return a page of a prompt's items: at most `limit`, in an `order`, `after` an item by its id."""
        items, query = self._found(request).inputs, request.query_params
        limit, order = query.get("limit", "20"), query.get("order", "desc")
        if not re.fullmatch("0*[1-9][0-9]?|0*100", limit):
            raise ApiError(
                400, f"limit is from 1 to {MAX_LISTED}, got {limit[:20]!r}", param="limit"
            )
        if order not in ("asc", "desc"):
            raise ApiError(400, f"order is asc or desc, got {order[:20]!r}", param="order")
        items = items if order == "asc" else items[::-1]
        if after := query.get("after"):
            places = [at for at, each in enumerate(items, 1) if each.id == after]
            if not places:
                raise ApiError(400, f"after: there is no item {after[:80]!r}", param="after")
            items = items[places[0] :]
        shown = [each.plain() for each in items[: int(limit)]]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
        return {"object": "list", "data": shown, "has_more": len(items) > len(shown), **ends}

    async def _read(
        self, asked: ResponseRequest, tenant: str | None
    ) -> tuple[list[ResponseItem], ChatRequest]:
        """Return the items of a request's whole conversation, and its prompt as a chat. Raises `ApiError`, `ConfigError`."""
        items = self._kept.history(tenant, asked.previous_response_id)
        items += self._kept.resolved(tenant, asked.items)
        if asked.truncation == "disabled":
            return items, asked.chat(items)
        limit = self._service.max_model_len
        room = limit - (asked.max_output_tokens or limit // ANSWER_PART)
        places = places_of(items, limit)
        first, last = 0, len(places) - 1
        while first < last:
            middle = (first + last) // 2 if first else 0  # most conversations fit
            chat = asked.chat(items_from(items, places[middle]))
            is_small = await self._service.reader.fits(chat, room)
            first, last = (first, middle) if is_small else (middle + 1, last)
        return items, asked.chat(items_from(items, places[first]))

    def _found(self, request: Request) -> KeptResponse:
        return self._kept.get(request.state.tenant, request.path_params["name"])


@contextmanager
def _in_its_words() -> Generator[None]:
    """Raise an error about the chat as one about the response."""
    try:
        yield
    except (ApiError, ConfigError, ScopeError, TokensError) as error:
        said = refused(error, FIELDS | {*ResponseRequest.__struct_encode_fields__})
        text = RENAMED.sub(lambda name: INSTEAD[name[0]], str(said))
        param = INSTEAD.get(said.param or "", said.param)
        raise ApiError(
            said.status, text, param=param, code=said.code, headers=said.headers
        ) from error

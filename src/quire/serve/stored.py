"""Kept responses, by tenant and in memory."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from quire.serve.items import ResponseItem
from quire.web.errors import ApiError


class KeptResponse(NamedTuple):
    """A kept response: its JSON document, and the items of its prompt and of its answer.

    `size`   bytes of all of it as JSON
    `until`  the time at which it is dropped
    """

    document: bytes
    inputs: list[ResponseItem]
    outputs: list[ResponseItem]
    size: int
    until: float


class KeptResponses:
    """Responses that were not sent with `store: false`, the oldest of a tenant first.

    For each tenant: its responses <= `max_count`, their sizes in all <= `max_bytes`; `keep_s` later one is dropped.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_count: int = 1000,
        max_bytes: int = 64 << 20,
        keep_s: float = 24 * 3600.0,
    ) -> None:
        self._clock, self._keep_s = clock, keep_s
        self._max_count, self._max_bytes = max_count, max_bytes
        self._kept: dict[str | None, dict[str, KeptResponse]] = defaultdict(dict)
        self._sizes: dict[str | None, int] = defaultdict(int)

    def keep(
        self, tenant: str | None, inputs: list[ResponseItem], document: dict[str, Any]
    ) -> None:
        """Keep a response of a tenant, and drop the oldest that leave no room for it."""
        raw = msgspec.json.encode(document)
        outputs = msgspec.convert(document["output"], list[ResponseItem])
        size = len(raw) + len(msgspec.json.encode(inputs))
        until = self._clock() + self._keep_s
        own = self._live(tenant)
        own[document["id"]] = KeptResponse(raw, inputs, outputs, size, until)
        self._sizes[tenant] += size
        while len(own) > self._max_count or self._sizes[tenant] > self._max_bytes:
            self._drop(tenant, next(iter(own)))

    def get(self, tenant: str | None, name: str) -> KeptResponse:
        """Return a response of a tenant. Raises `ApiError` 404."""
        if name not in (own := self._live(tenant)):
            raise ApiError(404, f"response {name[:80]!r} not found: {self._why}")
        return own[name]

    def delete(self, tenant: str | None, name: str) -> None:
        """Drop a response of a tenant. Raises `ApiError` 404."""
        self.get(tenant, name)
        self._drop(tenant, name)

    def forget(self, tenant: str | None) -> int:
        """Drop all responses of a tenant; return how many there were."""
        self._sizes.pop(tenant, None)
        return len(self._kept.pop(tenant, ()))

    def history(self, tenant: str | None, name: str | None) -> list[ResponseItem]:
        """Return the items of a conversation up to a response, none where no name is given. Raises `ApiError` 400."""
        if name is None:
            return []
        try:
            kept = self.get(tenant, name)
        except ApiError:
            raise ApiError(
                400,
                f"previous response {name[:80]!r} not found: {self._why}; send the conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None
        return [*kept.inputs, *kept.outputs]

    def resolved(self, tenant: str | None, items: Sequence[ResponseItem]) -> list[ResponseItem]:
        """Return items with what references stand for. Raises `ApiError` 404."""
        return [
            self._item(tenant, each.id) if each.type == "item_reference" else each for each in items
        ]

    def check(self) -> None:
        """Raise `AssertionError` unless the sizes add up and are within the bounds."""
        for tenant, own in self._kept.items():
            assert self._sizes[tenant] == sum(each.size for each in own.values())
            assert len(own) <= self._max_count
            assert self._sizes[tenant] <= self._max_bytes

    @property
    def _why(self) -> str:
        hours = self._keep_s / 3600
        return (
            f"the server keeps the last {self._max_count} of a key, of at most {self._max_bytes} bytes, for {hours:g} "
            "hours, in memory, and none with store: false"
        )

    def _item(self, tenant: str | None, name: str | None) -> ResponseItem:
        for kept in reversed(self._live(tenant).values()):
            for each in (*kept.outputs, *kept.inputs):
                if each.id == name:
                    return each
        raise ApiError(404, f"item {str(name)[:80]!r} not found: {self._why}", param="input")

    def _live(self, tenant: str | None) -> dict[str, KeptResponse]:
        """Return the responses of a tenant, having dropped those of all tenants whose time is over."""
        now = self._clock()
        for each, own in self._kept.items():
            while own and next(iter(own.values())).until <= now:
                self._drop(each, next(iter(own)))
        return self._kept[tenant]

    def _drop(self, tenant: str | None, name: str) -> None:
        self._sizes[tenant] -= self._kept[tenant].pop(name).size

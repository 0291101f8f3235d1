"""Streams to clients, with disconnects and stalled readers."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from math import inf
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from quire.web.protocol import PRESENCE, HttpProtocol

Got = TypeVar("Got")
Item = TypeVar("Item")

DONE = b"data: [DONE]\n\n"

RESPONSES = "/v1/responses"
HOME = "x-quire-home"
"""The header by which a router tells a server its home: eight hex digits, with which ids of kept responses begin."""

UVICORN: dict[str, Any] = {
    "loop": "asyncio",
    "http": HttpProtocol,
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
}
"""Options of uvicorn, with its loop by name: another one, which it takes where that is installed, ends otherwise."""


def sse(document: Any) -> bytes:
    """Return a document as one event of a stream."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events that a `first` may precede, closed for a client that stalls for `slow_s`."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], slow_s: float, *, first: bytes = b"") -> None:
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._slow_s, self._first = events, slow_s, first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, since = asyncio.get_running_loop(), inf

        async def sent(message: Message) -> None:
            nonlocal since
            since = loop.time()
            await send(message)
            since = inf

        async def pieces() -> None:
            """Send all events, in the task that waits for them: another task would cost a loop turn each."""
            head = {"status": self.status_code, "headers": self.raw_headers}
            await sent({"type": "http.response.start", **head})
            body: Message = {"type": "http.response.body", "more_body": True}
            if self._first:
                await sent({**body, "body": self._first})
            async for event in self._events:
                await sent({**body, "body": event})
            await sent({"type": "http.response.body"})

        def look() -> None:
            """End the stream if a send takes too long.

            One timer serves all events: one for each would cost as much as sending it.
            """
            nonlocal timer
            left_s = min(since + self._slow_s - loop.time(), self._slow_s)
            if left_s > 0:
                timer = loop.call_later(left_s, look)
            else:
                give_up()

        timer = loop.call_later(self._slow_s, look)
        try:
            # Whatever ends it, its requests end too.
            with suppress(ClientDisconnect):
                async with _present(scope, receive) as give_up, aclosing(self._events):
                    await pieces()
        finally:
            timer.cancel()


async def merged(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """Yield the items of generators as they come, each with its generator's place; closed early, all of them are."""
    if len(streams) == 1:  # most requests: without a task for each item
        async with aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    waiting = {asyncio.ensure_future(anext(each, None)): at for at, each in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                place, item = waiting.pop(task), task.result()
                if item is not None:
                    yield place, item
                    waiting[asyncio.ensure_future(anext(streams[place], None))] = place
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for each in streams:
            await each.aclose()


async def until_gone(request: Request, work: Awaitable[Got]) -> Got:
    """Await something for a client; cancel it, and raise `ClientDisconnect`, once that is gone."""
    async with _present(request.scope, request.receive):
        return await work


def has_gone(scope: Scope) -> bool:
    """Whether a request's client is known to have gone."""
    presence = scope.get("extensions", {}).get(PRESENCE)
    return presence is not None and presence.is_gone


@asynccontextmanager
async def _present(scope: Scope, receive: Receive) -> AsyncGenerator[Callable[[], None]]:
    """Do something for a client that is there; once it is gone, or given up by the function that this yields, raise `ClientDisconnect`.

    What is done stays in its task, which is cancelled then.
    """

    def give_up() -> None:
        if not limit.expired():
            limit.reschedule(0.0)

    limit = asyncio.timeout(None)
    try:
        async with limit:
            leave = _watched(scope, receive, give_up)
            try:
                yield give_up
            finally:
                leave()
    except TimeoutError:
        if limit.expired():
            raise ClientDisconnect from None
        raise


def _watched(scope: Scope, receive: Receive, told: Callable[[], None]) -> Callable[[], object]:
    """Have a function called when a client goes; return a function that ends this."""
    presence = scope.get("extensions", {}).get(PRESENCE)
    if presence is not None:
        presence.watch(told)
        return presence.leave

    async def watch() -> None:  # of a server that only sends messages
        while (await receive())["type"] != "http.disconnect":
            pass
        told()

    return asyncio.create_task(watch()).cancel

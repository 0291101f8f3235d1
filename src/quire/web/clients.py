"""Streams to clients, who may leave, or not take what they are sent."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing, suppress
from math import inf
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from quire.web.protocol import HttpProtocol

Got = TypeVar("Got")
Item = TypeVar("Item")

DONE = b"data: [DONE]\n\n"

UVICORN: dict[str, Any] = {
    "loop": "asyncio",
    "http": HttpProtocol,
    "log_level": "warning",
    "access_log": False,
    "server_header": False,
}
"""Options of uvicorn, with its loop by name: another one, which it takes where that is installed, ends otherwise."""


def sse(document: Any) -> bytes:
    """Return a document as one event of a stream."""
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events, which may have begun with a `first`; a client that takes nothing for so many seconds is given up."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], slow_s: float, *, first: bytes = b"") -> None:
        async def pieces() -> AsyncGenerator[bytes]:
            if first:
                yield first
            async for event in events:
                yield event

        super().__init__(pieces(), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events, self._slow_s = events, slow_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, since = asyncio.get_running_loop(), inf

        async def noted(message: Message) -> None:
            nonlocal since
            since = loop.time()
            await send(message)
            since = inf

        def look() -> None:
            """End the stream if what it waits for takes too long: one timer, one for each event would cost as much as sending it."""
            nonlocal timer
            left_s = min(since + self._slow_s - (now := loop.time()), self._slow_s)
            if left_s > 0:
                timer = loop.call_later(left_s, look)
            else:
                limit.reschedule(now)

        timer = loop.call_later(self._slow_s, look)
        try:
            with suppress(TimeoutError):
                # Whatever ends it, its requests end too.
                async with asyncio.timeout(None) as limit, aclosing(self._events):
                    await super().__call__(scope, receive, noted)
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

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, watching = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)

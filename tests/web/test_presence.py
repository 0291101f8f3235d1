"""Work for a client that is there: how its end is noticed, and what comes of the work then."""

import asyncio

import pytest
from starlette.requests import ClientDisconnect, Request

from quire.web.clients import until_gone
from quire.web.protocol import PRESENCE, ClientPresence


def scope_of(presence):
    scope = {"type": "http", "headers": []}
    return scope if presence is None else scope | {"extensions": {PRESENCE: presence}}


async def told(presence, messages):
    """Work for ever for a client whose server says these messages; return whether the work was cancelled."""
    is_cancelled = False

    async def receive():
        return await messages.get()

    async def work():
        nonlocal is_cancelled
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            is_cancelled = True
            raise

    with pytest.raises(ClientDisconnect):
        await until_gone(Request(scope_of(presence), receive), work())
    return is_cancelled


def test_work_ends_when_its_client_goes_by_a_presence_or_by_a_message():
    async def main():
        presence, messages = ClientPresence(), asyncio.Queue()
        asyncio.get_running_loop().call_later(0.01, presence.go)
        assert await told(presence, messages)
        messages.put_nowait({"type": "http.request"})
        messages.put_nowait({"type": "http.disconnect"})
        assert await told(None, messages)

    asyncio.run(main())


def test_work_ends_at_once_for_a_client_that_has_gone():
    async def main():
        presence = ClientPresence()
        presence.go()
        assert presence.is_gone
        assert await told(presence, asyncio.Queue())

    asyncio.run(main())


def test_a_client_that_goes_after_the_work_ends_nothing():
    async def main():
        presence = ClientPresence()

        async def work():
            return 7

        assert await until_gone(Request(scope_of(presence), None), work()) == 7
        presence.go()
        await asyncio.sleep(0.01)
        assert not asyncio.current_task().cancelling()

    asyncio.run(main())

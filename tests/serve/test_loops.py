"""The event loop of servers: it looks for more every few turns while it has work, and at once when it has none."""

import asyncio
import socket
from selectors import EVENT_READ

from quire.web.loops import TURNS, SeldomSelector, event_loop


def test_a_loop_with_work_looks_every_few_turns():
    near, far = socket.socketpair()
    with near, far, SeldomSelector() as selector:
        selector.register(near, EVENT_READ)
        far.send(b"x")
        seen = [bool(selector.select(0)) for _ in range(2 * (TURNS + 1))]
        assert seen == 2 * [*[False] * TURNS, True]


def test_a_loop_without_work_looks_at_once():
    near, far = socket.socketpair()
    with near, far, SeldomSelector() as selector:
        selector.register(near, EVENT_READ)
        far.send(b"x")
        assert selector.select(5)
        assert selector.select(None)


def test_what_comes_is_seen_though_a_loop_always_has_work():
    async def ask():
        loop = asyncio.get_running_loop()

        def work():
            loop.call_soon(work)

        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            loop.call_later(0.01, far.send, b"x")
            work()
            return await asyncio.wait_for(loop.sock_recv(near, 1), 20)

    with asyncio.Runner(loop_factory=event_loop) as runner:
        assert runner.run(ask()) == b"x"

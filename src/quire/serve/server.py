"""Running a server over an engine, and its end: running requests are finished first."""

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable
from math import inf
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from quire.engines.loop import AsyncEngine, Engine
from quire.serve.app import make_app
from quire.serve.service import ServedModel
from quire.web.clients import UVICORN
from quire.web.cors import with_cors

logger = logging.getLogger("uvicorn.error")  # which uvicorn prints

IDLE_S = 30  # for which a connection that asks nothing stays open
LAST_S = 5.0  # in which clients have to take what they were answered, when the server ends


def serve(
    engine: Engine,
    service_of: Callable[[AsyncEngine], ServedModel],
    listening: socket.socket,
    grace_s: int | None = None,
    around: Callable[[ASGIApp], ASGIApp] | None = None,
) -> None:
    """Serve an engine until SIGTERM or Ctrl-C, then finish running requests and save to tiers.

    Running requests have `grace_s` seconds to end (None: all they need). `around` puts more around the application.
    """
    running = AsyncEngine(engine)
    gc.freeze()  # what is here stays: to look through it again takes a quarter of a second each time
    try:
        ModelServer(service_of(running), grace_s, around).run(sockets=[listening])
    finally:
        running.close()


class ModelServer(uvicorn.Server):
    """A server of all routes, which ends in three parts.

    It finishes running requests and refuses others (503); cuts off the rest and tells their clients; closes the port.
    """

    def __init__(
        self,
        service: ServedModel,
        grace_s: float | None = None,
        around: Callable[[ASGIApp], ASGIApp] | None = None,
    ) -> None:
        made: ASGIApp = make_app(service)
        app = with_cors(made if around is None else around(made), service.keys.origins)
        config = uvicorn.Config(app, timeout_keep_alive=IDLE_S, **UVICORN)
        super().__init__(config)
        self._service, self._grace_s = service, inf if grace_s is None else grace_s
        self._is_hurried, self._until = False, inf

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End after running requests, at once for a second Ctrl-C; uvicorn's handler would kill the process unsaved."""
        self._is_hurried |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Return whether to close the port: not before running requests are finished."""
        ends, service, now = await super().on_tick(counter), self._service, time.monotonic()
        if ends and not service.is_ending:
            service.is_ending, self._until = True, now + self._grace_s
            if left := service.num_inflight:
                logger.warning("%d sequences are finished; Ctrl-C again cuts them", left)
        return ends and (self._is_hurried or now >= self._until or not service.num_inflight)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._service.num_inflight:
            self._service.running.stop()
        asyncio.get_running_loop().call_later(LAST_S, self._cut)
        await super().shutdown(sockets)

    def _cut(self) -> None:
        """Drop the connections of those who do not take their answer, or never asked to the end."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

"""From an engine to a server that runs, and its end: what runs is finished first."""

import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from quire.engines.loop import AsyncEngine, Engine
from quire.serve.app import make_app
from quire.serve.service import ServedModel

IDLE_S = 30
"""Seconds for which a connection that asks nothing stays open."""


def serve(
    engine: Engine,
    service_of: Callable[[AsyncEngine], ServedModel],
    listening: socket.socket,
    grace_s: int | None = None,
) -> None:
    """Serve an engine until SIGTERM or Ctrl-C; then requests that run have `grace_s` seconds to end (None: all they need), and tiers get what is cached."""
    running = AsyncEngine(engine)
    try:
        server_of(service_of(running), grace_s).run(sockets=[listening])
    finally:
        running.close()


def server_of(service: ServedModel, grace_s: int | None = None) -> uvicorn.Server:
    """Return a server of all routes, which takes requests once it runs."""
    config = uvicorn.Config(
        make_app(service),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=grace_s,
    )
    return _Server(config)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End when what runs is finished, at Ctrl-C again at once; uvicorn's own would kill the process then, unsaved."""
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit = True

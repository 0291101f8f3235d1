"""A server of OpenAI's API as a process of its own."""

from __future__ import annotations

import socket
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress

from quire.bench.process import BenchProcess
from quire.errors import ConfigError

START_S = 300
"""Seconds that a server has to start."""


HOST = "127.0.0.1"


class ServerProcess:
    """A server of OpenAI's API as a process of its own, from when it is healthy until it is closed."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None) -> None:
        with socket.create_server((HOST, 0)) as found:
            self.port = int(found.getsockname()[1])
        self._command = command[0]
        self._process = BenchProcess([*command, "--port", str(self.port)], environment)
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def said(self) -> str:
        """Return what it said, on both streams."""
        return self._process.said()

    def close(self) -> None:
        """End it."""
        self._process.close()

    def _wait(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.is_running:
            with suppress(OSError), urllib.request.urlopen(f"http://{HOST}:{self.port}/health"):
                return
            time.sleep(0.1)
        said = self._process.last_words()
        raise ConfigError(f"{self._command} did not become a server: {said}")

"""Processes that benchmarks start: what they say goes to a file, whose end is told when one fails."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

PATIENCE_S = 30


class BenchProcess:
    """A process from when it is made until it is closed.

    `input`, `output`  its standard streams where it `is_asked`; else it says everything to the file
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        is_asked: bool = False,
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as it runs
        pipe = subprocess.PIPE if is_asked else None
        self._process = subprocess.Popen(  # noqa: S603 - an interpreter that the caller names
            command,
            stdin=pipe,
            stdout=pipe or self._log,
            stderr=self._log,
            env=environment,
            text=True,
        )

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    @property
    def input(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    @property
    def output(self) -> IO[str]:
        assert self._process.stdout is not None
        return self._process.stdout

    def said(self) -> str:
        """Return what it said to the file."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def last_words(self) -> str:
        """Return the end of what it said to the file."""
        return self.said()[-600:].strip()

    def close(self) -> None:
        """End it: one that is asked by the end of its input."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        else:
            self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

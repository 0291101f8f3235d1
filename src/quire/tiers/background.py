"""Work that nobody waits for: a thread that is there only while there is something to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


class Background:
    """Runs `chore` again and again in a thread of its own until it returns False.

    It is one piece of work of a few milliseconds, so that `stop` does not take long.
    """

    def __init__(self, chore: Callable[[], bool], name: str) -> None:
        self._chore = chore
        self._name = name
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_awake = False
        self._is_stopped = False

    def wake(self) -> None:
        """Say that there may be something to do."""
        with self._changed:
            self._is_awake = True
            if self._is_running() or self._is_stopped:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with suppress(RuntimeError):  # the system has none left: the next time, maybe
                self._thread.start()

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; return whether that came to be in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_running(), timeout_s)

    def stop(self) -> None:
        """Begin nothing more, and return when the piece of work at hand is done."""
        with self._changed:
            self._is_stopped = True
            self._changed.wait_for(lambda: not self._is_running())

    def _is_running(self) -> bool:
        """Whether there is a thread: one that a signal kept from beginning is none."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._goes_on():
                while not self._is_stopped and self._chore():
                    pass
        except BaseException:
            self._end()
            raise

    def _goes_on(self) -> bool:
        with self._changed:
            if self._is_awake and not self._is_stopped:
                self._is_awake = False
                return True
            self._end()
            return False

    def _end(self) -> None:
        with self._changed:
            self._thread = None
            self._changed.notify_all()

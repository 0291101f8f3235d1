"""Background work: a thread that exists only while there is something to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from quire.tiers.waiting import Bell, start


class Background:
    """Runs `chore` again and again in a thread of its own until it returns False.

    It is one piece of work of a few milliseconds, so that `stop` does not take long.
    """

    def __init__(self, chore: Callable[[], bool], name: str) -> None:
        self._chore = chore
        self._name = name
        self._lock = threading.Lock()
        self._ended = Bell()
        self._thread: threading.Thread | None = None
        self._is_awake = False
        self._is_stopped = False

    def wake(self) -> None:
        """Say that there may be something to do."""
        with self._lock:
            self._is_awake = True
            if self._is_running() or self._is_stopped:
                return
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with suppress(RuntimeError):  # the system has none left: the next time, maybe
                start(self._thread)

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is left to do; return whether that came to be in time."""
        return self._ended.wait_for(lambda: not self._is_running(), timeout_s)

    def stop(self) -> None:
        """Begin nothing more, and return when the piece of work at hand is done."""
        self._is_stopped = True
        self._ended.wait_for(lambda: not self._is_running(), float("inf"))

    def _is_running(self) -> bool:
        """Whether there is a thread: one that a signal kept from beginning is none."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def _run(self) -> None:
        try:
            while self._goes_on():
                while not self._is_stopped and self._chore():
                    pass
        except BaseException:
            with self._lock:
                self._end()
            raise

    def _goes_on(self) -> bool:
        with self._lock:
            is_own = self._thread is threading.current_thread()  # and not one that began too late
            if is_own and self._is_awake and not self._is_stopped:
                self._is_awake = False
                return True
            self._end()
            return False

    def _end(self) -> None:
        """Say that this thread does nothing more. The lock is held."""
        if self._thread is threading.current_thread():
            self._thread = None
        self._ended.ring()

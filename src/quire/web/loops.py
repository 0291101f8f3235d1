"""The event loop of a server, beside threads that compute."""

import asyncio
from selectors import DefaultSelector, SelectorKey

TURNS = 4
"""So many turns in a row a loop that has work does not look for more."""


class SeldomSelector(DefaultSelector):
    """Looks for what has come every few turns only, while a loop has work: each look lets go of the interpreter, and a thread that computes takes it."""

    _num_turns = 0

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        if timeout is not None and timeout <= 0 and self._num_turns < TURNS:
            self._num_turns += 1
            return []
        self._num_turns = 0
        return super().select(timeout)


def event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop."""
    return asyncio.SelectorEventLoop(SeldomSelector())

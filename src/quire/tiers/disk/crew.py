"""A few threads that help a call with its reads or writes, so that a device has several at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress


class Crew:
    """Does numbered work in the calling thread and in up to `helpers` more.

    Threads begin with the first call that needs them.
    """

    def __init__(self, helpers: int, name: str) -> None:
        self.helpers = helpers
        self._pool = ThreadPoolExecutor(helpers, thread_name_prefix=name) if helpers else None

    def each(self, count: int, work: Callable[[int], None], helpers: int) -> None:
        """Call `work` with 0 to `count` - 1, begun in that order, with so many helping; return when all is done.

        Where a call is cut off, too, nothing is under way any more.
        """
        numbers = iter(range(count))  # handing out the next number is one step of the interpreter

        def share() -> None:
            for number in numbers:
                work(number)

        helpers = min(helpers, self.helpers, count - 1)
        helping: list[Future[None]] = []
        with suppress(
            RuntimeError
        ):  # where the system has no thread left, it is done by those there are
            helping += (self._pool.submit(share) for _ in range(helpers) if self._pool)
        try:
            share()
        finally:
            for _ in numbers:  # none of those that were not begun
                pass
            wait([each for each in helping if not each.cancel()])
        for each in helping:
            if not each.cancelled():
                each.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

"""A few threads that help a call with its reads or writes, so that a device has several at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


class Crew:
    """Does numbered work in the calling thread and, with `help_with`, in up to `helpers` more.

    Threads begin with the first call that needs them.
    """

    def __init__(self, helpers: int, name: str) -> None:
        self._helpers = helpers
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def help_with(self, count: int, work: Callable[[int], None]) -> None:
        """Call `work` with 0 to `count` - 1, begun in that order; return when all is done."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix=self._name)
        numbers = iter(range(count))  # handing out the next number is one step of the interpreter

        def share() -> None:
            for number in numbers:
                work(number)

        helping = [self._pool.submit(share) for _ in range(min(self._helpers, count - 1))]
        try:
            share()
        finally:
            for each in helping:
                each.cancel()
        for each in helping:
            if not each.cancelled():
                each.result()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

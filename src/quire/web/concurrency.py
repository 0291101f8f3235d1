"""A bounded number of places for work, of which each name has its own."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from quire.errors import ConfigError
from quire.web.errors import ApiError


class ConcurrencyLimit:
    """A limit on requests in flight, half of which is divided into guaranteed shares by name.

    0 <= the sum over all names of `taken` <= limit
    """

    def __init__(self, limit: int, names: frozenset[str]) -> None:
        self.taken = Counter[str | None]()
        self._limit, self._names = limit, names

    @property
    def num_taken(self) -> int:
        """The places that all have together."""
        return self.taken.total()

    @contextmanager
    def hold(self, name: str | None, count: int) -> Generator[None]:
        """Hold `count` places. Raises `ConfigError` beyond the largest share, `ApiError` 429 if they are taken."""
        others = self._names - {name}
        own = self._limit // (2 * (len(others) + 1))
        if count > (most := self._limit - own * len(others)):
            raise ConfigError(
                f"n: {count} sequences are asked for at once, the limit is {most}; ask for fewer"
            )
        kept = sum(max(own - self.taken[other], 0) for other in others)
        if self.num_taken + count > self._limit - kept:
            raise ApiError(
                429,
                f"{self.num_taken} sequences run or wait and {count} more are asked for, the limit is "
                f"{self._limit}, of which {kept} are kept for other keys; come back later",
                code="overloaded",
                headers={"Retry-After": "1"},
            )
        self.taken[name] += count
        try:
            yield
        finally:
            self.taken[name] -= count

"""Heaps whose items may go out of date."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=tuple[Any, ...])


class LazyHeap(Generic[Item]):
    """A heap whose outdated items are dropped at the front, and all before it doubles."""

    def __init__(self, holds: Callable[[Item], bool]) -> None:
        self.items: list[Item] = []
        self._holds = holds
        self._limit = 64

    def push(self, item: Item) -> None:
        """Add an item."""
        if len(self.items) >= self._limit:
            self.items = [each for each in self.items if self._holds(each)]
            heapq.heapify(self.items)
            self._limit = max(64, 2 * len(self.items))
        heapq.heappush(self.items, item)

    def first(self) -> Item | None:
        """Return the least item that is not out of date, None without any."""
        while self.items and not self._holds(self.items[0]):
            heapq.heappop(self.items)
        return self.items[0] if self.items else None

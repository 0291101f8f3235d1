"""Runs of consecutive numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def runs_of(numbers: Sequence[int]) -> Iterator[range]:
    """Split numbers into runs in which each is the one before plus one."""
    first = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield range(numbers[first], numbers[at - 1] + 1)
            first = at

"""What was evicted: remembered for a while without its blocks, so that a miss can be explained."""

from __future__ import annotations

from collections import deque
from typing import TypeVar

import msgspec

from quire.core.tokens import TOKEN_BYTES, Key

MAX_RUNS = 1 << 15
"""Runs that are remembered, about 300 bytes each."""

MAX_BLOCKS = 1 << 22
"""Blocks of all of them, a byte each."""

Run = TypeVar("Run", bytearray, Key)


class Lost(msgspec.Struct, gc=False, eq=False):
    """A run of blocks that was evicted.

    `marks`   a byte of each block's last token: what tells whether a prompt still goes on as the run did
    `used`    number of a request that used all of it
    `below`   what was evicted before from its end on, by the hash of the first block's bytes
    `is_end`  it is the end of a node of which the head is still there
    """

    marks: bytes | bytearray
    used: int
    below: dict[int, Lost] | None = None
    is_end: bool = False


class LostRuns:
    """Forgets the runs that were evicted first, when there are many."""

    def __init__(self) -> None:
        self._runs: deque[tuple[dict[int, Lost], int, Lost]] = deque()
        self.num_blocks = 0

    def remember(self, among: dict[int, Lost], first: int, lost: Lost) -> None:
        """Remember a run among others that went on at the same place."""
        among[first] = lost
        self._runs.append((among, first, lost))
        self.num_blocks += len(lost.marks)
        while len(self._runs) > MAX_RUNS or self.num_blocks > MAX_BLOCKS:
            among, first, lost = self._runs.popleft()
            self.num_blocks -= len(lost.marks)
            if among.get(first) is lost:
                del among[first]


def marks_of(key: Run, start: int, stop: int, block_bytes: int) -> Run:
    """Return a byte of the last token of each block between two places in a key."""
    return key[start + block_bytes - TOKEN_BYTES : stop : block_bytes]

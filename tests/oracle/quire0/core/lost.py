"""What was evicted: remembered for a while without its blocks, so that a miss can be explained."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from quire0.core.tokens import TOKEN_BYTES, Key

if TYPE_CHECKING:
    from quire0.core.node import Node

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


Forks: TypeAlias = "dict[int, dict[int, Lost]]"
"""Runs that were evicted, by the boundary where they went on and the hash of their first block's bytes."""


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


class LostOf:
    """Reads and writes what was evicted below the nodes of a tree: `Node.lost`, by the boundary where it went on.

    A boundary is counted in blocks from the root, so it stays right when a node is cut or joined.
    """

    def __init__(self, block_bytes: int) -> None:
        self._size = block_bytes
        self.runs = LostRuns()

    def take(self, node: Node, first: bytes) -> Lost | None:
        """Return the run that was evicted at the end of a node and began with a block; it is remembered no more."""
        if not node.lost or not (among := node.lost.get(node.end)):
            return None
        lost = among.pop(hash(first), None)
        if not among:
            del node.lost[node.end]
        return lost

    def tail(self, node: Node, num_blocks: int) -> Lost:
        """Return what will be remembered of the last blocks of a leaf, with what had been lost along them."""
        key, size, end = node.key, self._size, node.end
        lost_at, used, rest = node.lost, node.used, b""
        if not lost_at:
            return Lost(marks_of(key, len(key) - num_blocks * size, len(key), size), used)
        below = lost_at.pop(end, None)
        if below and len(below) == 1:
            (lost,) = below.values()
            if lost.is_end:
                rest, used, below = lost.marks, lost.used, lost.below
        stop = len(key)
        for at in reversed(between(lost_at, end - num_blocks, end)) if lost_at else ():
            if among := lost_at.pop(at):
                place = len(key) - (end - at) * size
                first = hash(bytes(key[place : place + size]))
                marks = marks_of(key, place, stop, size) + rest
                self.runs.remember(among, first, Lost(marks, used, below))
                below, stop, used, rest = among, place, node.used, b""
        return Lost(marks_of(key, len(key) - num_blocks * size, stop, size) + rest, used, below)

    def hang(self, lost: Lost, first: bytes, node: Node, *, is_end: bool) -> None:
        """Remember a run at the end of a node: one that was its own, or that of a node that hung below."""
        if node.lost is None:
            node.lost = {}
        among = node.lost.get(node.end)
        if among is None:
            among = node.lost[node.end] = {}
        if is_end:
            lost.is_end = True
            among[hash(first)] = lost
        else:
            self.runs.remember(among, hash(first), lost)

    def put_back(self, node: Node, start: int, lost: Lost) -> Lost | None:
        """Hang what had been lost below a run where it belongs, now that the run came back from block `start` on.

        Returns what is left of the run, if it came back in part.
        """
        key, size, base = node.key, self._size, node.start
        goes_on: Lost | None = lost
        while goes_on is not None:
            marks, below = goes_on.marks, goes_on.below
            end = start + len(marks)
            if not below and end <= node.end:
                return None
            back = marks_of(key, (start - base) * size, (min(end, node.end) - base) * size, size)
            if not marks.startswith(back):
                return None
            if end > node.end:
                return Lost(marks[len(back) :], goes_on.used, below, is_end=True)
            assert below
            place = (end - base) * size
            goes_on = below.pop(hash(bytes(key[place : place + size])), None)
            if below:
                if node.lost is None:
                    node.lost = {}
                node.lost[end] = below
            start = end
        return None


def between(lost: Forks, start: int, end: int) -> list[int]:
    """Return the boundaries above `start`, up to `end`, at which something was lost, rising."""
    if len(lost) == 1:
        return [at for at in lost if start < at <= end]
    if end - start < len(lost):
        return [at for at in range(start + 1, end + 1) if at in lost]
    return sorted(at for at in lost if start < at <= end)


def marks_of(key: Run, start: int, stop: int, block_bytes: int) -> Run:
    """Return a byte of the last token of each block between two places in a key."""
    return key[start + block_bytes - TOKEN_BYTES : stop : block_bytes]

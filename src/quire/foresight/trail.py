"""The trail: who used which blocks last, and which runs were evicted, so that a miss can be explained."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import msgspec

from quire.core.kernel import Kernel, Leaving, Watcher
from quire.core.node import Node, NodePart
from quire.core.sequence import Sequence
from quire.core.stats import Missed
from quire.core.tokens import TOKEN_BYTES, Key, common_bytes
from quire.errors import InvariantError

MAX_RUNS = 1 << 15
"""Evicted runs that are remembered, about 300 bytes each."""

MAX_BLOCKS = 1 << 22
"""Blocks of all of them, a byte each."""


class Lost(msgspec.Struct, gc=False, eq=False):
    """A run of blocks that was evicted.

    `marks`   a byte of each block's last token: enough to see whether a prompt goes on as the run did
    `user`    number of a request that used all of it
    `below`   runs that were evicted before from its end on, by the hash of their first block's bytes
    `is_end`  it is the end of a node of which the head is still there
    """

    marks: bytes | bytearray
    user: int
    below: dict[int, Lost] | None = None
    is_end: bool = False


Forks: TypeAlias = dict[int, dict[int, Lost]]
"""Evicted runs, by the boundary where they went on and the hash of their first block's bytes.

A boundary is counted in blocks from the root, so it stays right when a node is cut or joined.
"""


class TrailPart(NodePart, gc=False, eq=False):
    """The last users of a node's blocks, and what was evicted below it.

    `user`   number of the last request that used the last stretch of blocks, 0 for none here
    `above`  (boundary, last user) of the stretches before it, rising
    `lost`   evicted runs, by boundary
    """

    user: int = 0
    above: tuple[tuple[int, int], ...] = ()
    lost: Forks | None = None

    def user_at(self, end: int) -> int:
        """Return the last user of the block before a boundary of the node."""
        return next((user for at, user in self.above if at >= end), self.user)

    def split(self, upper: Node, lower: Node) -> TrailPart:
        at, above = upper.end, self.above
        head = TrailPart(self.user_at(at), tuple(each for each in above if each[0] < at))
        self.above = tuple(each for each in above if each[0] > at)
        if self.lost:
            head.lost = {each: self.lost.pop(each) for each in _between(self.lost, -1, at)}
        return head

    def cut(self, node: Node) -> None:
        end = node.end
        if self.above:
            self.user = self.user_at(end)
            self.above = tuple(each for each in self.above if each[0] < end)
        lost = self.lost
        if lost and (len(lost) > 1 or end not in lost):
            for at in [at for at in lost if at > end]:
                del lost[at]

    def join(self, upper: TrailPart, at: int) -> None:
        if upper.above or upper.user != self.user_at(at + 1):
            self.above = (*upper.above, (at, upper.user), *self.above)
        if upper.lost:
            upper.lost.update(self.lost or {})
            self.lost = upper.lost


class Trail(Watcher):
    """Remembers evicted runs and last users, beside the tree, and changes nothing in it.

    With it a miss is `evicted` where it would be `cold`; `LiveCurve` makes hit-rate curves of it.

    `last_user`    of the request opened last: who used before what it found, deepest part that was computed here
    `num_foreign`  blocks at the end of what it found that came from elsewhere and were not used since
    """

    part = TrailPart

    def __init__(self) -> None:
        self.last_user = self.num_foreign = 0

    def begin(self, kernel: Kernel) -> None:
        self._tree = kernel.tree
        self._size = kernel.tree.block_bytes
        self._runs: deque[tuple[dict[int, Lost], int, Lost]] = deque()
        self._num_blocks = 0
        self.last_user = self.num_foreign = 0
        kernel.lookup.ask_evicted = self._evicted

    def opened(self, seq: Sequence, key: Key, missed: Missed) -> None:
        place, number, node = self.place, seq.number, seq.node
        found, last_user, used_to = node.end, 0, 0
        parent = node.parent
        while parent is not None:
            part: TrailPart = node.parts[place]
            if not last_user:
                if part.user:
                    last_user, used_to = part.user, node.end
                elif part.above:
                    used = [each for each in part.above if each[1]]
                    used_to, last_user = used[-1] if used else (0, 0)
            part.user = number
            if part.above:
                part.above = ()
            node, parent = parent, parent.parent
        self.last_user, self.num_foreign = last_user, found - used_to

    def stored(self, seq: Sequence, node: Node, num_blocks: int) -> None:
        place, user, parent = self.place, seq.number, node.parent
        part: TrailPart = node.parts[place]
        assert parent is not None
        start, holder = node.end - num_blocks, part
        if parent.end == start:
            holder = parent.parts[place]
        elif part.user != user:
            part.above = (*part.above, (start, part.user))
        forks: Forks | None = holder.lost
        if forks and (among := forks.get(start)) is not None:
            at = (start - parent.end) * self._size
            lost = among.pop(hash(bytes(node.key[at : at + self._size])), None)
            if not among:
                del forks[start]
            if lost is not None:
                user = user or lost.user
                if lost.below or start + len(lost.marks) > node.end:
                    self._put_back(seq, node, start, lost)
        part.user = user

    def leaving(self, node: Node, blocks: range, group: int | None, why: Leaving) -> None:
        if group is not None or why in ("truncated", "cleared"):
            return
        parent = node.parent
        assert parent is not None
        place, size, key, start = self.place, self._size, node.key, blocks.start
        part: TrailPart = node.parts[place]
        at = (start - parent.end) * size
        user, rest, stop = part.user, b"", len(key)
        below: dict[int, Lost] | None = None
        forks = part.lost
        if forks:
            below = forks.pop(node.end, None)
            if below and len(below) == 1:
                (lost,) = below.values()
                if lost.is_end:
                    rest, user, below = lost.marks, lost.user, lost.below
        if forks or part.above:
            below, stop, user, rest = self._cut_up(node, start, Lost(rest, user, below))
        marks = key[at + size - TOKEN_BYTES : stop : size]
        if rest:
            marks += rest
        lost = Lost(marks, user, below)
        if at:  # as long as the head of the node is there
            lost.is_end = True
            _among(part, start)[hash(bytes(key[at : at + size]))] = lost
        else:
            self._remember(_among(parent.parts[place], start), hash(node.name), lost)

    def check(self) -> None:
        """Raise `InvariantError` where something is remembered as evicted that is there."""
        size = self._size
        for node in [*self._tree.roots.values(), *self._tree.nodes()]:
            part: TrailPart = node.parts[self.place]
            ends = [at for at, _ in part.above]
            if ends != sorted(set(ends)) or any(not node.start < at < node.end for at in ends):
                raise InvariantError(f"{node!r} has users up to boundaries {ends}")
            for at, among in (part.lost or {}).items():
                if not node.start < at <= node.end and node.parent is not None:
                    raise InvariantError(f"{node!r} remembers what was evicted at boundary {at}")
                place = (at - node.start) * size
                there = [bytes(node.key[place : place + size])] if at < node.end else node.children
                if any(hash(first) in among for first in there):
                    raise InvariantError(
                        f"{node!r} has a block after {at} that is remembered as evicted"
                    )

    def _evicted(self, holder: Node, end: int, key: Key) -> tuple[int, int]:
        """Follow what was evicted after `end` bytes of a key: where that ends, and its last user."""
        size = self._size
        forks: Forks | None = holder.parts[self.place].lost if holder.parts else None
        among = forks.get(end // size) if forks else None
        user, num_bytes = 0, len(key)
        while among and end + size < num_bytes:
            lost = among.get(hash(key[end : end + size].tobytes()))
            if lost is None:
                break
            marks = key[end:num_bytes].tobytes()[size - TOKEN_BYTES :: size]
            same = min(len(marks), len(lost.marks))
            if not lost.marks.startswith(marks[:same]):
                same = common_bytes(marks, lost.marks)
            end, user = end + same * size, lost.user
            among = lost.below if same == len(lost.marks) else None
        return end, user

    def _remember(self, among: dict[int, Lost], first: int, lost: Lost) -> None:
        """Remember a run among others that went on at the same place; of many, forget the oldest."""
        among[first] = lost
        self._runs.append((among, first, lost))
        self._num_blocks += len(lost.marks)
        while len(self._runs) > MAX_RUNS or self._num_blocks > MAX_BLOCKS:
            among, first, lost = self._runs.popleft()
            self._num_blocks -= len(lost.marks)
            if among.get(first) is lost:
                del among[first]

    def _cut_up(
        self, node: Node, start: int, end: Lost
    ) -> tuple[dict[int, Lost] | None, int, int, bytes | bytearray]:
        """Remember the pieces of a leaf from block `start` on, where runs were lost along it or its users differ.

        `end` goes on where the leaf ends. Returns what the first piece is made of: the runs below it, where its key
        ends, its last user, and marks that follow its own.
        """
        assert node.parent is not None
        part: TrailPart = node.parts[self.place]
        key, size, base = node.key, self._size, node.parent.end
        below, stop, user, rest = end.below, len(key), end.user, end.marks
        forks = part.lost if part.lost is not None else {}
        users = [at for at, _ in part.above if start < at]
        for at in sorted({*_between(forks, start, node.end), *users}, reverse=True):
            among = forks.pop(at, None) or {}
            if among or at in users:
                place = (at - base) * size
                first = hash(bytes(key[place : place + size]))
                self._remember(
                    among, first, Lost(_marks(key, place, stop, size) + rest, user, below)
                )
                below, stop, user, rest = among, place, part.user_at(at), b""
        return below, stop, user, rest

    def _put_back(self, seq: Sequence, node: Node, start: int, lost: Lost) -> None:
        """Hang what had been lost below a run where it belongs, now that the run came back from block `start` on."""
        key, size, base = node.key, self._size, node.start
        part: TrailPart = node.parts[self.place]
        goes_on: Lost | None = lost
        while goes_on is not None:
            marks, below = goes_on.marks, goes_on.below
            end = start + len(marks)
            if not below and end <= node.end:
                return
            back = _marks(key, (start - base) * size, (min(end, node.end) - base) * size, size)
            if not marks.startswith(back):
                return
            if end > node.end:
                left = Lost(marks[len(back) :], goes_on.user, below)
                at = (node.end * seq.rows.block_size - seq.script.start) * TOKEN_BYTES
                if 0 <= at <= len(seq.script.key) - size:
                    left.is_end = True
                    _among(part, node.end)[hash(seq.script.key[at : at + size])] = left
                return
            assert below
            place = (end - base) * size
            goes_on = below.pop(hash(bytes(key[place : place + size])), None)
            if below:
                if part.lost is None:
                    part.lost = {}
                part.lost[end] = below
            start = end


def _among(part: TrailPart, boundary: int) -> dict[int, Lost]:
    """Return the runs that went on at a boundary, to add one."""
    forks = part.lost
    if forks is None:
        forks = part.lost = {}
    among = forks.get(boundary)
    if among is None:
        among = forks[boundary] = {}
    return among


def _between(forks: Forks, start: int, end: int) -> list[int]:
    """Return the boundaries above `start`, up to `end`, at which something was lost, rising."""
    if end - start < len(forks):
        return [at for at in range(start + 1, end + 1) if at in forks]
    return sorted(at for at in forks if start < at <= end)


def _marks(key: bytearray, start: int, stop: int, block_bytes: int) -> bytearray:
    """Return a byte of the last token of each block between two places in a key."""
    return key[start + block_bytes - TOKEN_BYTES : stop : block_bytes]

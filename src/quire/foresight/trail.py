"""The trail: which runs of blocks were here and who used them last, so that a miss can be explained."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from quire.core.kernel import Kernel, Leaving, Watcher
from quire.core.node import Node, NodePart
from quire.core.sequence import Sequence
from quire.core.stats import Missed
from quire.core.tokens import Key, common_bytes
from quire.errors import InvariantError

MAX_RUNS = 1 << 15
"""Runs that are remembered, about 500 bytes each."""

MAX_BLOCKS = 1 << 22
"""Blocks of all of them, 8 bytes each."""

_TOKEN, _WIDTH = np.dtype(np.int32), 8
"""Of what a key consists, and the bytes of a block's mark."""


class Stretch(msgspec.Struct, eq=False):
    """A run of blocks that was stored, below the run that it goes on from.

    `marks`  a hash of each block's tokens: enough to see whether a prompt goes on as the run did
    `user`   number of the last request that used all of it
    `end`    blocks from the root to its end
    `above`  the run that it goes on from; None for the root of a scope, and once it is forgotten
    `name`   hash of its first block's bytes; None for what was cut off, which is known by its marks alone
    `below`  the runs that go on from its end, by their names
    """

    marks: bytearray
    user: int = 0
    end: int = 0
    above: Stretch | None = None
    name: int | None = None
    below: dict[int | None, Stretch] = {}


_NO_PROMPT = 0, Stretch(bytearray()), 0
"""What is known of the prompt of a row that nobody opened: nothing, of no request."""


class _Memo(NamedTuple):
    """The run in which a prompt leaves what is known, and where, as long as the runs are of this version."""

    version: int
    run: Stretch
    end: int


class TrailPart(NodePart, gc=False, eq=False):
    """The run in which a node ends, or one that continues it; None until a request reaches its end."""

    run: Stretch | None = None

    def split(self, upper: Node, lower: Node) -> TrailPart:
        return TrailPart(self.run)

    def cut(self, node: Node) -> None:
        """Keep the run: the rest of the node still leads to it."""

    def join(self, upper: TrailPart, at: int) -> None:
        """Keep the run: the joined node leads to it as well."""


class Trail(Watcher):
    """Remembers the last request that used each stored run, in a tree of its own that evictions leave alone.

    The tree branches where prompts did. What it has of a prompt and the cache has not was evicted: with a trail a
    miss is `evicted` where it would be `cold`; `LiveCurve` makes hit-rate curves of it. Runs are forgotten from
    their ends, the least recently used first.

    `last_user`    of the request opened last: who used before what it found, deepest part that was computed here
    `num_foreign`  blocks at the end of what it found that came from elsewhere and were not used since
    """

    part = TrailPart

    def __init__(self) -> None:
        self.last_user = self.num_foreign = 0

    def begin(self, kernel: Kernel) -> None:
        self._size = size = kernel.tree.block_bytes
        self._factors = _factors(size // _TOKEN.itemsize)
        self._tree = kernel.tree
        # Of each row's request, the end of its prompt that is known, and the run in which that is.
        self._prompts: dict[int, tuple[int, Stretch, int]] = {}
        # The runs in which requests ended, in their order. One that ended in the same run later stands here again.
        self._ends: deque[tuple[Stretch, int]] = deque()
        self._num_runs = self._num_blocks = 0
        self._version = (
            0  # of the runs: what was found of a prompt is out of date once it has changed
        )
        self.last_user = self.num_foreign = 0
        kernel.lookup.ask_evicted = self._evicted

    def opened(self, seq: Sequence, key: Key, missed: Missed) -> None:
        number, size, node = seq.number, self._size, seq.node
        found = node.end
        memo = missed.memo
        if isinstance(memo, _Memo) and memo.version == self._version:
            known, end = memo.run, memo.end
        else:
            known, end = self._find(node, found, key[: found * size])
        self._version += 1
        run = _holding(known, found)
        self.last_user, self.num_foreign = run.user, max(found - end, 0)
        if end < found:
            run = known = self._use(run, end, key[end * size : found * size], number, end)
            end = found
        elif end == found < run.end:
            run = known = self._cut(run, end)
        # A run that the cache has no more to its end is used as far as it is stored again.
        each = run if run.end <= found else run.above
        while each is not None and each.above is not None:
            each.user = number
            each = each.above
        node.parts[self.place].run = run
        self._prompts[seq.row] = number, known, end
        self._ends.append((run, number))
        if len(self._ends) > 4 * MAX_RUNS:
            self._ends = deque(each for each in self._ends if _counts(*each))

    def stored(self, seq: Sequence, node: Node, num_blocks: int) -> None:
        number, stop, parent = seq.number, node.end, node.parent
        if not number:
            return  # a restore: nobody has computed it now
        self._version += 1
        assert parent is not None
        start, part, key = stop - num_blocks, node.parts[self.place], node.key
        request, run, end = self._prompts.get(seq.row, _NO_PROMPT)
        if request != number or end <= start or _is_forgotten(run):
            run, end = (parent.parts[self.place] if parent.end == start else part).run, start
            if run is None or _is_forgotten(run):
                key = b"".join([each.key for each in node.path()])
                run, start, end = self._root(seq.root), 0, 0
            elif run.end == start and run.user == number and not run.below:
                self._lengthen(run, self._marks(key[-num_blocks * self._size :]))
                part.run = run
                return
            else:
                run = _holding(run, start)
        if end >= stop:
            run = _holding(run, stop)
            run = self._cut(run, stop) if stop < run.end else run
            self._mark(run, start, number)
        else:
            with memoryview(key)[(end - stop) * self._size :] as rest:
                run = self._use(run, end, rest, number, start)
        part.run = run

    def leaving(self, node: Node, blocks: range, group: int | None, why: Leaving) -> None:
        if why != "truncated" or group is not None:
            return
        self._version += 1
        start = blocks.start
        with memoryview(b"".join([each.key for each in node.path()])) as key:
            run, end = self._follow(self._root(node.holding(-1)), 0, key)
        if end > start:
            run = _holding(run, start + 1)
            assert run.above is not None
            if run.above.end < start:
                self._cut(run, start)  # which leaves its tail
            for each in [*_below(run)]:
                self._forget(each)

    def check(self) -> None:
        """Raise `InvariantError` where the runs do not hang together, or one would never be forgotten."""
        noted: dict[int, int] = {id(run): user for run, user in self._ends}
        num_runs = num_blocks = 0
        for node in self._tree.roots.values():
            root = self._root(node)
            runs = [*_below(root)]
            for run in reversed(runs[1:]):
                above = run.above
                if above is None or above.below.get(run.name) is not run:
                    raise InvariantError(f"{run!r} hangs below nothing")
                if len(run.marks) != (run.end - above.end) * _WIDTH or not run.marks:
                    raise InvariantError(f"{run!r} does not go on from {above!r}")
                if above is not root and above.user < run.user:
                    raise InvariantError(f"{run!r} was used after {above!r}, which it goes on from")
                latest = noted.get(id(run), -1)
                if latest < run.user:
                    raise InvariantError(f"{run!r} would never be forgotten")
                noted[id(above)] = max(noted.get(id(above), -1), latest)
                num_runs, num_blocks = num_runs + 1, num_blocks + run.end - above.end
        if (num_runs, num_blocks) != (self._num_runs, self._num_blocks):
            counted = f"{self._num_runs} runs of {self._num_blocks} blocks"
            raise InvariantError(f"{counted} are counted, {num_runs} of {num_blocks} are there")

    def _evicted(self, holder: Node, end: int, key: Key) -> tuple[int, int, _Memo | None]:
        """Return up to which byte of a key the blocks were here, and their last user; `end` bytes are still here."""
        if not holder.parts:
            return end, 0, None  # nobody was in this scope before
        run, was = self._find(holder, end // self._size, key)
        memo = _Memo(self._version, run, was)
        return (was * self._size, run.user, memo) if was * self._size > end else (end, 0, memo)

    def _find(self, node: Node, start: int, key: Key) -> tuple[Stretch, int]:
        """Return how far a key is known that is cached in `node` up to block `start`, and the run in which that is."""
        run: Stretch | None = node.parts[self.place].run
        if run is None or _is_forgotten(run):
            return self._follow(self._root(node.holding(-1)), 0, key)
        return self._follow(_holding(run, start), start, key[start * self._size :])

    def _root(self, node: Node) -> Stretch:
        """Return where the runs of a scope begin."""
        part: TrailPart = node.parts[self.place]
        if part.run is None:
            part.run = Stretch(bytearray())
        return part.run

    def _marks(self, key: Key | bytes | bytearray) -> bytes:
        """Return the marks of the whole blocks of a key: the sums of their tokens, each times its place's factor."""
        block = len(self._factors)
        tokens = np.frombuffer(key, _TOKEN, len(key) // self._size * block)
        if block == 1:
            return (tokens * self._factors).tobytes()
        return (tokens.reshape(-1, block) @ self._factors).tobytes()

    def _follow(self, run: Stretch, start: int, key: Key) -> tuple[Stretch, int]:
        """Return the run in which a key from block `start` on, which stands in `run`, leaves what is known, and where."""
        if start == run.end and not run.below:
            return run, start
        width, size = _WIDTH, self._size
        marks = self._marks(key)
        at, num_bytes = 0, len(marks)
        own: bytes | bytearray = run.marks[(start - run.end) * width :] if start < run.end else b""
        while marks.startswith(own, at):
            at += len(own)
            if at == num_bytes:
                return run, run.end
            place = at // width * size
            below = run.below
            more = below.get(hash(key[place : place + size].tobytes())) if below else None
            if more is None and (more := below.get(None)) is None:
                return run, run.end
            run, own = more, more.marks
        same = common_bytes(own, marks[at:]) // width
        end = start + at // width + same
        return _holding(run, end), end

    def _use(self, run: Stretch, end: int, rest: Key, number: int, start: int) -> Stretch:
        """Go on from block `end`, in `run`, with the rest of a path that a request has from block `start` on.

        Returns the run that ends where it does.
        """
        run, at = self._follow(run, end, rest)
        if at < run.end:
            run = self._cut(run, at)
        rest = rest[(at - end) * self._size :]
        self._mark(run, start, number)
        if rest:
            marks = self._marks(rest)
            if run.user != number or run.below or run.above is None:
                name = hash(rest[: self._size].tobytes())
                above, run = run, Stretch(bytearray(), number, at, run, name)
                above.below[name] = run
                self._num_runs += 1
                self._ends.append((run, number))
            self._lengthen(run, marks)
        return run

    def _mark(self, run: Stretch, start: int, number: int) -> None:
        """Note that a request has used a path from block `start` on, to the end of a run."""
        self._ends.append((run, number))
        each: Stretch | None = run
        while each is not None and each.end > start:
            each.user = max(each.user, number)
            each = each.above

    def _lengthen(self, run: Stretch, marks: bytes) -> None:
        num_blocks = len(marks) // _WIDTH
        run.marks += marks
        run.end += num_blocks
        self._num_blocks += num_blocks
        if self._num_runs > MAX_RUNS or self._num_blocks > MAX_BLOCKS:
            self._forget_oldest()

    def _cut(self, run: Stretch, end: int) -> Stretch:
        """Cut a run at a boundary inside it; return its head."""
        at = (end - run.end) * _WIDTH
        head = Stretch(run.marks[:at], run.user, end, run.above, run.name, {None: run})
        assert run.above is not None
        run.above.below[run.name] = head
        del run.marks[:at]
        run.above, run.name = head, None
        self._num_runs += 1
        return head

    def _forget_oldest(self) -> None:
        while self._ends and (self._num_runs > MAX_RUNS or self._num_blocks > MAX_BLOCKS):
            run, user = self._ends.popleft()
            while _counts(run, user) and not run.below:
                run = self._forget(run)

    def _forget(self, run: Stretch) -> Stretch:
        """Forget a run; return the one above it."""
        above = run.above
        assert above is not None
        del above.below[run.name]
        self._num_runs -= 1
        self._num_blocks -= run.end - above.end
        run.above = None
        return above


def _factors(block_size: int) -> npt.NDArray[np.int64]:
    """Return odd factors for the places of a block's tokens: blocks that differ hardly ever have one sum, mod 2**64."""
    return np.random.default_rng(block_size).integers(0, 1 << 63, block_size, np.int64) | 1


def _counts(run: Stretch, user: int) -> bool:
    """Whether a run may be forgotten by this entry of its last user."""
    return run.above is not None and run.user <= user


def _is_forgotten(run: Stretch) -> bool:
    return run.above is None and run.end > 0


def _holding(run: Stretch, end: int) -> Stretch:
    """Return the run on the way to this one that has the block before a boundary; the root for 0."""
    while run.above is not None and run.above.end >= end:
        run = run.above
    return run


def _below(run: Stretch) -> Iterator[Stretch]:
    """Iterate over a run and all below it, each before those that go on from it."""
    runs = [run]
    for each in runs:
        runs.extend(each.below.values())
    return iter(runs)

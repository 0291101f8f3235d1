"""Pins: prefixes that are kept whatever the pressure, within a budget."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from quire.core.node import Match, Node
from quire.core.order import Clock
from quire.core.sparse import SparseGroup
from quire.core.tokens import IntArray, array_of
from quire.core.tree import PrefixTree
from quire.errors import PinBudgetExceeded, PinError


class Pin:
    """A cached prefix of `num_tokens` tokens that is not evicted until the pin is closed.

    Closed once, by `close` or at the end of a `with` block; twice raises `PinError`. A pin
    with a time to live counts as closed once that has run out, and may be closed then too.
    """

    __slots__ = ("_board", "deadline", "node", "num_tokens", "open")

    def __init__(self, board: PinBoard, node: Node, num_tokens: int, deadline: float) -> None:
        self._board = board
        self.node = node
        self.num_tokens = num_tokens
        self.deadline = deadline
        self.open = True

    @property
    def tokens(self) -> IntArray:
        """The pinned tokens, int32, as a copy; empty once let go. Media are negative numbers."""
        held = self._board.holds(self)
        return array_of(b"".join(node.key for node in self.node.path()) if held else b"")

    def close(self) -> None:
        """Let go of the prefix: it is ordinary cached blocks again."""
        if not self.open:
            raise PinError(f"{self!r} was closed already; a pin is closed once")
        self._board.close(self)
        self.open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Pin {self.num_tokens} tokens, {'open' if self.open else 'closed'}>"


class PinBoard:
    """All pins of a manager.

    num_blocks == blocks of the nodes with at least one pin <= budget

    The budget is a share of the smallest full group. In a sparse group, the windows or states
    at the ends of all pins must not take more than that share of it.
    """

    def __init__(
        self,
        tree: PrefixTree,
        share: float,
        clock: Clock | None,
        cut_off: Callable[[str, BaseException], None],
    ) -> None:
        self._tree = tree
        self._cut_off = cut_off
        self._clock = clock
        self._deadlines: list[tuple[float, int, Pin]] = []
        self._count = 0
        self.share = share
        self.budget = 0
        self.measure()
        self.held: dict[int, Pin] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks of the nodes that a pin holds, of a full group."""
        return sum(node.num_blocks for node in self.pinned())

    def pinned(self) -> dict[Node, int]:
        """Return the nodes that pins hold, and how many pins each."""
        return Counter(node for pin in self.held.values() for node in pin.node.path())

    def measure(self) -> None:
        """Take the budget from the sizes that the pools have now."""
        smallest = min((pool.num_blocks for _, pool in self._tree.full), default=0)
        self.budget = int(self.share * smallest)

    def check_sizes(self, num_blocks: list[int]) -> None:
        """Raise `PinBudgetExceeded` if pools of these sizes could not hold the pins there are."""
        self.release_expired()
        for group, pool in self._tree.full:
            budget = int(self.share * num_blocks[group])
            if self.num_blocks > budget:
                what = f"{self.num_blocks} blocks are pinned, {num_blocks[group]} allow {budget}"
                raise pool.shortage(what, self.num_blocks, "close pins", PinBudgetExceeded)
        for group in self._tree.sparse:
            self._refuse_if_wide(group, 0, num_blocks[group.index])

    def add(self, found: Match, num_tokens: int, deadline: float) -> Pin:
        """Pin a matched prefix; raise `PinBudgetExceeded` and change nothing."""
        self.release_expired()
        wanted = self.num_blocks + self._not_pinned_yet(found)
        end = found.num_bytes // self._tree.block_bytes
        for group in self._tree.sparse:
            self._refuse_if_wide(group, end, group.pool.num_blocks)
        if self._tree.full and wanted > self.budget:
            what = (
                f"pinning {num_tokens} tokens would make {wanted} pinned blocks, the budget is "
                f"{self.budget} and {self.num_blocks} are pinned"
            )
            mend = "close pins or raise pin_budget"
            raise self._tree.full[0][1].shortage(what, wanted, mend, PinBudgetExceeded)
        node = self._tree.node_at(found)
        self._tree.lock_path(node)
        self._tree.stand(node, self._tree.sparse)
        pin = Pin(self, node, num_tokens, deadline)
        self.held[id(pin)] = pin
        if deadline:
            self._count += 1
            if len(self._deadlines) > 2 * len(self.held) + 64:
                self._deadlines = [each for each in self._deadlines if each[2].open]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (deadline, self._count, pin))
        return pin

    def holds(self, pin: Pin) -> bool:
        """Whether this pin holds its path still."""
        return id(pin) in self.held

    def close(self, pin: Pin) -> None:
        """Let go of a pin's path, as a call of the manager."""
        try:
            self.release(pin)
        except BaseException as error:
            self._cut_off("the end of a pin", error)
            raise

    def release(self, pin: Pin) -> None:
        """Let go of a pin's path, unless its time ran out before."""
        if self.held.pop(id(pin), None) is None:
            return
        self._tree.leave(pin.node, self._tree.sparse)
        self._tree.unlock_path(pin.node)

    def expired(self) -> list[Pin]:
        """Return the pins whose time to live has run out and that hold their paths still."""
        if not self._deadlines or self._clock is None:
            return []
        now = self._clock()
        return [pin for pin in self.held.values() if pin.deadline and pin.deadline <= now]

    def release_expired(self) -> None:
        """Let go of every pin whose time to live has run out."""
        while self._deadlines and self._clock is not None:
            if self._deadlines[0][0] > self._clock():
                break
            self.release(heapq.heappop(self._deadlines)[2])

    def _refuse_if_wide(self, group: SparseGroup, end: int, num_blocks: int) -> None:
        wanted = sum(group.reach(pin.node.end) for pin in self.held.values()) + group.reach(end)
        budget = int(self.share * num_blocks)
        if wanted > budget:
            what = (
                f"pinning {end} blocks would make pins hold {wanted} blocks of group {group.index}"
                f", the budget is {budget}"
            )
            mend = "close pins or raise pin_budget"
            raise group.pool.shortage(what, wanted, mend, PinBudgetExceeded)

    def _not_pinned_yet(self, found: Match) -> int:
        edge, pinned = found.edge, self.pinned()
        new = edge is not None and edge not in pinned
        count = found.into // self._tree.block_bytes if new else 0
        return count + sum(node.num_blocks for node in found.node.path() if node not in pinned)

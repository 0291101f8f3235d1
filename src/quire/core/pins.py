"""Pins: prefixes that are kept whatever the pressure, within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from operator import attrgetter
from typing import Self

from quire.core.node import Match, Node
from quire.core.sparse import SparseGroup
from quire.core.tokens import TOKEN_BYTES, IntArray, array_of
from quire.core.tree import PrefixTree
from quire.errors import PinBudgetExceeded, PinError
from quire.interrupts import mutating

MEND = "close pins or raise pin_budget"


class Pin:
    """A cached prefix of `num_tokens` tokens that is not evicted until the pin is closed.

    Closed once, by `close` or at the end of a `with` block; twice raises `PinError`. A pin
    with a time to live counts as closed once that has run out, and may be closed then too.
    """

    __slots__ = ("_pins", "deadline", "node", "num_tokens", "open")

    def __init__(self, pins: Pins, node: Node, num_tokens: int, deadline: float) -> None:
        self._pins = pins
        self.node = node
        self.num_tokens = num_tokens
        self.deadline = deadline
        self.open = True

    @property
    def tokens(self) -> IntArray:
        """The pinned tokens, int32, as a copy; empty once let go. Media are negative numbers."""
        held = id(self) in self._pins.held
        return array_of(b"".join(node.key for node in self.node.path()) if held else b"")

    def close(self) -> None:
        """Let go of the prefix: it is ordinary cached blocks again."""
        if not self.open:
            raise PinError(f"{self!r} was closed already; a pin is closed once")
        self._pins.close(self)
        self.open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Pin {self.num_tokens} tokens, {'open' if self.open else 'closed'}>"


class Pins:
    """All pins of a manager, `held` by identity until they are let go.

    num_blocks == blocks of the nodes with at least one pin <= budget

    The budget is a share of the smallest full group. In a sparse group, the windows or states
    at the ends of all pins must not take more than that share of it.
    """

    def __init__(
        self, tree: PrefixTree, share: float, cut_off: Callable[[str, BaseException], None]
    ) -> None:
        self._tree = tree
        self.cut_off = cut_off
        self.share = share
        self.held: dict[int, Pin] = {}

    @property
    def budget(self) -> int:
        """Blocks that pins may hold of a full group."""
        return int(self.share * min((pool.num_blocks for _, pool in self._tree.full), default=0))

    @property
    def num_blocks(self) -> int:
        """Blocks of the nodes that a pin holds, of a full group."""
        return sum(node.num_blocks for node in self.pinned())

    def pinned(self) -> dict[Node, int]:
        """Return the nodes that pins hold, and how many pins each."""
        return Counter(node for pin in self.held.values() for node in pin.node.path())

    def add(self, found: Match, deadline: float) -> Pin:
        """Pin a matched prefix, up to a time in seconds if not 0; raise `PinBudgetExceeded` and change nothing."""
        tree = self._tree
        num_tokens = found.num_blocks * tree.block_bytes // TOKEN_BYTES
        self.release_expired()
        pinned = self.pinned()
        wanted = self.num_blocks + sum(n for node, n in found.nodes() if node not in pinned)
        for group in tree.sparse:
            self.check_reach(group, found.num_blocks, group.pool.num_blocks)
        if tree.full and wanted > self.budget:
            what = (
                f"pinning {num_tokens} tokens would make {wanted} pinned blocks, the budget is "
                f"{self.budget} and {self.num_blocks} are pinned"
            )
            raise tree.full[0][1].shortage(what, wanted, MEND, PinBudgetExceeded)
        node = tree.node_at(found)
        tree.hold(node, tree.sparse)
        pin = Pin(self, node, num_tokens, deadline)
        self.held[id(pin)] = pin
        return pin

    @mutating
    def close(self, pin: Pin) -> None:
        """Let go of a pin's path, as a call of the manager, unless its time ran out before."""
        if id(pin) in self.held:
            self._release(pin)

    def expired(self) -> list[Pin]:
        """Return the pins whose time to live has run out and that hold their paths still."""
        timed = sorted(
            (pin for pin in self.held.values() if pin.deadline), key=attrgetter("deadline")
        )
        now = self._tree.order.now() if timed else 0.0
        return [pin for pin in timed if pin.deadline <= now]

    def release_expired(self) -> None:
        """Let go of every pin whose time to live has run out."""
        for pin in self.expired() if self.held else ():
            self._release(pin)

    def check_reach(self, group: SparseGroup, end: int, num_blocks: int) -> None:
        """Raise `PinBudgetExceeded` if one more pin, of `end` blocks, needs too much of a sparse group."""
        wanted = sum(group.reach(pin.node.end) for pin in self.held.values()) + group.reach(end)
        budget = int(self.share * num_blocks)
        if wanted > budget:
            what = (
                f"pinning {end} blocks would make pins hold {wanted} blocks of group {group.index}"
                f", the budget is {budget}"
            )
            raise group.pool.shortage(what, wanted, MEND, PinBudgetExceeded)

    def _release(self, pin: Pin) -> None:
        del self.held[id(pin)]
        self._tree.let_go(pin.node, self._tree.sparse)

"""Holds: paths of the tree that are kept apart from any sequence, until they are let go or due."""

from __future__ import annotations

from operator import attrgetter

from quire.core.node import FOREVER, Node
from quire.core.tree import PrefixTree


class Hold:
    """A reference to a path of the tree that keeps it from eviction until it is released.

    Pins, restores and engines that copy blocks have holds.

    `node`  the end of the path
    `due`   time in seconds from which on the next `reserve` releases the hold
    """

    def __init__(self, node: Node, due: float = FOREVER) -> None:
        self.node = node
        self.due = due


class Holds:
    """All holds of a manager, `all` by identity until they are let go.

    Each references the nodes of its path, and stands at its end in every sparse group. None is due before `first_due`,
    in seconds.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.all: dict[int, Hold] = {}
        self.first_due = FOREVER

    def add(self, hold: Hold) -> None:
        """Reference the path of a hold."""
        self._tree.hold(hold.node, self._tree.sparse)
        self.all[id(hold)] = hold
        self.first_due = min(self.first_due, hold.due)

    def let_go(self, hold: Hold) -> None:
        """Release a hold's references; a second call does nothing."""
        if self.all.pop(id(hold), None) is not None:
            self._tree.let_go(hold.node, self._tree.sparse)

    def expired(self) -> list[Hold]:
        """Return the holds whose time has run out, the first one due first."""
        timed = [hold for hold in self.all.values() if hold.due < FOREVER]
        now = self._tree.order.now() if timed else 0.0
        return sorted((hold for hold in timed if hold.due <= now), key=attrgetter("due"))

    def let_go_expired(self) -> None:
        """Let go of every hold whose time has run out."""
        for hold in self.expired() if self.all else ():
            self.let_go(hold)
        self.first_due = min(hold.due for hold in self.all.values()) if self.all else FOREVER

"""Priority classes and time-limited retention, above any policy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

from quire.core.policies import Policy, PolicyFactory

if TYPE_CHECKING:
    from quire.core.radix import Node

Clock = Callable[[], float]


class Evictor:
    """Chooses victims: the lowest class that has one, and in it whatever its policy says.

    A class is (retained, priority), lowest first, each with a policy object of its own. A
    node's priority and retention only rise while it lives, and they rise for its whole path
    at once, so a parent is never in a lower class than its child. When retention runs out
    a node falls back to the class of its priority, to the place of its last use.

    Invariant: a node is held by exactly one policy while it is cached, by none otherwise.
    """

    def __init__(self, factory: PolicyFactory, clock: Clock | None) -> None:
        self._factory = factory
        self._clock = clock
        self._tick = count().__next__
        self._latest = 0.0
        self._classes: dict[tuple[bool, int], Policy] = {}
        self._order: list[Policy] = []
        self._max_deadlines = 64
        self._deadlines: list[tuple[float, int, Node]] = []
        self._plain = self._class(retained=False, priority=0)

    def touched(self, node: Node) -> None:
        """A request found this node and references it."""
        (node.policy or self._plain).touched(node)

    def extendable(self, node: Node, priority: int, keep_for: float) -> bool:
        """Whether a request of this priority and retention may lengthen a node it found cached."""
        alike = node.priority == priority and (keep_for > 0 or not node.keep_until)
        return alike and (node.grown or node.policy is None or node.policy.extendable(node))

    def released(self, node: Node) -> None:
        """The node is cached now: it joins its class."""
        policy = self._plain
        if node.priority or node.keep_until:
            retained = node.keep_until > 0 and node.keep_until > self.now()
            policy = self._class(retained=retained, priority=node.priority)
            if retained:
                self._remind(node)
        if node.grown or node.policy is not policy:
            policy.added(node)
            node.grown = False
        node.policy = policy
        policy.released(node)

    def referenced(self, node: Node) -> None:
        """The cached node got its first reference, or is about to leave the tree."""
        assert node.policy is not None
        node.policy.referenced(node)

    def exposed(self, node: Node) -> None:
        """The last child of this cached node went away."""
        assert node.policy is not None
        node.policy.exposed(node)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` took over the head of `lower`, which is cached or referenced."""
        upper.policy = lower.policy
        upper.uses = lower.uses
        upper.rank = lower.rank
        upper.priority = lower.priority
        upper.keep_until = lower.keep_until
        if not lower.locks:
            assert lower.policy is not None
            lower.policy.split(upper, lower)
            if upper.keep_until:
                self._remind(upper)

    def victim(self) -> Node | None:
        """Return the node to take blocks from next, or None when nothing is cached."""
        if self._deadlines:
            self._expire()
        for policy in self._order:
            entry = policy.victim()
            if entry is not None:
                return entry  # pyright: ignore[reportReturnType] - all entries are nodes here
        return None

    def order(self) -> Iterator[Node]:
        """Iterate over the cached nodes that policies hold, class by class, coldest first."""
        if self._deadlines:
            self._expire()
        for policy in self._order:
            yield from policy.order()  # pyright: ignore[reportReturnType]

    def now(self) -> float:
        """Return the injected clock's time in seconds, never falling; 0 without a clock."""
        if self._clock is not None:
            self._latest = max(self._latest, self._clock())
        return self._latest

    def _class(self, *, retained: bool, priority: int) -> Policy:
        key = (retained, priority)
        policy = self._classes.get(key)
        if policy is None:
            policy = self._classes[key] = self._factory(self._tick)
            self._order = [self._classes[each] for each in sorted(self._classes)]
        return policy

    def _remind(self, node: Node) -> None:
        """Look at a node again when its retention, as it is now, runs out."""
        if not node.has_deadline:
            node.has_deadline = True
            if len(self._deadlines) >= self._max_deadlines:
                self._deadlines = [each for each in self._deadlines if each[2].parent is not None]
                heapq.heapify(self._deadlines)
                self._max_deadlines = max(64, 2 * len(self._deadlines))
            heapq.heappush(self._deadlines, (node.keep_until, self._tick(), node))

    def _expire(self) -> None:
        now = self.now()
        due: list[Node] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, node = heapq.heappop(self._deadlines)
            node.has_deadline = False
            if node.locks or node.parent is None:
                continue
            if node.keep_until > now:
                self._remind(node)
            elif node.policy is self._classes.get((True, node.priority)):
                due.append(node)
        due.sort(key=lambda node: node.uses)
        for node in due:
            self.referenced(node)
            node.keep_until = 0.0
            node.policy = self._class(retained=False, priority=node.priority)
            node.policy.returned(node)

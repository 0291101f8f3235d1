"""What stands above any policy: priority classes, retention, and what its callers foresee."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

from quire0.core.hints import PENDING, SPENT
from quire0.core.policies import Capacity, Policy, PolicyFactory, Visit

if TYPE_CHECKING:
    from quire0.core.node import Node

Clock = Callable[[], float]

FORESEEN, PLAIN, RETAINED = range(3)


class Evictor:
    """Chooses victims: the lowest class that has one, and in it whatever its policy says.

    A class is (level, priority), lowest first, each with a policy object of its own. Levels:
    what its callers expect nobody to come back for, the rest, and what is retained. A
    node's priority, retention and outlook (`Node.spent_from`) change for its whole path at
    once, so a parent is never in a lower class than its child. When retention or
    a time to live runs out, a node changes its class and keeps the place of its last use.

    Invariant: a node is held by exactly one policy while it is cached, by none otherwise.
    """

    def __init__(self, factory: PolicyFactory, capacity: Capacity, clock: Clock | None) -> None:
        self._factory = factory
        self._capacity = capacity
        self._clock = clock
        self._tick = count().__next__
        self._latest = 0.0
        self._classes: dict[tuple[int, int], Policy] = {}
        self._order: list[Policy] = []
        self._max_deadlines = 64
        self._deadlines: list[tuple[float, int, Node]] = []
        self._plain = self._class(PLAIN, 0)
        self.watches = self._plain.watches
        self.remembers = self._plain.remembers

    def opened(self, visit: Visit, node: Node) -> None:
        """A request found this node, the deepest; asked for only where a policy watches."""
        self._plain.opened(visit, node if node.parent is not None else None)

    def closing(self, visit: Visit, node: Node) -> None:
        """A request ends at this node; asked for only where a policy watches."""
        self._plain.closing(visit, node if node.parent is not None else None)

    def touched(self, node: Node) -> None:
        """A request found this node and references it."""
        (node.policy or self._plain).touched(node)

    def extendable(self, node: Node, priority: int, keep_for: float) -> bool:
        """Whether a request of this priority and retention may lengthen a node it found cached."""
        alike = node.priority == priority and (keep_for > 0 or node.keep_until <= self.now())
        return alike and (node.grown or node.policy is None or node.policy.extendable(node))

    def seam(self, node: Node) -> int:
        """Return where to cut a run that has grown and is about to be cached; 0 for nowhere."""
        return self._home(node).seam(node)

    def released(self, node: Node) -> None:
        """The node is cached now: it joins its class."""
        policy = self._home(node)
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

    def evicting(self, node: Node, num_blocks: int) -> None:
        """The last blocks of a victim are about to go; asked for only where a policy remembers."""
        assert node.policy is not None
        node.policy.evicting(node, num_blocks)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` took over the head of `lower`, which is cached or referenced."""
        upper.policy = lower.policy
        upper.uses = lower.uses
        upper.rank = lower.rank
        upper.queue = lower.queue
        upper.note = lower.note
        upper.priority = lower.priority
        upper.keep_until = lower.keep_until
        upper.spent_from = lower.spent_from
        upper.session = lower.session
        if upper.session is not None and id(lower) in upper.session.nodes:
            upper.session.nodes[id(upper)] = upper
        if not lower.locks:
            assert lower.policy is not None
            lower.policy.split(upper, lower)
            self._remind(upper)

    def joinable(self, upper: Node, lower: Node) -> bool:
        """Whether two referenced nodes may be one entry from now on, with what is kept of `lower`."""
        policy = upper.policy
        return policy is lower.policy and (policy or self._plain).joinable(upper, lower)

    def foresee(self, node: Node) -> None:
        """Nobody is expected to come back to this cached node: it goes before all others."""
        node.spent_from = SPENT
        self._change_class(node)

    def review(self, node: Node) -> None:
        """Put the cached nodes of a path, deepest first, into the classes they belong to now."""
        while node.parent is not None:
            if not node.locks:
                self._change_class(node)
            node = node.parent

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

    def _home(self, node: Node) -> Policy:
        """Return the policy of the class that a node belongs to now."""
        if not (node.priority or node.keep_until or node.spent_from):
            return self._plain
        now = self.now()
        level = PLAIN
        if node.keep_until > now:
            level = RETAINED
        elif node.spent_from and node.spent_from <= now:
            level = FORESEEN
        self._remind(node)
        return self._class(level, node.priority)

    def _class(self, level: int, priority: int) -> Policy:
        key = (level, priority)
        policy = self._classes.get(key)
        if policy is None:
            twin = self._plain.sibling() if self._classes else None
            policy = self._classes[key] = twin or self._factory(self._tick, self._capacity)
            self._order = [self._classes[each] for each in sorted(self._classes)]
        return policy

    def _remind(self, node: Node) -> None:
        """Look at a node again at the next time that may change its class."""
        times = [t for t in (node.keep_until, node.spent_from) if self._latest < t < PENDING]
        if times and not 0 < node.deadline <= min(times):
            node.deadline = min(times)
            if len(self._deadlines) >= self._max_deadlines:
                self._deadlines = [each for each in self._deadlines if each[2].parent is not None]
                heapq.heapify(self._deadlines)
                self._max_deadlines = max(64, 2 * len(self._deadlines))
            heapq.heappush(self._deadlines, (min(times), self._tick(), node))

    def _expire(self) -> None:
        now = self.now()
        due: list[Node] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            time, _, node = heapq.heappop(self._deadlines)
            if time == node.deadline:
                node.deadline = 0.0
            if not node.locks and node.parent is not None:
                due.append(node)
        due.sort(key=lambda node: node.uses)
        for node in due:
            if node.keep_until <= now:
                node.keep_until = 0.0
            self._change_class(node)

    def _change_class(self, node: Node) -> None:
        policy = self._home(node)
        if policy is not node.policy:
            self.referenced(node)
            node.policy = policy
            policy.returned(node)

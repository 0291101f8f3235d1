"""The order of eviction above any policy: spent blocks, then the rest, then retained ones.

Within each of the three, blocks of lower priority go first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import count
from operator import attrgetter

from quire.core.node import FOREVER, Mark, Node, Owner
from quire.core.policy import Capacity, Clock, Policy, PolicyFactory
from quire.core.terms import Terms
from quire.errors import ConfigError
from quire.heaps import LazyHeap

SPENT, PLAIN, RETAINED = range(3)

UNMARKED = Mark()
"""Stands for the mark of a node on ordinary terms."""


class Order:
    """Chooses victims: the lowest class that has one, and in it whatever its policy says.

    A class is (level, priority), lowest first, each with a policy object of its own. Levels: nodes whose owner is
    done with them, the rest, and what is retained. A node without a mark is kept on ordinary terms. A request uses
    whole paths, so a parent is never in a lower class than its child. When retention ends or an owner is done, a node
    changes its class and keeps the place of its last use.

    `lent`  references of requests that have no room yet, by the identity of the node: no use of it, so that a node goes back
            to the place of its last use when they are refused

    Invariants: a cached node is held by the policy of its class, any other by none; an owner lists the nodes in the
    tree whose marks name it, and their children are all its own too; lent[node] <= node.locks.
    """

    def __init__(self, factory: PolicyFactory, capacity: Capacity, clock: Clock | None) -> None:
        self._factory = factory
        self._capacity = capacity
        self.clock = clock
        self._tick = count().__next__
        self._latest = 0.0
        self._classes: dict[tuple[int, int], Policy] = {}
        self.lent: dict[int, int] = {}
        self._due = LazyHeap[tuple[float, int, Node | Owner]](_is_there)
        try:
            self._plain = self._policy_of((PLAIN, 0))
        except TypeError as error:
            raise ConfigError(f"policy is called with a counter and a capacity: {error}") from error
        if not isinstance(self._plain, Policy):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"policy makes quire.core.Policy objects, not {self._plain!r}")

    # -- terms ---------------------------------------------------------------------------

    def stored(self, node: Node, terms: Terms) -> None:
        """A request of these terms made a node."""
        if terms.priority or terms.owner is not None:
            self._mark(node, Mark(terms.priority, owner=terms.owner))

    def used(self, node: Node, terms: Terms) -> None:
        """A request of these terms uses a node; one that is not its owner's makes it an ordinary one."""
        mark = node.mark
        if mark is not None:
            mark.priority = max(mark.priority, terms.priority)
            if mark.owner is not terms.owner:
                self._disown(node)
        elif terms.priority > 0:
            node.mark = Mark(terms.priority)

    def retain(self, node: Node, seconds: float) -> None:
        """Retain a referenced node for `seconds` from now on."""
        if node.mark is None:
            node.mark = Mark()
        node.mark.keep_until = max(node.mark.keep_until, self.now() + seconds)

    def alike(self, node: Node, terms: Terms) -> bool:
        """Whether the next blocks of a request may join a node that it used, on the same terms."""
        mark = node.mark or UNMARKED
        kept = terms.retain_s > 0 or not mark.keep_until or mark.keep_until <= self.now()
        return kept and mark.priority == terms.priority and mark.owner is terms.owner

    def joinable(self, upper: Node, lower: Node) -> bool:
        """Whether two nodes of one path are kept on the same terms from now on."""
        now, one, two = self.now(), upper.mark or UNMARKED, lower.mark or UNMARKED
        same = one.priority == two.priority and one.owner is two.owner
        return same and max(one.keep_until, now) == max(two.keep_until, now)

    def expect(self, owner: Owner, due: float) -> None:
        """Set the time after which no return to an owner's nodes is expected."""
        now = self.now()
        was_done, owner.due = owner.due <= now, due
        if was_done != (due <= now):
            self._refile(owner.nodes.values())
        elif now < due < FOREVER:
            self._due.push((due, self._tick(), owner))

    # -- uses ----------------------------------------------------------------------------

    def touched(self, node: Node) -> None:
        """A request that found this node and references it has room."""
        self._holder(node).touched(node)

    def joined(self, node: Node) -> Policy:
        """Return the policy of the class that a node joins that is cached now."""
        mark = node.mark
        if mark is None:
            return self._plain
        mark.policy = policy = self._policy_of(self._class_of(node, mark))
        return policy

    def take_back(self, node: Node) -> None:
        """One request fewer that has no room yet references this node."""
        count = self.lent.pop(id(node)) - 1
        if count:
            self.lent[id(node)] = count

    def referenced(self, node: Node) -> None:
        """The cached node is no candidate any more: it got its first reference, or is about to leave the tree."""
        self._holder(node).referenced(node)

    def exposed(self, node: Node) -> None:
        """The last child of this cached node went away."""
        self._holder(node).exposed(node)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` took over the head of `lower`, which is cached or referenced; who cut it references it next."""
        upper.uses, upper.note, mark = lower.uses, lower.note, lower.mark
        if mark is not None:
            self._mark(upper, Mark(mark.priority, mark.keep_until, mark.owner, mark.policy))
        if not lower.locks:
            self._holder(lower).split(upper, lower)
        elif id(lower) in self.lent:
            self.lent[id(upper)] = self.lent[id(lower)]

    def gone(self, node: Node) -> None:
        """A node left the tree."""
        self._disown(node)
        node.mark = None

    # -- victims -------------------------------------------------------------------------

    def victim(self) -> tuple[Node, int] | None:
        """Return the node to take blocks from next and how many may go; None when nothing is cached."""
        if self._due.items:
            self.expire()
        for policy in self._policies:
            found = policy.victim()
            if found is not None:
                return found  # pyright: ignore[reportReturnType] - all entries are nodes here
        return None

    def order(self) -> Iterator[Node]:
        """Iterate over the cached nodes that policies hold, class by class, coldest first."""
        if self._due.items:
            self.expire()
        for policy in self._policies:
            yield from policy.order()  # pyright: ignore[reportReturnType]

    def expire(self) -> None:
        """Process what is due: retention that ended, owners that are done."""
        now = self.now()
        nodes: list[Node] = []
        while (first := self._due.first()) is not None and first[0] <= now:
            item = heapq.heappop(self._due.items)[2]
            if isinstance(item, Owner):
                nodes += item.nodes.values() if item.due <= now else ()
            elif item.mark is not None:
                item.mark.is_due = False
                if not item.locks and item.mark.keep_until <= now:
                    item.mark.keep_until = 0.0
                nodes.append(item)
        self._refile(nodes)

    def now(self) -> float:
        """Return the injected clock's time in seconds, never falling; 0 without a clock."""
        if self.clock is not None:
            self._latest = max(self._latest, self.clock())
        return self._latest

    # -- classes -------------------------------------------------------------------------

    def _holder(self, node: Node) -> Policy:
        return self._plain if node.mark is None else node.mark.policy or self._plain

    def _class_of(self, node: Node, mark: Mark) -> tuple[int, int]:
        """Return the class that a node belongs to now, and look at it again when its retention ends."""
        now = self.now()
        if mark.keep_until > now:
            if not mark.is_due:
                mark.is_due = True
                self._due.push((mark.keep_until, self._tick(), node))
            return RETAINED, mark.priority
        return SPENT if mark.owner is not None and mark.owner.due <= now else PLAIN, mark.priority

    def _policy_of(self, key: tuple[int, int]) -> Policy:
        policy = self._classes.get(key)
        if policy is None:
            policy = self._classes[key] = self._factory(self._tick, self._capacity)
            self._policies = [self._classes[each] for each in sorted(self._classes)]
        return policy

    def _mark(self, node: Node, mark: Mark) -> None:
        node.mark = mark
        if mark.owner is not None:
            mark.owner.nodes[id(node)] = node

    def _disown(self, node: Node) -> None:
        mark = node.mark
        if mark is not None and mark.owner is not None:
            del mark.owner.nodes[id(node)]
            mark.owner = None

    def _refile(self, nodes: Iterable[Node]) -> None:
        """Take the cached ones of these nodes to the classes that they belong to now."""
        for node in sorted(nodes, key=attrgetter("uses")):
            mark = node.mark
            if node.locks or mark is None:
                continue
            policy, held_by = self._policy_of(self._class_of(node, mark)), self._holder(node)
            if policy is not held_by:
                held_by.referenced(node)
                mark.policy = policy
                policy.returned(node)


def _is_there(entry: tuple[float, int, Node | Owner]) -> bool:
    item = entry[2]
    return bool(item.nodes) if isinstance(item, Owner) else item.mark is not None

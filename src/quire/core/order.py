"""The order of eviction above any policy: what is spent, then the rest, then what is retained; by priority in each."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from itertools import count

from quire.core.hints import FOREVER
from quire.core.node import Mark, Node, Owner, Terms
from quire.core.policy import Capacity, Policy, PolicyFactory
from quire.errors import ConfigError

Clock = Callable[[], float]

SPENT, PLAIN, RETAINED = range(3)


class Order:
    """Chooses victims: the lowest class that has one, and in it whatever its policy says.

    A class is (level, priority), lowest first, each with a policy object of its own. Levels: nodes whose owner is
    done with them, the rest, and what is retained. A node without a mark is kept on ordinary terms. A request uses
    whole paths, so a parent is never in a lower class than its child. When retention ends or an owner is done, a node
    changes its class and keeps the place of its last use.

    Invariants: a cached node is held by the policy of its class, any other by none; an owner lists the nodes in the
    tree whose marks name it, and their children are all its own too.
    """

    def __init__(self, factory: PolicyFactory, capacity: Capacity, clock: Clock | None) -> None:
        self._factory = factory
        self._capacity = capacity
        self._clock = clock
        self._tick = count().__next__
        self._latest = 0.0
        self._classes: dict[tuple[int, int], Policy] = {}
        self._policies: list[Policy] = []
        self._due: list[tuple[float, int, Node | Owner]] = []
        self._max_due = 64
        try:
            self._plain = self._policy_of((PLAIN, 0))
        except TypeError as error:
            raise ConfigError(f"policy is called with a counter and a capacity: {error}") from error
        if not isinstance(self._plain, Policy):  # pyright: ignore[reportUnnecessaryIsInstance]
            msg = f"policy is a name or makes quire.core.Policy objects, not {self._plain!r}"
            raise ConfigError(msg)
        self.has_clock = clock is not None

    # -- nodes ---------------------------------------------------------------------------

    def stored(self, node: Node, terms: Terms) -> None:
        """A request of these terms made a node."""
        if terms.priority or terms.owner is not None:
            node.mark = Mark(terms.priority)
            if terms.owner is not None:
                self._own(node, terms.owner)

    def used(self, node: Node, terms: Terms) -> None:
        """A request of these terms uses a node; one that is not its owner's makes it an ordinary one."""
        mark = node.mark
        if mark is None:
            if terms.priority > 0:
                node.mark = Mark(terms.priority)
            return
        mark.priority = max(mark.priority, terms.priority)
        if mark.owner is not terms.owner:
            self._disown(node)

    def retain(self, node: Node, seconds: float) -> None:
        """Retain a referenced node for so many seconds from now on."""
        if node.mark is None:
            node.mark = Mark()
        node.mark.keep_until = max(node.mark.keep_until, self.now() + seconds)

    def alike(self, node: Node, terms: Terms) -> bool:
        """Whether what a request stores next may join a node that it used, on the same terms."""
        mark = node.mark
        if mark is None:
            return not terms.priority and terms.owner is None
        kept = terms.retain_s > 0 or not mark.keep_until
        return kept and mark.priority == terms.priority and mark.owner is terms.owner

    def joinable(self, upper: Node, lower: Node) -> bool:
        """Whether two nodes of one path are kept on the same terms from now on."""
        if upper.mark is lower.mark:
            return True
        now, one, two = self.now(), upper.mark or Mark(), lower.mark or Mark()
        same = one.priority == two.priority and one.owner is two.owner
        return same and max(one.keep_until, now) == max(two.keep_until, now)

    def touched(self, node: Node) -> None:
        """A request found this node and references it."""
        self._holder(node).touched(node)

    def released(self, node: Node) -> None:
        """The node is cached now: it joins its class."""
        mark = node.mark
        if mark is None:
            self._plain.released(node)
            return
        policy = mark.policy = self._policy_of(self._class_of(node, mark))
        policy.released(node)

    def referenced(self, node: Node) -> None:
        """The cached node got its first reference, or is about to leave the tree."""
        self._holder(node).referenced(node)

    def exposed(self, node: Node) -> None:
        """The last child of this cached node went away."""
        self._holder(node).exposed(node)

    def split(self, upper: Node, lower: Node) -> None:
        """`upper` took over the head of `lower`, which is cached or referenced."""
        upper.uses, upper.note = lower.uses, lower.note
        if lower.mark is not None:
            mark = lower.mark
            upper.mark = Mark(mark.priority, mark.keep_until, policy=mark.policy)
            if mark.owner is not None:
                self._own(upper, mark.owner)
        if not lower.locks:
            self._holder(lower).split(upper, lower)
            if upper.mark is not None and lower.mark is not None and lower.mark.is_due:
                self._remind(upper, upper.mark)

    def gone(self, node: Node) -> None:
        """A node left the tree."""
        if node.mark is not None:
            self._disown(node)
            node.mark = None

    # -- owners --------------------------------------------------------------------------

    def expect(self, owner: Owner, due: float) -> None:
        """Say from when on nobody is expected to come back to an owner's nodes."""
        now = self.now()
        was_done, owner.due = owner.due <= now, due
        if was_done != (due <= now):
            self._refile(list(owner.nodes.values()))
        elif now < due < FOREVER:
            self._push(due, owner)

    # -- victims -------------------------------------------------------------------------

    def victim(self) -> tuple[Node, int] | None:
        """Return the node to take blocks from next and how many may go; None when nothing is cached."""
        if self._due:
            self._expire()
        for policy in self._policies:
            found = policy.victim()
            if found is not None:
                return found  # pyright: ignore[reportReturnType] - all entries are nodes here
        return None

    def order(self) -> Iterator[Node]:
        """Iterate over the cached nodes that policies hold, class by class, coldest first."""
        if self._due:
            self._expire()
        for policy in self._policies:
            yield from policy.order()  # pyright: ignore[reportReturnType]

    def now(self) -> float:
        """Return the injected clock's time in seconds, never falling; 0 without a clock."""
        if self._clock is not None:
            self._latest = max(self._latest, self._clock())
        return self._latest

    # -- classes -------------------------------------------------------------------------

    def _holder(self, node: Node) -> Policy:
        return self._plain if node.mark is None else node.mark.policy or self._plain

    def _class_of(self, node: Node, mark: Mark) -> tuple[int, int]:
        """Return the class that a node belongs to now, and look at it again when its retention ends."""
        now = self.now()
        if mark.keep_until > now:
            self._remind(node, mark)
            return RETAINED, mark.priority
        return SPENT if mark.owner is not None and mark.owner.due <= now else PLAIN, mark.priority

    def _policy_of(self, key: tuple[int, int]) -> Policy:
        policy = self._classes.get(key)
        if policy is None:
            policy = self._classes[key] = self._factory(self._tick, self._capacity)
            self._policies = [self._classes[each] for each in sorted(self._classes)]
        return policy

    def _change_class(self, node: Node) -> None:
        """Take a cached node to the class that it belongs to now."""
        mark = node.mark
        assert mark is not None
        policy, held_by = self._policy_of(self._class_of(node, mark)), self._holder(node)
        if policy is not held_by:
            held_by.referenced(node)
            mark.policy = policy
            policy.returned(node)

    def _own(self, node: Node, owner: Owner) -> None:
        assert node.mark is not None
        node.mark.owner = owner
        owner.nodes[id(node)] = node

    def _disown(self, node: Node) -> None:
        mark = node.mark
        if mark is not None and mark.owner is not None:
            del mark.owner.nodes[id(node)]
            mark.owner = None

    def _refile(self, nodes: list[Node]) -> None:
        """Take the cached ones of these nodes to the classes that they belong to now."""
        for node in sorted(nodes, key=_last_use):
            if not node.locks:
                self._change_class(node)

    # -- what is due ---------------------------------------------------------------------

    def _remind(self, node: Node, mark: Mark) -> None:
        if not mark.is_due:
            mark.is_due = True
            self._push(mark.keep_until, node)

    def _push(self, due: float, item: Node | Owner) -> None:
        if len(self._due) >= self._max_due:
            self._due = [each for each in self._due if _is_there(each[2])]
            heapq.heapify(self._due)
            self._max_due = max(64, 2 * len(self._due))
        heapq.heappush(self._due, (due, self._tick(), item))

    def _expire(self) -> None:
        now = self.now()
        nodes: list[Node] = []
        while self._due and self._due[0][0] <= now:
            item = heapq.heappop(self._due)[2]
            if isinstance(item, Owner):
                nodes += item.nodes.values() if item.due <= now else ()
            elif item.mark is not None:
                item.mark.is_due = False
                if not item.locks and item.mark.keep_until <= now:
                    item.mark.keep_until = 0.0
                nodes.append(item)
        self._refile(nodes)


def _is_there(item: Node | Owner) -> bool:
    return bool(item.nodes) if isinstance(item, Owner) else item.mark is not None


def _last_use(node: Node) -> int:
    return node.uses

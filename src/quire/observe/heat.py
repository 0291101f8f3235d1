"""The prefix tree as a picture: its hottest branches, and the requests and scopes that share them.

Nothing here tells what prompts were about.
"""

from __future__ import annotations

from collections.abc import Collection
from heapq import heappop, heappush
from itertools import count, islice
from math import inf, log2
from typing import Any, TypeAlias

import numpy as np

from quire.core import CacheManager, Scope, Watcher
from quire.core.node import Node, NodePart
from quire.core.sequence import Sequence
from quire.core.stats import Missed
from quire.core.tokens import Key
from quire.observe.telling import is_divided, salt_key

HALF_LIFE = 512
"""Requests after which a use counts half in the heat of a branch."""

MAX_SHOWN = 160
"""Branches of a picture."""

MAX_VISITED = 12_000
"""Branches that are looked at for a picture, below one of them three quarters of what is left; of more, an even sample."""


Waiting: TypeAlias = tuple[float, int, Node, list[dict[str, Any]]]
"""A branch that may be shown: how cold it is, its number in order, and the branches beside it that are shown."""


class HeatPart(NodePart, gc=False, eq=False):
    """The number and the heat of the requests that found a node.

    `heat`    log2 of the sum of 2 ** (number / HALF_LIFE) over these requests
    `number`  its own in pictures, from 1; 0 before it was in one
    """

    uses: int = 0
    heat: float = -inf
    number: int = 0

    def split(self, upper: Node, lower: Node) -> HeatPart:
        return HeatPart(self.uses, self.heat)

    def cut(self, node: Node) -> None:
        pass

    def join(self, upper: Any, at: int) -> None:
        self.uses, self.heat = max(self.uses, upper.uses), max(self.heat, upper.heat)


class Heat(Watcher):
    """Counts of every branch of the prefix tree the requests that found it, the latest ones most.

    `num_requests`  of the manager, as far as they were told
    `num_numbered`  nodes that were in pictures
    """

    part = HeatPart
    num_requests = num_numbered = 0

    def opened(self, seq: Sequence, key: Key, missed: Missed) -> None:
        self.num_requests = seq.number
        own, place = seq.number / HALF_LIFE, self.place
        for node in (seq.root, *seq.node.path()):
            part = node.parts[place]
            part.uses += 1
            part.heat = own + log2(1 + 2.0 ** (part.heat - own))


class TreePicture:
    """A picture of a prefix tree, made from its hottest branches down.

    `num_visited`  branches that were looked at

    A branch is as hot as the branches below it together, and hotter: so the hottest branches hang together. It is for the
    thread that has the manager.
    """

    def __init__(
        self, manager: CacheManager, max_shown: int = MAX_SHOWN, max_visited: int = MAX_VISITED
    ) -> None:
        self._size = manager.block_size
        self._max_shown, self._left = max_shown, max_visited
        self._heat = manager.kernel.watchers.find(Heat)
        self._place = 0 if self._heat is None else self._heat.place
        self._order = count()
        self._roots = manager.kernel.tree.roots
        self.num_visited = self._num_shown = 0

    def data(self) -> list[dict[str, Any]]:
        """Return the scopes as plain data, with their branches in each other; empty without a `Heat` watcher.

        `id`             of a branch, the same in each picture
        `start`, `end`   its tokens, counted from the beginning of the prompt
        `uses`, `heat`   requests that found it, of a scope all of them; the same, each less the longer ago it was
        `running`        requests that use it at present
        `branches`       that go on after it; `children` are those that are shown
        """
        if self._heat is None:
            return []
        made: list[dict[str, Any]] = []
        waiting: list[Waiting] = []
        scopes = {id(root): scope for scope, root in self._roots.items()}
        roots = [root for root in self._roots.values() if root.children or root.locks]
        self._push(waiting, roots, made)
        while waiting and self._num_shown < self._max_shown:
            _, _, node, place = heappop(waiting)
            shown = self._branch(node)
            if node.parent is None:
                shown["scope"] = _named(scopes[id(node)])
            place.append(shown)
            self._num_shown += 1
            self._push(waiting, node.children.values(), shown["children"])
        return made

    def _push(
        self, waiting: list[Waiting], nodes: Collection[Node], place: list[dict[str, Any]]
    ) -> None:
        """Let nodes wait for their turn: of many the hottest, of very many an even sample's."""
        num_left = self._max_shown - self._num_shown
        if not nodes or not num_left or self._left <= 0:
            return
        stride = -(-len(nodes) // -(-3 * self._left // 4))
        num_looked = -(-len(nodes) // stride)
        self._left -= num_looked
        self.num_visited += num_looked
        hot, at = [*islice(nodes, 0, None, stride)], self._place
        heats = [node.parts[at].heat for node in hot]
        best = range(num_looked)
        if num_looked > num_left:
            best = np.argpartition(heats, -num_left)[-num_left:].tolist()
        for at in best:
            heappush(waiting, (-heats[at], next(self._order), hot[at], place))

    def _branch(self, node: Node) -> dict[str, Any]:
        assert self._heat is not None
        part = node.parts[self._heat.place]
        if not part.number:
            self._heat.num_numbered += 1
            part.number = self._heat.num_numbered
        return {
            "id": part.number,
            "start": node.start * self._size,
            "end": node.end * self._size,
            "uses": part.uses,
            "heat": 2.0 ** (part.heat - self._heat.num_requests / HALF_LIFE),
            "running": node.locks,
            "branches": len(node.children),
            "children": [],
        }


def _named(scope: Scope) -> dict[str, Any]:
    """Return who shares a scope; a salt, which may be a secret, as a digest."""
    salt = salt_key(scope)[:8] if is_divided(scope) and scope.salt is not None else None
    lora = None if scope.lora is None else str(scope.lora)
    return {
        "tenant": None if scope.tenant is None else str(scope.tenant),
        "lora": lora,
        "salt": salt,
    }

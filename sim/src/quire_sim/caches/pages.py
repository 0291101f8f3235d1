"""The cache of SGLang: a radix tree with a page of one token, its leaves evicted by last use.

Read from `sglang/srt/mem_cache/radix_cache.py` 0.5.23.
"""

from __future__ import annotations

import heapq

from quire_sim.caches.asking import CacheHit
from quire_sim.caches.prompts import CachePrompt
from quire_sim.caches.radix import RadixNode, RadixTree
from quire_sim.caches.tracking import TrackedCache


class RadixCache(TrackedCache):
    """Runs of tokens. A request locks the run that it finds, and adds its own once it is computed.

    Where tokens lack, the leaf that was used longest ago goes as a whole, then the next.
    """

    def __init__(self, num_tokens: int | None = None) -> None:
        super().__init__()
        self._limit = num_tokens
        self._trees: dict[tuple[str, str], RadixTree] = {}
        self._stored = 0
        self._taken: dict[int, int] = {}
        self._locked: dict[int, RadixNode] = {}
        self._clock = 0
        self._count = 0
        self._leaves: list[tuple[float, int, RadixNode, RadixTree]] = []

    def start(self, number: int, prompt: CachePrompt, now: float) -> CacheHit | None:
        """Find and lock a run of tokens, and make room for the others."""
        tree = self._trees.setdefault((prompt.model, prompt.scope), RadixTree())
        hit, last = 0, tree.root
        for node, equal in self._used(tree, prompt.tokens[:-1].tobytes()):
            last = tree.cut(node, equal) if equal < node.size else node
            hit += equal
        self._lock(last, 1)
        if not self._make_room(prompt.size - hit):
            self._lock(last, -1)
            self._offer(last, tree)
            return None if self._taken else self._hit(number, prompt, 0, 1)
        self._locked[number], self._taken[number] = last, prompt.size - hit
        return self._hit(number, prompt, hit, 1)

    def computed(self, number: int, now: float) -> None:
        """Add the tokens of a prompt to the tree."""
        prompt = self._computed(number)
        if prompt is not None and number in self._taken:
            self._add(number, prompt, prompt.tokens.tobytes())

    def end(self, number: int, now: float) -> None:
        """Add the tokens of an answer, and unlock all."""
        prompt = self._ended(number)
        if number not in self._taken:
            return
        made = prompt.output[:-1]
        if len(made) and self._make_room(len(made)):
            self._taken[number] += len(made)
            self._add(number, prompt, prompt.tokens.tobytes() + made.tobytes())
        node = self._locked.pop(number)
        self._lock(node, -1)
        self._offer(node, self._trees[prompt.model, prompt.scope])
        del self._taken[number]

    def _add(self, number: int, prompt: CachePrompt, key: bytes) -> None:
        tree = self._trees[prompt.model, prompt.scope]
        self._used(tree, key)
        self._clock += 1
        node, new = tree.insert(key, self._clock)
        self._stored += new
        self._taken[number] = 0
        self._lock(node, 1)
        self._lock(self._locked[number], -1)
        self._offer(self._locked[number], tree)
        self._locked[number] = node

    def _used(self, tree: RadixTree, key: bytes) -> list[tuple[RadixNode, int]]:
        """Note that nodes are used, also one that a prompt begins with in part, and return them."""
        self._clock += 1
        found = tree.match(key)
        for node, _ in found:
            node.used = self._clock
        if found:
            self._offer(found[-1][0], tree)
        return found

    @staticmethod
    def _lock(node: RadixNode, by: int) -> None:
        for each in node.path():
            each.locks += by

    def _make_room(self, num_tokens: int) -> bool:
        if self._limit is None:
            return True
        lacks = num_tokens + self._stored + sum(self._taken.values()) - self._limit
        if lacks <= 0:
            return True
        while lacks > 0 and self._leaves:
            used, _, leaf, tree = heapq.heappop(self._leaves)
            parent = leaf.parent
            if used != leaf.used or leaf.locks or leaf.children or parent is None:
                continue  # it was used since, or is gone
            tree.remove(leaf)
            leaf.parent = None
            self._stored -= leaf.size
            lacks -= leaf.size
            self._offer(parent, tree)
        return lacks <= 0

    def _offer(self, node: RadixNode, tree: RadixTree) -> None:
        """Note that a node may be evicted, if it is a leaf that no request locks."""
        if node.parent is not None and not node.locks and not node.children:
            self._count += 1
            heapq.heappush(self._leaves, (node.used, self._count, node, tree))

"""A radix tree of prompts as bytes: runs of token ids, each with when it was last used."""

from __future__ import annotations

from collections.abc import Iterator

from quire.core.tokens import TOKEN_BYTES, common_prefix


class RadixNode:
    """A run of tokens behind another one.

    `key`     its ids, four bytes each; `used`: when it was last used; `is_ready`: its tokens are computed
    `locks`   requests that use it
    """

    __slots__ = ("children", "is_ready", "key", "locks", "parent", "used")

    def __init__(self, key: bytes, parent: RadixNode | None, used: float) -> None:
        self.key = key
        self.parent = parent
        self.used = used
        self.is_ready = False
        self.locks = 0
        self.children: dict[bytes, RadixNode] = {}

    @property
    def size(self) -> int:
        """Tokens of the run."""
        return len(self.key) // TOKEN_BYTES

    def path(self) -> Iterator[RadixNode]:
        """Yield the node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class RadixTree:
    """Runs of tokens by what is before them. A page is one token."""

    def __init__(self) -> None:
        self.root = RadixNode(b"", None, 0.0)

    def match(self, key: bytes) -> list[tuple[RadixNode, int]]:
        """Return the nodes that a prompt begins with, each with its tokens that are equal. Pure."""
        found: list[tuple[RadixNode, int]] = []
        node, at = self.root, 0
        while at < len(key):
            child = node.children.get(key[at : at + TOKEN_BYTES])
            if child is None:
                break
            equal = _common(child.key, key, at)
            found.append((child, equal))
            at += equal * TOKEN_BYTES
            if equal < child.size:
                break
            node = child
        return found

    def insert(self, key: bytes, used: float) -> tuple[RadixNode, int]:
        """Add a prompt, cutting a node where it parts from it; return its last node and its new tokens."""
        node, at = self.root, 0
        for child, equal in self.match(key):
            node = self.cut(child, equal) if equal < child.size else child
            at += equal * TOKEN_BYTES
        if at == len(key):
            return node, 0
        new = RadixNode(key[at:], node, used)
        node.children[key[at : at + TOKEN_BYTES]] = new
        return new, new.size

    def cut(self, node: RadixNode, size: int) -> RadixNode:
        """Cut a node after so many tokens; return the upper part."""
        parent, at = node.parent, size * TOKEN_BYTES
        assert parent is not None
        upper = RadixNode(node.key[:at], parent, node.used)
        upper.is_ready, upper.locks = node.is_ready, node.locks
        upper.children[node.key[at : at + TOKEN_BYTES]] = node
        parent.children[node.key[:TOKEN_BYTES]] = upper
        node.key, node.parent = node.key[at:], upper
        return upper

    def remove(self, leaf: RadixNode) -> None:
        """Remove a node without children."""
        assert leaf.parent is not None
        assert not leaf.children
        del leaf.parent.children[leaf.key[:TOKEN_BYTES]]


def _common(run: bytes, key: bytes, at: int) -> int:
    """Return the tokens of a run that a prompt has from a place on."""
    end = at + len(run)
    if key[at:end] == run:
        return len(run) // TOKEN_BYTES
    return common_prefix(run, key[at:end])


class SeenPrompts:
    """All prompts so far, by model and scope: what a cache without limits would find.

    `used` of a node is the row of the last prompt that has it.
    """

    def __init__(self) -> None:
        self._trees: dict[tuple[str, str], RadixTree] = {}

    def longest(self, scope: tuple[str, str], key: bytes) -> tuple[int, int]:
        """Return the tokens of a prompt that were seen, and the last row that has them; 0: none."""
        tree = self._trees.get(scope)
        found = [] if tree is None else tree.match(key)
        return sum(equal for _, equal in found), int(found[-1][0].used) if found else 0

    def add(self, scope: tuple[str, str], key: bytes, row: int) -> tuple[int, int, RadixNode, int]:
        """Add a prompt. Return its tokens that were seen, those that are computed, its last node, and the row.

        The row is that of the last prompt that has the tokens; 0: none.
        """
        tree = self._trees.get(scope)
        if tree is None:
            tree = self._trees[scope] = RadixTree()
        found = tree.match(key)
        seen = sum(equal for _, equal in found)
        ready, earlier_row = 0, int(found[-1][0].used) if found else 0
        for node, equal in found:
            if not node.is_ready:
                break
            ready += equal
        node, _ = tree.insert(key, row)
        for each in node.path():
            each.used = row
        return seen, ready, node, earlier_row

    @staticmethod
    def mark(node: RadixNode) -> None:
        """Say that a prompt is computed."""
        for each in node.path():
            if each.is_ready:
                break
            each.is_ready = True

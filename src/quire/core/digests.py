"""Digests of the blocks in the tree, each computed once and kept with its node."""

from __future__ import annotations

from quire.core.hashing import chain, root_digest
from quire.core.node import Node
from quire.core.scope import Scope, ScopePart
from quire.core.tokens import Key
from quire.core.tree import PrefixTree


class Digests:
    """Names the blocks of a tree as `block_hashes` does; `Node.hashes` keeps what was computed.

    A root keeps the digest of its scope, so that a chain can start there. `public` has other names of
    models, for scopes whose own mean nothing outside this process; it changes before anything is named.
    """

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self.public: dict[ScopePart, ScopePart] = {}

    def named(self, scope: Scope) -> Scope:
        """Return a scope under the name that its model has outside."""
        model = self.public.get(scope.model, scope.model)
        return Scope(scope.salt, scope.lora, model) if self.public else scope

    def root(self, scope: Scope) -> bytes:
        """Return the digest that stands for the empty prefix of a scope."""
        return root_digest(self.named(scope))

    def of(self, node: Node) -> list[bytes]:
        """Return the digests of a node's blocks, or the digest of a root's scope, as kept there."""
        missing: list[Node] = []
        each: Node | None = node
        while each is not None and (each.hashes is None or len(each.hashes) < each.num_blocks):
            missing.append(each)
            each = each.parent
        for each in reversed(missing):
            self._compute(each)
        assert node.hashes is not None
        return node.hashes

    def before(self, node: Node) -> bytes:
        """Return the digest of all that stands before a node."""
        assert node.parent is not None
        return self.of(node.parent)[-1]

    def path(self, node: Node) -> list[bytes]:
        """Return the digests of all blocks from the root to the end of a node."""
        return [digest for each in node.path() for digest in self.of(each)]

    def beyond(self, parent: bytes, key: Key) -> list[bytes]:
        """Return the digests of the whole blocks of a key that follows what `parent` names."""
        return chain(parent, key, self._tree.block_bytes, self._tree.media)

    def _compute(self, node: Node) -> None:
        if node.parent is None:
            node.hashes = [self.root(self._scope(node))]
            return
        known = node.hashes
        if known is None:
            known = node.hashes = []
        above = node.parent.hashes
        assert above
        done = len(known) * self._tree.block_bytes
        known += self.beyond(known[-1] if known else above[-1], node.key[done:])  # pyright: ignore[reportArgumentType] - `chain` takes a bytearray as well

    def _scope(self, root: Node) -> Scope:
        return next(scope for scope, each in self._tree.roots.items() if each is root)

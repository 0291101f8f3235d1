"""Digests of the blocks in the tree, each computed once and kept with its node."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from quire.core.kernel import Kernel, Watcher
from quire.core.manager import CacheManager
from quire.core.node import Node, NodePart
from quire.core.tokens import Key
from quire.errors import ConfigError
from quire.exchange.hashing import chain, root_digest
from quire.scope import Scope, ScopePart


class DigestPart(NodePart, gc=False, eq=False):
    """Digests of the first blocks of a node, as far as computed; a root has its scope's digest."""

    digests: list[bytes] = msgspec.field(default_factory=list[bytes])

    def split(self, upper: Node, lower: Node) -> DigestPart:
        at = upper.num_blocks
        head = DigestPart(self.digests[:at])
        del self.digests[:at]
        return head

    def cut(self, node: Node) -> None:
        del self.digests[node.num_blocks :]

    def join(self, upper: DigestPart, at: int) -> None:
        self.digests[:0] = upper.digests


class Digests(Watcher):
    """Names the blocks of a tree as `block_hashes` does.

    A chain starts at the digest of its scope. `public` has other names of models, for scopes whose own
    mean nothing outside this process; it changes before anything is named.
    """

    part = DigestPart

    def __init__(self) -> None:
        self.public: dict[ScopePart, ScopePart] = {}

    def begin(self, kernel: Kernel) -> None:
        self._tree = kernel.tree

    def named(self, scope: Scope) -> Scope:
        """Return a scope under the name that its model has outside."""
        model = self.public.get(scope.model, scope.model)
        return replace(scope, model=model) if self.public else scope

    def root(self, scope: Scope) -> bytes:
        """Return the digest that stands for the empty prefix of a scope."""
        return root_digest(self.named(scope))

    def of(self, node: Node) -> list[bytes]:
        """Return the digests of a node's blocks, or the digest of a root's scope, as kept there."""
        missing: list[Node] = []
        each: Node | None = node
        while each is not None and self._lacks(each):
            missing.append(each)
            each = each.parent
        for each in reversed(missing):
            self._compute(each)
        return self._known(node)

    def before(self, node: Node) -> bytes:
        """Return the digest of all that stands before a node."""
        assert node.parent is not None
        return self.of(node.parent)[-1]

    def path(self, node: Node) -> list[bytes]:
        """Return the digests of all blocks from the root to the end of a node."""
        return [digest for each in node.path() for digest in self.of(each)]

    def beyond(self, parent: bytes, key: Key | bytearray) -> list[bytes]:
        """Return the digests of the whole blocks of a key that follows what `parent` names."""
        return chain(parent, key, self._tree.block_bytes, self._tree.media)

    def _known(self, node: Node) -> list[bytes]:
        part: DigestPart = node.parts[self.place]
        return part.digests

    def _lacks(self, node: Node) -> bool:
        return len(self._known(node)) < (node.num_blocks if node.parent is not None else 1)

    def _compute(self, node: Node) -> None:
        known = self._known(node)
        if node.parent is None:
            known.append(self.root(self.scope_of(node)))
            return
        done = len(known) * self._tree.block_bytes
        parent = known[-1] if known else self._known(node.parent)[-1]
        known += self.beyond(parent, node.key[done:])

    def scope_of(self, node: Node) -> Scope:
        """Return the scope that a node is of."""
        root = node.holding(-1)
        return next(scope for scope, each in self._tree.roots.items() if each is root)


def digests_of(manager: CacheManager) -> Digests:
    """Return the digests that a manager was made with; raise `ConfigError` without."""
    digests = manager.kernel.watchers.find(Digests)
    if digests is not None:
        return digests
    raise ConfigError("the manager names no blocks: CacheManager(..., watchers=[Digests()])")

"""The nodes of the prefix tree, and the result of a lookup."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from quire.core.policy import Entry, Policy

NO_CHILDREN: dict[bytes, Node] = {}

FOREVER = float("inf")
"""Seconds that do not run out."""


class NodePart(msgspec.Struct, gc=False, eq=False):
    """A watcher's share of a node: made empty, and split, cut and joined as the node is."""

    def split(self, upper: Node, lower: Node) -> NodePart:
        """Return the part of `upper`, which took over the head of `lower`'s run; keep the rest."""
        raise NotImplementedError

    def cut(self, node: Node) -> None:
        """The node has lost its last blocks."""
        raise NotImplementedError

    def join(self, upper: Any, at: int) -> None:
        """The node has taken over the run above it, which ended at boundary `at` and whose part `upper` was."""
        raise NotImplementedError


class Owner(msgspec.Struct, eq=False):
    """A session, or a single request with a forecast, and the nodes that it alone has used.

    `nodes`     in the tree, by identity: those whose mark names it
    `num_open`  sequences of it that are not closed
    `due`       seconds: the time from which on nobody is expected to come back to them
    """

    nodes: dict[int, Node] = msgspec.field(default_factory=dict[int, "Node"])
    num_open: int = 0
    due: float = FOREVER


class Mark(msgspec.Struct, gc=False, eq=False):
    """The terms of a node that is not kept on ordinary ones.

    `keep_until`  end of its retention in seconds, 0 for none; `is_due`: the order looks at it again then
    `owner`       who alone has used it
    `policy`      the one that holds it, or held it last
    """

    priority: int = 0
    keep_until: float = 0.0
    owner: Owner | None = None
    policy: Policy | None = None
    is_due: bool = False


class Node(Entry, gc=False, eq=False):
    """A node of the prefix tree: a run of blocks, and the edge from its parent.

    `parent`     the node that the run continues
    `key`        token ids of the run, `block_size * 4` bytes per block
    `name`       those of its first block: its parent's `children` have it under them
    `blocks`     block ids per layer group, one array('i') each, as long as the run; with gaps
                 in a windowed group, empty in a recurrent one
    `parts`      data that each sparse group, and after them each watcher, keeps of the node
    `end`        blocks from the root to the end of this run
    `children`   by their `name`
    `locks`      references: sequences and pins at this node or below it (a root: sequences)
    `mark`       terms on which it is kept; None for the ordinary ones
    `writer`     row of the sequence that may lengthen this leaf without asking: the only reference is
                 its own, nothing hangs below, and the blocks are kept on its terms

    Invariants: locks >= sum(child.locks); end == parent.end + len(run); a node other than a
    root has at least one block. Cached means locks == 0. Nodes are invisible to the garbage
    collector, so a large tree costs it nothing; links are cleared when a node or the tree goes.
    A node therefore references nothing that leads back to its tree: that would keep both for ever.
    """

    key: bytearray = msgspec.field(default_factory=bytearray)
    name: bytes = b""
    blocks: tuple[array[int], ...] = ()
    parts: tuple[Any, ...] = ()
    parent: Node | None = None
    children: dict[bytes, Node] = NO_CHILDREN
    locks: int = 0
    mark: Mark | None = None
    writer: int | None = None

    @property
    def evictable(self) -> bool:
        return not self.locks and not self.children and self.parent is not None

    @property
    def start(self) -> int:
        """Blocks from the root to the start of this run."""
        return self.parent.end if self.parent is not None else 0

    @property
    def num_blocks(self) -> int:
        """Length of the run in blocks."""
        return self.end - self.parent.end if self.parent is not None else 0

    @property
    def priority(self) -> int:
        """Blocks of a higher one go later."""
        return self.mark.priority if self.mark is not None else 0

    @property
    def keep_until(self) -> float:
        """The end of its retention in seconds, 0 for none."""
        return self.mark.keep_until if self.mark is not None else 0.0

    def __repr__(self) -> str:
        return f"<Node blocks {self.start}-{self.end}, {self.locks} locks>"

    def holding(self, at: int) -> Node:
        """Return the node that has block `at` of the path to this one; the root for none."""
        node = self
        while node.parent is not None and at < node.parent.end:
            node = node.parent
        return node

    def path(self) -> list[Node]:
        """Return the nodes from below the root down to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes


class Match(msgspec.Struct, gc=False, eq=False):
    """The result of a lookup: `num_blocks` whole blocks, and maybe the head of one more.

    `node`            the deepest node that matches to its end; the root where none does
    `edge`            a child of `node` of which only the first `into` blocks match; may be None
    `refused`         matching blocks after these that a sparse group does not accept
    `partial_tokens`  of the next block of a prompt stand at the head of block `into` of `source`, to be copied
    """

    node: Node
    num_blocks: int
    edge: Node | None = None
    into: int = 0
    refused: int = 0
    partial_tokens: int = 0
    source: Node | None = None

    @property
    def last(self) -> Node:
        """The node in which the match ends: `edge`, or `node` where nothing of `edge` matches."""
        return self.edge if self.edge is not None and self.into else self.node

    def nodes(self) -> list[tuple[Node, int]]:
        """Return the nodes that match, from the root down, and how many blocks of each."""
        found = [(node, node.num_blocks) for node in self.node.path()]
        return [*found, (self.last, self.into)] if self.into else found

"""The nodes of the prefix tree: what is kept of a run of blocks, and where a lookup ended."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from quire.core.policies import Entry
from quire.core.tokens import TOKEN_BYTES

NO_CHILDREN: dict[bytes, Node] = {}

SPENT = -1.0
"""The outlook of a node that nobody is expected to come back to."""

PENDING = float("inf")
"""The outlook of a node whose request still runs; its hint counts from its end."""


class Part(msgspec.Struct, gc=False, eq=False):
    """What one sparse group keeps of a node.

    `guards`   sequences and pins that stand at the end of the node
    `guarded`  blocks of the part that those references protect
    `num_held` blocks of the part that are there
    `listed`   whether it stands among the parts that may have passing blocks
    `rank`     its eviction class, None while nothing of it can be evicted by itself
    """

    guards: int = 0
    guarded: int = 0
    num_held: int = 0
    listed: bool = False
    rank: tuple[bool, int] | None = None


class Node(Entry, gc=False, eq=False):
    """An edge of the tree: a run of blocks below `parent`, and the branches after it.

    `key`        token ids of the run, `block_size * 4` bytes per block
    `first`      those of its first block: its name among the children of its parent
    `blocks`     block ids per layer group, one array('i') each, as long as the run; with gaps
                 in a windowed group, empty in a recurrent one
    `parts`      what each sparse group keeps of the node
    `end`        blocks from the root to the end of this run
    `children`   by the bytes of their first block
    `by_token`   those bytes again, sorted, by first token; made when it is first needed
    `locks`      references: sequences and pins at this node or below it (a root: sequences)
    `pins`       how many of them are pins
    `grown`      whether blocks were stored here since it was last cached
    `spent_from` from when on nobody is expected to come back, see `hints.Sessions`
    `session`    the only session that has used it, None if there are others
    `used`       number of the last request that used it, 0 if nobody did
    `writer`     row of the sequence that may lengthen this leaf without asking: the only reference is
                 its own, nothing hangs below, and the blocks are kept on its terms
    `lost`       evicted continuations, by the boundary of this run where they went on
    `has_media`  whether tokens of it may stand for media
    `hashes`     digests of the first blocks, as far as they were computed

    Invariants: locks >= sum(child.locks); end == parent.end + len(run); a node other than a
    root has at least one block. Cached means locks == 0. Nodes are invisible to the garbage
    collector, so a large tree costs it nothing; links are cleared when a node or the tree goes.
    So a node references nothing that leads back to its tree: that would keep both for ever.
    """

    key: bytearray = msgspec.field(default_factory=bytearray)
    first: bytes = b""
    blocks: tuple[array[int], ...] = ()
    parts: tuple[Part, ...] = ()
    parent: Node | None = None
    children: dict[bytes, Node] = NO_CHILDREN
    by_token: dict[bytes, list[bytes]] | None = None
    locks: int = 0
    pins: int = 0
    grown: bool = True
    has_media: bool = False
    lost: dict[int, dict[int, Any]] | None = None
    hashes: list[bytes] | None = None
    priority: int = 0
    keep_until: float = 0.0
    spent_from: float = 0.0
    session: Any = None
    deadline: float = 0.0
    used: int = 0
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
    def num_tokens(self) -> int:
        return len(self.key) // TOKEN_BYTES

    @property
    def above(self) -> Node | None:
        parent = self.parent
        return parent if parent is not None and parent.parent is not None else None

    @property
    def num_below(self) -> int:
        return len(self.children)

    @property
    def below(self) -> Node | None:
        return self.children[next(reversed(self.children))] if self.children else None

    def __repr__(self) -> str:
        return f"<Node blocks {self.start}-{self.end}, {self.locks} locks>"

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
    """Where a lookup ended: `node` is the last whole edge, `edge` the one that was cut short.

    `into` bytes of `edge` match after `node`; `num_bytes` is the length of the whole match.
    """

    node: Node
    num_bytes: int
    edge: Node | None
    into: int

"""Prefixes of the tree that are worth storing in a tier, and the names of their blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items

import msgspec
import numpy as np

from quire.core.blocks import GAP
from quire.core.manager import CacheManager
from quire.core.node import Node
from quire.core.sequence import Sequence
from quire.core.tokens import INT32, IntArray
from quire.errors import SequenceError
from quire.exchange.digests import digests_of
from quire.exchange.spill import NamedBlock
from quire.media import MediaItem
from quire.scope import Scope


class Prefix(msgspec.Struct, frozen=True):
    """A cached text: what to open to find it, and the lengths in blocks at which hits can end.

    Where what is cached ends inside a media item, the tokens go on to the item's end.
    """

    tokens: IntArray
    scope: Scope
    media: list[MediaItem]
    ends: list[int]


def blocks_of(manager: CacheManager, seq: Sequence) -> list[NamedBlock]:
    """Return the published blocks of a sequence that a later hit may need, the head first.

    Of a windowed group these are the windows at the ends of nodes (branch points, ends), at
    the end of the prompt, and at multiples of the interval. Raises `SequenceError`.
    """
    if not isinstance(seq, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SequenceError(f"the blocks of a sequence, which open returns; got {seq!r}")
    manager.check_open(seq)
    stop = min((seq.prompt_len - 1) // manager.block_size, seq.node.end)
    found = _blocks(manager, seq.node.path(), (stop,))
    return sorted(found, key=lambda each: (each.index, each.group))


def all_blocks(manager: CacheManager) -> Iterator[NamedBlock]:
    """Iterate over all such blocks of a manager, each once, parents before their children."""
    return _blocks(manager, manager.kernel.tree.nodes(), ())


def prefixes(manager: CacheManager) -> list[Prefix]:
    """Return all cached texts, that of the leaf which would be evicted first at the front."""
    tree = manager.kernel.tree
    scopes = {id(root): scope for scope, root in tree.roots.items()}
    order = [node for node in tree.order.order() if not node.children]
    known = {id(node) for node in order}
    order += [node for node in tree.nodes() if not node.children and id(node) not in known]
    found: list[Prefix] = []
    for leaf in order:
        path = leaf.path()
        top = path[0].parent
        assert top is not None
        ends = {node.end for node in path}
        for node in path:
            for group in tree.sparse:
                ends.update(group.kept_ends(node))
        tokens, media = _text(manager, b"".join(node.key for node in path))
        found.append(Prefix(tokens, scopes[id(top)], media, sorted(ends)))
    return found


def _blocks(
    manager: CacheManager, nodes: Iterable[Node], stops: Items[int]
) -> Iterator[NamedBlock]:
    seen: set[tuple[int, int]] = set()
    for node in nodes:
        digests, start = digests_of(manager).of(node), node.start
        for group, _ in manager.kernel.tree.full:
            for at, block in enumerate(node.blocks[group]):
                yield NamedBlock(group, block, start + at, digests[at])
        for sparse in manager.kernel.tree.sparse:
            ends = [end for end in (*sparse.kept_ends(node), *stops) if start < end <= node.end]
            for at in sorted({at for end in ends for at in sparse.required(end)}):
                block = sparse.block_at(node, at)
                if block != GAP and (sparse.index, block) not in seen:
                    seen.add((sparse.index, block))
                    holder = node.holding(at)
                    digest = digests_of(manager).of(holder)[at - holder.start]
                    yield NamedBlock(sparse.index, block, at, digest)


def _text(manager: CacheManager, key: bytes) -> tuple[IntArray, list[MediaItem]]:
    """Return the tokens of a key with placeholders in place of media, and the media."""
    tokens: IntArray = np.frombuffer(key, INT32).copy()
    media: list[MediaItem] = []
    at = 0
    marks = np.flatnonzero(tokens < 0)
    for mark in marks.tolist():
        if mark < at:
            continue
        digest, placeholders = manager.kernel.tree.media.contents[int(tokens[mark])]
        span = np.frombuffer(placeholders, INT32)
        tokens = np.concatenate((tokens[:mark], span, tokens[mark + len(span) :]))
        media.append(MediaItem(digest, mark, len(span)))
        at = mark + len(span)
    return tokens, media

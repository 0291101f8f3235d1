"""Purging: all that is cached under some scopes leaves, and pins of theirs let go."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.manager import CacheManager
from quire.core.sequence import Sequence
from quire.interrupts import mutating
from quire.ops.dropping import below, drop_below
from quire.ops.pins import all_pins
from quire.scope import Scope

IsOwn = Callable[[Scope], bool]
"""Whether a scope is one of those that are purged."""


def sequences_of(manager: CacheManager, is_own: IsOwn) -> list[Sequence]:
    """Return the open and the suspended sequences of some scopes."""
    return [seq for seq in manager.sequences.values() if is_own(seq.scope)]


@mutating
def purge(manager: CacheManager, is_own: IsOwn) -> int:
    """Drop all that is cached under some scopes, and let go of its pins; return how many pins these were.

    What a sequence or a hold references stays: `num_held` counts it. Bytes in pools are the engine's to overwrite.
    """
    kernel, tree = manager.kernel, manager.kernel.tree
    own = {scope: root for scope, root in tree.roots.items() if is_own(scope)}
    tops = {id(root) for root in own.values()}
    kernel.holds.let_go_expired()
    pins = [pin for pin in all_pins(kernel) if id(pin.node.holding(-1)) in tops]
    for pin in pins:
        kernel.holds.let_go(pin)
    for scope, root in own.items():
        drop_below(kernel, root)
        if root is not manager.default_root and not root.children and not root.locks:
            tree.wide.pop(id(root), None)
            del tree.roots[scope]
    return len(pins)


def num_held(manager: CacheManager, is_own: IsOwn) -> int:
    """Return the blocks of full groups that are in the tree under some scopes."""
    roots = (root for scope, root in manager.kernel.tree.roots.items() if is_own(scope))
    return sum(node.num_blocks for root in roots for node in below(root))

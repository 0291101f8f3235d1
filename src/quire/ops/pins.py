"""Pins: prefixes that are kept whatever the pressure, within a budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Self

from quire.config import check_seconds
from quire.core.holds import Hold
from quire.core.kernel import Kernel
from quire.core.manager import CacheManager
from quire.core.node import FOREVER, Match, Node
from quire.core.room import room_left
from quire.core.terms import check_timed
from quire.core.tokens import TOKEN_BYTES, IntArray, TokenIds, array_of
from quire.errors import PinBudgetExceeded, PinError
from quire.interrupts import mutating
from quire.media import MediaItem
from quire.scope import Scope

MEND = "close pins or raise pin_budget"


class Pin(Hold):
    """A cached prefix of `num_tokens` tokens that is not evicted until the pin is closed.

    `num_missing`  tokens of the prompt after them that are not pinned: not cached, or in no whole block

    Closed once, by `close` or at the end of a `with` block; twice raises `PinError`. A pin
    with a time to live counts as closed once that has run out, and may be closed then too.
    """

    def __init__(self, manager: CacheManager, node: Node, due: float, num_asked: int) -> None:
        super().__init__(node, due)
        self._manager = manager
        self.num_tokens = node.end * manager.block_size
        self.num_missing = num_asked - self.num_tokens
        self.open = True

    @property
    def is_held(self) -> bool:
        """Whether it keeps its prefix still: not closed, nor let go with its time, nor with the manager."""
        if self._manager.interrupted or id(self) not in self._manager.kernel.holds.all:
            return False
        return self.due == FOREVER or self._manager.kernel.tree.order.now() < self.due

    @property
    def counts(self) -> dict[str, int]:
        """The tokens of the prompt that are pinned and those that are not, as plain data."""
        return {"num_tokens": self.num_tokens, "missing_tokens": self.num_missing}

    @property
    def tokens(self) -> IntArray:
        """The pinned tokens, int32, as a copy; empty once let go. Media are negative numbers."""
        path = self.node.path() if self.is_held else []
        return array_of(b"".join(node.key for node in path))

    @property
    def cut_off(self) -> Callable[[str, BaseException], None]:
        """The manager's handler for an exception, other than a refusal, that leaves `close`."""
        return self._manager.cut_off

    @mutating
    def close(self) -> None:
        """Let go of the prefix: it is ordinary cached blocks again."""
        if not self.open:
            raise PinError(f"{self!r} was closed already; a pin is closed once")
        if not self._manager.interrupted:
            self._manager.kernel.holds.let_go(self)
        self.open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        asked = self.num_tokens + self.num_missing
        return f"<Pin {self.num_tokens} of {asked} tokens, {'open' if self.open else 'closed'}>"


@mutating
def pin(
    manager: CacheManager,
    tokens: TokenIds,
    scope: Scope | None = None,
    *,
    media: Items[MediaItem] = (),
    ttl_s: float | None = None,
) -> Pin:
    """Keep the cached whole blocks of these tokens until the pin is closed.

    `num_tokens` and `num_missing` of the pin say how many these are, maybe none: a `PrefixCache` and an `Engine` keep theirs
    under the scope of their model (`PrefixCache.pin`, `Engine.scope`). The last token may be part of it, unlike in `open`. `ttl_s` closes the pin after so
    many seconds. Pins hold at most the share `pin_budget` of the smallest full group's blocks; in a sparse group, the
    windows or states at the ends of all pins take no more than that share of it. Raises `PinBudgetExceeded`,
    `ConfigError` and what `probe` raises.
    """
    seconds, kernel = check_seconds("ttl_s", ttl_s), manager.kernel
    check_timed(manager.settings.clock, ttl_s=ttl_s)
    root, key = manager.read_whole(tokens, scope, media)
    tree = kernel.tree
    found = kernel.lookup.lowered(tree.match(root, key, len(key) - len(key) % tree.block_bytes))
    due = tree.order.now() + seconds if seconds else FOREVER
    _check_budget(manager, found)
    kernel.holds.let_go_expired()
    made = Pin(manager, tree.cut(found.last, found.num_blocks), due, len(key) // TOKEN_BYTES)
    kernel.holds.add(made)
    return made


def block_states(manager: CacheManager) -> list[dict[str, int]]:
    """Return the blocks of each layer group by state: free, active, pinned or cached; they sum to the pool's size.

    `active`  requests, restores and holds use them
    `pinned`  nobody but pins keeps them
    `cached`  can be evicted, those of pins whose time is over among them
    """
    kernel = manager.kernel
    expired = Counter(hold.node for hold in kernel.holds.expired())
    kept = expired + Counter(pin.node for pin in _lasting(kernel))
    rooms = room_left(kernel, None, expired), room_left(kernel, None, kept)
    return [
        {
            "free": pool.num_free,
            "active": pool.num_blocks - most,
            "pinned": most - room,
            "cached": room - pool.num_free,
        }
        for pool, room, most in zip(manager.pools, *rooms, strict=True)
    ]


def all_pins(kernel: Kernel) -> list[Pin]:
    """Return the pins that hold their paths still, those whose time has run out among them."""
    return [hold for hold in kernel.holds.all.values() if isinstance(hold, Pin)]


def pinned_nodes(pins: Items[Pin]) -> dict[Node, int]:
    """Return the nodes that some pins hold, and how many of them each."""
    return Counter(node for pin in pins for node in pin.node.path())


def pin_budget(manager: CacheManager) -> int:
    """Return the blocks that pins may hold of a full group."""
    smallest = min((pool.num_blocks for _, pool in manager.kernel.tree.full), default=0)
    return int(manager.settings.pin_budget * smallest)


def check_pins(manager: CacheManager, sizes: Items[int]) -> None:
    """Raise `PinBudgetExceeded` if pools of these sizes could not hold the pins there are."""
    tree, share, pins = manager.kernel.tree, manager.settings.pin_budget, _lasting(manager.kernel)
    num_pinned = sum(node.num_blocks for node in pinned_nodes(pins))
    for group, pool in tree.full:
        if num_pinned > int(share * sizes[group]):
            allowed = f"{sizes[group]} allow {int(share * sizes[group])}"
            what = f"{num_pinned} blocks are pinned, {allowed}"
            raise pool.shortage(what, num_pinned, "close pins", PinBudgetExceeded)
    _check_reach(manager, pins, 0, sizes)


def _check_budget(manager: CacheManager, found: Match) -> None:
    """Raise `PinBudgetExceeded` if one more pin would be too much."""
    tree, pins = manager.kernel.tree, _lasting(manager.kernel)
    sizes = [pool.num_blocks for pool in manager.pools]
    _check_reach(manager, pins, found.num_blocks, sizes)
    nodes = pinned_nodes(pins)
    num_pinned = sum(node.num_blocks for node in nodes)
    wanted = num_pinned + sum(count for node, count in found.nodes() if node not in nodes)
    budget = pin_budget(manager)
    if tree.full and wanted > budget:
        what = (
            f"pinning {found.num_blocks * manager.block_size} tokens would make {wanted} pinned blocks, "
            f"the budget is {budget} and {num_pinned} are pinned"
        )
        raise tree.full[0][1].shortage(what, wanted, MEND, PinBudgetExceeded)


def _check_reach(manager: CacheManager, pins: Items[Pin], end: int, sizes: Items[int]) -> None:
    """Raise `PinBudgetExceeded` if these pins and one more, of `end` blocks, need too much of a sparse group."""
    for group in manager.kernel.tree.sparse:
        wanted = sum(group.reach(pin.node.end) for pin in pins) + group.reach(end)
        budget = int(manager.settings.pin_budget * sizes[group.index])
        if wanted > budget:
            what = (
                f"pinning {end} blocks would make pins hold {wanted} blocks of group {group.index}"
                f", the budget is {budget}"
            )
            raise group.pool.shortage(what, wanted, MEND, PinBudgetExceeded)


def _lasting(kernel: Kernel) -> list[Pin]:
    """Return the pins whose time has not run out."""
    expired = kernel.holds.expired()
    return [pin for pin in all_pins(kernel) if pin not in expired]

"""Blocks that are copied beside their owner: held where they are until that is done."""

from collections.abc import Callable

from quire.core import CacheManager
from quire.core import Sequence as Running
from quire.core.node import Node
from quire.exchange import hold
from quire.tiers.stack.feeding import Fed
from quire.tiers.stack.stack import TierStack

PUT_OFF_SHARE = 0.5
"""What waits to be copied holds at most about this share of the pools."""


class Beside:
    """Work that hands blocks down beside the thread of a manager, and the holds on them meanwhile."""

    def __init__(self, manager: CacheManager, stack: TierStack) -> None:
        self._manager = manager
        self._stack = stack
        self._held: dict[Fed, tuple[Node, Callable[[], None]]] = {}

    def hold(self, seq: Running, fed: Fed) -> None:
        """Keep what a sequence has published where it is until this is done and let go."""
        self._held[fed] = seq.node, hold(self._manager, seq)

    def settle(self) -> None:
        """Wait until everything is copied, and let it go."""
        if self._held:
            self._stack.feeding.catch_up()
        for fed in list(self._held):
            fed.wait()
            self._let_go(fed)

    def settle_for(self, num_blocks: int, node: Node | None = None) -> None:
        """Let go of what is copied; wait for more until every pool has so many blocks, as far as it can.

        And for what ends at this node of the tree: one that is held is not lengthened. Where there is no
        time for it nobody waits: what is not copied is passed over.
        """
        for fed, (held, _) in list(self._held.items()):
            if fed.is_over or held is node:
                self._finish(fed)
        groups = self._manager.pools
        while self._held and any(pool.num_available < num_blocks for pool in groups):
            self._finish(next(iter(self._held)))

    def _finish(self, fed: Fed) -> None:
        self._stack.feeding.finish(fed)
        self._let_go(fed)

    def _let_go(self, fed: Fed) -> None:
        _, release = self._held.pop(fed)
        release()
        if fed.error is not None:
            raise fed.error

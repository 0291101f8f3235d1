"""Blocks that a background thread copies for tiers: held in the pools until that is done."""

from collections.abc import Callable

from quire.core import CacheManager
from quire.core import Sequence as Running
from quire.core.node import Node
from quire.exchange import hold
from quire.tiers.stack.background_writer import FeedJob
from quire.tiers.stack.stack import TierStack

PUT_OFF_SHARE = 0.5
"""What waits to be copied holds at most about this share of the pools."""


class Offloading:
    """Jobs that hand blocks down in a background thread, and the holds on these blocks until they are copied."""

    def __init__(self, manager: CacheManager, stack: TierStack) -> None:
        self._manager = manager
        self._stack = stack
        self._held: dict[FeedJob, tuple[Node, Callable[[], None]]] = {}

    @property
    def is_settled(self) -> bool:
        """Whether no block is held."""
        return not self._held

    def hold(self, seq: Running, job: FeedJob) -> None:
        """Hold what a sequence has published in the pools until this job is done."""
        self._held[job] = seq.node, hold(self._manager, seq)

    def settle(self) -> None:
        """Wait until everything is copied, and let it go."""
        if self._held:
            self._stack.feeding.catch_up()
        for job in list(self._held):
            job.wait()
            self._let_go(job)

    def recover(self) -> None:
        """Finish all copies that were begun, after a call was cut off.

        The blocks are intact, held or not: none has been written to since.
        """
        self._stack.feeding.catch_up()
        self.settle()

    def settle_for(self, num_blocks: int, node: Node | None = None) -> None:
        """Release copied blocks; wait for copies until every pool has `num_blocks` available, if possible.

        Waits for jobs that hold `node` too: a node that is held cannot be lengthened. When the budget of time is spent,
        it does not wait: a job that has not begun is passed over.
        """
        for job, (held, _) in list(self._held.items()):
            if job.is_over or held is node:
                self._finish(job)
        groups = self._manager.pools
        while self._held and any(pool.num_available < num_blocks for pool in groups):
            self._finish(next(iter(self._held)))

    def _finish(self, job: FeedJob) -> None:
        self._stack.feeding.finish(job)
        self._let_go(job)

    def _let_go(self, job: FeedJob) -> None:
        _, release = self._held.pop(job)
        release()
        if job.error is not None:
            raise job.error

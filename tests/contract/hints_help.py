"""What the contract tests of hints share: managers, a clock, and how many blocks are foreseen."""

from core_help import found, run, serve

from quire import ops
from quire.core import CacheManager, Hint

BLOCK = 4
NEVER = Hint("never")
RIVAL = run(900_000, BLOCK)


class Clock:
    """Time that a test owns."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make(policy, num_blocks=32, **options):
    """Return a manager of blocks of four tokens that shares whole blocks only."""
    options.setdefault("sub_block", False)
    return CacheManager(num_blocks=num_blocks, block_size=BLOCK, policy=policy, **options)


def blocks(start, num_blocks):
    """Return a prompt of so many whole blocks."""
    return run(start, num_blocks * BLOCK)


def turn(manager, tokens, **options):
    """Serve whole blocks and one token more, so that the next turn can find all of these blocks."""
    serve(manager, [*tokens, 7], **options)


def hinted(session_id, **options):
    """Return a hint that names a session."""
    return Hint(session_id=session_id, **options)


def foreseen(manager):
    """Evict what goes before an ordinary block of the lowest priority; return how many blocks.

    Whatever the policy, these are the ones that nobody is expected to come back to.
    """
    serve(manager, RIVAL, priority=-100)
    ops.check(manager)
    for count in range(manager.num_cached):
        assert manager.reclaim(1) == 1
        ops.check(manager)
        if not found(manager, RIVAL):
            return count
    raise AssertionError("the rival was not cached")

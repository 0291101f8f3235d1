"""Helpers of the contract tests of hints: managers, a clock, forecasts, and counts of forecast blocks."""

import pytest
from core_help import found, prefill, run, serve

from clocks import Clock
from quire import ops
from quire.core import CacheManager, Hint

BLOCK = 4
NEVER = Hint("never")
A, B, C = (Hint("session", session_id=name) for name in "abc")
RIVAL = run(900_000, BLOCK)


def blocks(start, num_blocks):
    """Return a prompt of so many whole blocks."""
    return run(start, num_blocks * BLOCK)


def turn(manager, tokens, **options):
    """Serve whole blocks and one token more, so that the next turn can find all of these blocks."""
    serve(manager, [*tokens, 7], **options)


def talk(manager, session, start, turns, system):
    """Serve the turns of a session, each a block longer than the one before; return the last prompt."""
    prompt = list(system)
    for number in range(turns):
        prompt += blocks(start + 100 * number, 1).tolist()
        turn(manager, prompt, hint=session)
        ops.check(manager)
    return prompt


def foreseen(manager):
    """Evict what goes before an ordinary block of the lowest priority; return how many blocks.

    Whatever the policy, these are the ones that nobody is expected to come back to.
    """
    serve(manager, RIVAL, priority=-100)
    ops.check(manager)
    for count in range(manager.num_cached):
        assert ops.reclaim(manager, 1) == 1
        ops.check(manager)
        if not found(manager, RIVAL):
            return count
    raise AssertionError("the rival was not cached")


class Forecast:
    """A way to say that nobody comes back: at open, by the end of a session, by its end while the request runs."""

    def __init__(self, kind):
        self.kind = kind
        self.hint = NEVER if kind == "never" else A

    def close(self, manager, *seqs):
        """Close requests, and let what was foreseen of them come true."""
        if self.kind == "a session that ended before":
            manager.end_session("a")
        for seq in seqs:
            ops.check(manager)
            manager.close(seq)
        if self.kind == "a session":
            manager.end_session("a")

    def serve(self, manager, tokens, scope=None, **options):
        """Serve a request of which it is foreseen."""
        self.close(manager, prefill(manager, tokens, scope, hint=self.hint, **options))


@pytest.fixture(params=["lru", "lfu", "learned"])
def make(request):
    """Return what makes managers of blocks of four tokens that share whole blocks only."""

    def made(num_blocks=32, **options):
        options = {"sub_block": False, **options}
        return CacheManager(num_blocks, BLOCK, policy=request.param, **options)

    return made


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(params=["never", "a session", "a session that ended before"])
def forecast(request):
    return Forecast(request.param)

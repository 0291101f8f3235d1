"""Helpers of the contract tests of the policy interface: policies that record their calls."""

from quire import ops
from quire.core import CacheManager
from quire.core.policies import Lru
from quire.foresight.ranked import Fifo

BLOCK = 4
ALL = 10**6


class Spy:
    """Writes down every call that it gets, and what the entry looked like then."""

    def __init__(self, tick, capacity):
        super().__init__(tick, capacity)
        self.calls = []

    def note(self, name, entry, *more):
        self.calls.append((name, entry, entry.num_blocks, *more))

    def touched(self, entry):
        self.note("touched", entry)
        super().touched(entry)

    def released(self, entry):
        self.note("released", entry)
        super().released(entry)

    def returned(self, entry):
        self.note("returned", entry)
        super().returned(entry)

    def referenced(self, entry):
        self.note("referenced", entry)
        super().referenced(entry)

    def exposed(self, entry):
        self.note("exposed", entry)
        super().exposed(entry)

    def split(self, upper, lower):
        self.note("split", lower, upper)
        super().split(upper, lower)


class SpyingLru(Spy, Lru):
    """Least recently used, spied on."""


class SpyingRanked(Spy, Fifo):
    """First in, first out by the heap, spied on."""


class Spied:
    """A manager and the policy objects that it made, all writing into one list."""

    def __init__(self, kind, num_blocks=32, **options):
        self.calls = []
        self.policies = []
        self.kind = kind
        options.setdefault("sub_block", False)
        if "groups" not in options:
            options["num_blocks"] = num_blocks
        self.manager = CacheManager(block_size=BLOCK, policy=self.policy, **options)
        self.calls.clear()

    def policy(self, tick, capacity):
        policy = self.kind(tick, capacity)
        policy.calls = self.calls
        self.policies.append(policy)
        return policy

    def take(self):
        """Return the calls since the last time, with what `check` asked left out."""
        calls = self.calls[:]
        self.calls.clear()
        return calls

    def check(self):
        """Verify all invariants, unseen."""
        calls = self.calls[:]
        ops.check(self.manager)
        self.calls[:] = calls


def names_of(calls, *wanted):
    """Return the names of the calls, or those among `wanted`."""
    return [call[0] for call in calls if not wanted or call[0] in wanted]


def ends(calls, wanted):
    """Return where the entries of these calls end, in blocks."""
    return [call[1].end for call in calls if call[0] == wanted]

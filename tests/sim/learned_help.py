"""Helpers of the tests of the policy `learned`: a cache that orders its blocks by it."""

import numpy as np

from quire import ops
from quire.core import CacheManager
from quire.foresight import Learned
from quire.foresight.learned_state import LearnedState
from watching import watchers

TOKENS_PER_BLOCK = 64


class LearnedCache:
    """A manager with the policy, a clock, and prompts of one-token blocks."""

    def __init__(self, capacity, policy=None):
        self.now = 0.0
        self.learned = Learned(lambda: LearnedState(apprentice=0))
        self.manager = CacheManager(
            capacity + 1,
            1,
            watchers=watchers(),
            policy=policy or self.learned,
            sub_block=False,
            clock=lambda: self.now,
        )
        self._fresh = 10**6
        self._num_served = 0
        self.has_learned = policy is None

    @property
    def mind(self):
        """Return what the policy knows."""
        return self.learned.mind

    def names(self, count):
        """Return so many tokens that nobody has used."""
        self._fresh += count
        return list(range(self._fresh - count, self._fresh))

    def open(self, prompt, after=2**31 - 1, **options):
        """Open a request for a prompt and one more token, `after`, and compute the prompt."""
        manager = self.manager
        seq = manager.open(np.array([*prompt, after], np.int32), **options)
        rest = prompt[seq.num_cached :]
        if rest:
            manager.reserve(seq, len(rest) + 1)
            manager.commit(seq, np.array(rest, np.int32))
        ops.admit(manager, seq)  # where all of it was found
        if self.has_learned:
            walk = self.learned.walk_of(seq)
            walk.prompt, walk.block_size = len(prompt) * TOKENS_PER_BLOCK, TOKENS_PER_BLOCK
        return seq

    def serve(self, prompt, answer=(), **options):
        """Serve a whole request; return the record that it left, None without any blocks."""
        seq = self.open(prompt, *answer[:1], **options)
        if answer:
            self.manager.reserve(seq, len(answer))
            self.manager.commit(seq, np.array(answer, np.int32))
        walk = self.learned.walk_of(seq) if self.has_learned else None
        self.manager.close(seq)
        self._num_served += 1
        if (
            self._num_served < 100 or self._num_served % 16 == 0
        ):  # a check takes as long as many requests
            ops.check(self.manager)
        return walk.record if walk is not None else None

    def found(self, prompt):
        """Return how many blocks of a prompt are cached."""
        return self.manager.probe(np.array([*prompt, 2**31 - 1], np.int32)).num_tokens

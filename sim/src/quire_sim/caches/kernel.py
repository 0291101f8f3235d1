"""The cache of `quire serve`: quire's own manager."""

from __future__ import annotations

from quire import Scope
from quire.core import CacheManager, Sequence
from quire.core.tokens import common_prefix
from quire.errors import OutOfBlocks
from quire_sim.caches.asking import CacheHit
from quire_sim.caches.prompts import CachePrompt
from quire_sim.caches.tracking import TrackedCache

UNLIMITED_BLOCKS = 1 << 24


class KernelCache(TrackedCache):
    """A `CacheManager` with the engine's order of calls.

    A prompt's blocks are reserved when it starts and found once it is computed. A request whose next blocks another
    one computes waits for it.
    """

    def __init__(self, num_blocks: int | None = None, block_size: int = 16) -> None:
        super().__init__()
        self._now = 0.0
        self.manager = CacheManager(
            num_blocks or UNLIMITED_BLOCKS, block_size, clock=lambda: self._now
        )
        self._running: dict[int, Sequence] = {}

    def start(self, number: int, prompt: CachePrompt, now: float) -> CacheHit | None:
        """Open a prompt and reserve its blocks."""
        self._now = now
        manager, scope = self.manager, _scope(prompt)
        if self._has_leader(prompt):
            return None
        try:
            seq = manager.open(prompt.tokens, scope)
        except OutOfBlocks:  # larger than the pool: the server refuses it
            return self._hit(number, prompt, 0, self.manager.block_size, now)
        hit = min(seq.num_cached, prompt.size)
        try:
            manager.reserve(seq, prompt.size - hit)
        except OutOfBlocks:
            manager.close(seq)
            return (
                None
                if self._running
                else self._hit(number, prompt, 0, self.manager.block_size, now)
            )
        manager.take_copies()
        self._running[number] = seq
        return self._hit(number, prompt, hit, self.manager.block_size, now)

    def computed(self, number: int, now: float) -> None:
        """Publish the blocks of a prompt."""
        self._now = now
        prompt = self._computed(number)
        if prompt is not None and (seq := self._running.get(number)) is not None:
            self.manager.commit(seq, prompt.tokens[seq.num_cached :])

    def end(self, number: int, now: float) -> None:
        """Publish the blocks of an answer, and close its sequence."""
        self._now = now
        prompt, seq = self._ended(number, now), self._running.pop(number, None)
        if seq is None:
            return
        made = prompt.output[:-1]
        try:
            if len(made):
                self.manager.reserve(seq, len(made))
                self.manager.take_copies()
                self.manager.commit(seq, made)
        except OutOfBlocks:  # the server would preempt somebody
            pass
        self.manager.close(seq)

    def _has_leader(self, prompt: CachePrompt) -> bool:
        """Whether another request computes blocks that this one would compute again."""
        size, end = self.manager.block_size, 0
        for number in self._nodes:
            other = self._prompts[number]
            if (other.model, other.scope) == (
                prompt.model,
                prompt.scope,
            ) and number in self._running:
                limit = min(other.size, prompt.size)
                same = common_prefix(
                    prompt.tokens[:limit].tobytes(), other.tokens[:limit].tobytes()
                )
                end = max(end, same // size * size)
        return end > 0 and self.manager.probe(prompt.tokens, _scope(prompt)).num_tokens < end


def _scope(prompt: CachePrompt) -> Scope:
    return Scope(salt=prompt.scope or None, model=prompt.model or None)

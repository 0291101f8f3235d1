"""The cache of `quire serve`: quire's own manager."""

from __future__ import annotations

from quire import Scope, ops
from quire.core import CacheManager, Sequence
from quire.core.tokens import common_prefix
from quire.errors import OutOfBlocks
from quire.scheduling import Limits
from quire_sim.caches.asking import CacheHit
from quire_sim.caches.prompts import CachePrompt
from quire_sim.caches.tracking import TrackedCache

UNLIMITED_BLOCKS = 1 << 24

WATERMARK = Limits().watermark


class KernelCache(TrackedCache):
    """A `CacheManager` with the engine's order of calls.

    A prompt's blocks are reserved when it starts and found once it is computed. A request whose next blocks another
    one computes waits for it.
    """

    has_order = False

    def __init__(self, num_blocks: int | None = None, block_size: int = 16) -> None:
        super().__init__()
        self._now = 0.0
        self.manager = CacheManager(
            num_blocks or UNLIMITED_BLOCKS, block_size, clock=lambda: self._now
        )
        self._running: dict[int, Sequence] = {}
        self._opened: dict[int, Sequence] = {}

    def start(self, number: int, prompt: CachePrompt, now: float) -> CacheHit | None:
        """Open a prompt."""
        self._now = now
        manager, scope = self.manager, _scope(prompt)
        if self._has_leader(prompt) or (self._running and self._lacks(prompt, scope)):
            return None
        try:
            seq = manager.open(prompt.tokens, scope)
        except OutOfBlocks:  # larger than the pool: the server refuses it
            return self._hit(number, prompt, 0, self.manager.block_size, now)
        self._running[number] = self._opened[number] = seq
        hit = min(seq.num_cached, prompt.size)
        return self._hit(number, prompt, hit, self.manager.block_size, now)

    def step(self, now: float) -> None:
        """Reserve the blocks of prompts that started; none is evicted before all have found theirs."""
        self._now = now
        for number, seq in self._opened.items():
            try:
                self.manager.reserve(seq, self._prompts[number].size - seq.num_cached)
            except OutOfBlocks:  # the server computes it in parts, as blocks become free
                self.manager.close(self._running.pop(number))
        self._opened.clear()
        self.manager.take_copies()

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

    def _lacks(self, prompt: CachePrompt, scope: Scope) -> bool:
        """Whether a prompt has no room beside the blocks that an admission leaves free."""
        fit = ops.fits(self.manager, prompt.tokens, None, scope)
        spare = max(1, int(WATERMARK * self.manager.pools[0].num_blocks))
        promised = (
            self._prompts[number].size - seq.capacity for number, seq in self._opened.items()
        )
        spare += sum(-(-tokens // self.manager.block_size) for tokens in promised)
        return fit.needed[0] + spare > fit.room[0]

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

"""The cache of llama-server: slots that hold one prompt each, and whole states in host memory.

Read from `tools/server` of llama.cpp b11434 (`server-context.cpp`, `server-task.cpp`), for models without windows or
recurrent states.
"""

from __future__ import annotations

import numpy as np

from quire.core.tokens import TOKEN_BYTES, common_prefix
from quire_sim.caches.asking import CacheHit
from quire_sim.caches.prompts import CachePrompt
from quire_sim.caches.tracking import TrackedCache

SIMILARITY = np.float32(0.1)
"""Share of a prompt that a slot has at least to be chosen for it (`--slot-prompt-similarity`)."""

LOST = np.float32(0.5)
"""Below this share of a slot's tokens that stay, its state is saved first."""

LEAST_KEPT = np.float32(0.25)
"""Share of a saved state that a prompt must keep for the state to be loaded."""


class _Slot:
    """A slot: its tokens, whether a request uses it, and when the last one ended."""

    def __init__(self) -> None:
        self.key = b""
        self.is_busy = False
        self.used = -1


class PromptSlots(TrackedCache):
    """Slots, chosen by similarity or last use, over a queue of saved states.

    A request takes the idle slot that has most of its prompt, if that is more than a tenth of it; otherwise the one
    unused for longest. If it would lose more than half of the slot's tokens, the state is saved, and a better one
    loaded. When a request starts, other idle slots are saved and cleared.
    """

    has_steps = False

    def __init__(
        self,
        num_tokens: int | None = None,
        num_slots: int = 4,
        *,
        is_unified: bool = True,
    ) -> None:
        super().__init__()
        self._limit = num_tokens
        self._is_unified = is_unified
        self._slots = [_Slot() for _ in range(num_slots)]
        self._states: list[bytes] = []
        self._using: dict[int, _Slot] = {}
        self._clock = 0

    def start(self, number: int, prompt: CachePrompt, now: float) -> CacheHit | None:
        """Choose a slot, and save and clear the other idle ones."""
        key = prompt.tokens.tobytes()
        longest = max(
            (common_prefix(each, key) for each in [*(s.key for s in self._slots), *self._states]),
            default=0,
        )
        slot = self._choose(key)
        if slot is None:
            return None
        hit = min(common_prefix(slot.key, key), prompt.size - 1)
        slot.key, slot.is_busy = key, True
        self._using[number] = slot
        if self._limit != 0:
            for each in self._slots:
                if not each.is_busy:
                    self._save(each.key)
                    each.key = b"" if self._is_unified else each.key
        found = self._hit(number, prompt, hit, 1)
        if found.why in {"evicted", "at-once"} and longest > hit:
            found.why = "other-slot"
        return found

    def computed(self, number: int, now: float) -> None:
        """Note that a prompt is computed."""
        self._computed(number)

    def end(self, number: int, now: float) -> None:
        """Release a slot: it keeps the prompt, and the answer but for its last token."""
        prompt, slot = self._ended(number), self._using.pop(number)
        self._clock += 1
        slot.key += prompt.output[:-1].tobytes()
        slot.is_busy, slot.used = False, self._clock

    def _choose(self, key: bytes) -> _Slot | None:
        chosen, similar = None, np.float32(0)
        size = len(key) // TOKEN_BYTES
        for slot in self._slots:
            if slot.is_busy or not slot.key:
                continue
            share = np.float32(common_prefix(slot.key, key)) / np.float32(size)
            if share > similar and share > SIMILARITY:
                chosen, similar = slot, share
        is_saved = chosen is not None and _share(similar * np.float32(size), chosen.key) < LOST
        if chosen is None:
            idle = [slot for slot in self._slots if not slot.is_busy]
            if not idle:
                return None
            used = min(slot.used for slot in idle)
            chosen, is_saved = next(slot for slot in idle[::-1] if slot.used == used), True
        if is_saved and self._limit != 0:
            self._save(chosen.key)
            self._load(chosen, key)
        return chosen

    def _save(self, key: bytes) -> None:
        """Save the state of a slot, unless a saved one begins with all of it."""
        if not key or any(state.startswith(key) for state in self._states):
            return
        size = len(key) // TOKEN_BYTES
        if self._limit is not None and size > self._limit:
            return
        self._states = [state for state in self._states if not key.startswith(state)]
        if self._limit is not None:
            kept = sum(map(len, self._states)) // TOKEN_BYTES
            while self._states and kept + size > self._limit:
                kept -= len(self._states.pop(0)) // TOKEN_BYTES
        self._states.append(key)

    def _load(self, slot: _Slot, key: bytes) -> None:
        """Move a saved state into a slot if it keeps more of itself and has more of the prompt."""
        size = np.float32(len(key) // TOKEN_BYTES)
        same = common_prefix(slot.key, key)
        kept = _share(np.float32(same), slot.key) if slot.key else np.float32(-1)
        similar, best = np.float32(same) / size, None
        for place, state in enumerate(self._states):
            same = common_prefix(state, key)
            share = _share(np.float32(same), state)
            if share < LEAST_KEPT:
                continue
            if kept < share and similar < np.float32(same) / size:
                kept, similar, best = share, np.float32(same) / size, place
        if best is not None:
            slot.key = self._states.pop(best)


def _share(tokens: np.float32, key: bytes) -> np.float32:
    return tokens / np.float32(len(key) // TOKEN_BYTES)

"""The search for a prompt in the tiers: its blocks there, and the longest hit that they allow."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import numpy as np

from quire.core import CacheManager, FullAttention, MediaItem, Scope
from quire.core.tokens import IntArray
from quire.engines.tiered.parts import BlockPart
from quire.exchange import Residency, required_blocks
from quire.groups import Recurrent

FIRST_LOOK = 32
"""Blocks of a windowed or recurrent group that are asked for at a time, from the end; then twice as many."""


class Prompt(NamedTuple):
    """The text of a request, whose it is, and the media in it."""

    tokens: IntArray
    scope: Scope | None
    media: tuple[MediaItem, ...]


class Search:
    """Finds the blocks of a prompt in the tiers, beside those that the device holds.

    prompt           |== device ==|== tiers ==|= nobody has it =|
    full groups       b  b  b  b   t  t  t  t  -  -  -              asked in order, up to a hole
    other groups                        t  t                        asked for what a hit there needs

    Groups must agree, as in a lookup on the device: the boundary is lowered until no group objects.
    Asks the tiers for as little as it can, at least one token being left; nothing is loaded. `end` is
    the best boundary in blocks, and `here.accepted` where nothing can be gained.

    `find`  `TierStack.find`, with what it is to leave out
    """

    def __init__(
        self,
        manager: CacheManager,
        parts: Sequence[BlockPart],
        prompt: Prompt,
        here: Residency,
        find: Callable[..., list[int]],
    ) -> None:
        self.prompt = prompt
        self.here = here
        self._manager = manager
        self._find = find
        self._parts = parts
        self._levels: dict[tuple[int, int], int] = {}
        self._looks = [FIRST_LOOK] * len(parts)
        kinds = [group.kind for group in manager.settings.groups]
        self.full = [g for g, kind in enumerate(kinds) if isinstance(kind, FullAttention)]
        self._sparse = [g for g in range(len(kinds)) if g not in self.full]
        self._states = [g for g, kind in enumerate(kinds) if isinstance(kind, Recurrent)]
        self.end = self._agreed(self._full_end(most_blocks(manager, prompt)))

    @property
    def is_full(self) -> bool:
        """Whether there are groups of full attention only, so that any shorter prefix is of use."""
        return not self._sparse

    def brought(self, end: int) -> dict[int, list[int]]:
        """Return the gaps of each group: the blocks that must come for a hit of `end` blocks."""
        held = self.here.held
        return {
            group: [
                at
                for at in required_blocks(self._manager, group, end)
                if at >= self.here.matched or not held[group][at]
            ]
            for group in range(len(self._parts))
        }

    def keys(self, group: int, places: Sequence[int]) -> list[bytes]:
        """Return the keys of blocks of a group."""
        return [self._parts[group].key(self.here.digests[at]) for at in places]

    def lacking(self, end: int) -> tuple[list[bytes], list[int], list[int]]:
        """Return keys, levels and record sizes of what a hit of `end` blocks lacks, block by block.

        The head first, the groups of a place side by side; levels as `TierStack.find` returns them.
        """
        brought = self.brought(end)
        blocks = sorted((at, group) for group, places in brought.items() for at in places)
        return (
            [self._parts[group].key(self.here.digests[at]) for at, group in blocks],
            [self._levels.get((group, at), -1) for at, group in blocks],
            [self._parts[group].record_bytes for _, group in blocks],
        )

    def by_tier(self, end: int, names: Sequence[str]) -> dict[str, int]:
        """Count the tokens that a boundary gains by tier: the slowest group of each place decides."""
        here, size = self.here, self._manager.block_size
        if end <= here.accepted:
            return {}
        slowest = np.full(end, -1)
        for group, places in self.brought(end).items():
            for at in places:
                slowest[at] = max(slowest[at], self._levels.get((group, at), -1))
        gained = slowest[here.accepted :]
        gained[gained < 0] = slowest.max()  # on the device, but of no use without what came
        counts = Counter[int](gained.tolist())
        return {names[level]: size * counts[level] for level in sorted(counts)}

    def whole(self, end: int, came: Container[bytes]) -> int:
        """Return the largest boundary up to `end` for which all that it needs has come, by key."""
        while end > self.here.accepted:
            missing = [
                (group, at)
                for group, places in self.brought(end).items()
                for at in places
                if self.keys(group, [at])[0] not in came
            ]
            if not missing:
                return end
            end = min([end - 1, *(at for group, at in missing if group in self.full)])
        return self.here.accepted

    def _full_end(self, limit: int) -> int:
        """Return the boundary that groups of full attention could reach, and the pools have room for."""
        here = self.here
        for group in self.full:
            limit = min(limit, here.matched + here.room[group])
        if not self.full or limit <= here.matched:
            return limit
        places = range(here.matched, limit)
        blocks = [(group, at) for at in places for group in self.full]
        found = self._find([self._parts[group].key(here.digests[at]) for group, at in blocks])
        for block, level in zip(blocks, found, strict=True):
            if level < 0:
                return block[1]
            self._levels[block] = level
        return limit

    def _agreed(self, end: int) -> int:
        """Lower a boundary until every group accepts it."""
        tried = -1
        while tried != end and end > self.here.accepted:
            tried = end
            for group in self._sparse:
                end = self._accepted(group, end)
        return max(end, self.here.accepted)

    def _accepted(self, group: int, end: int) -> int:
        room = self.here.room[group]
        while end > self.here.accepted:
            places = required_blocks(self._manager, group, end)
            lacking = [at for at in places if not self._is_held(group, at)]
            missing = next((at for at in reversed(lacking) if not self._has(group, at)), None)
            if missing is None:
                if max(len(lacking), group in self._states) <= room:
                    return end
                return self.here.accepted
            end = min(missing, end - 1)
        return end

    def _is_held(self, group: int, at: int) -> bool:
        return at < self.here.matched and bool(self.here.held[group][at])

    def _has(self, group: int, at: int) -> bool:
        if (group, at) not in self._levels:
            first = max(at + 1 - self._looks[group], 0)
            self._looks[group] *= 2
            places = [place for place in range(first, at + 1) if not self._is_held(group, place)]
            found = self._find(self.keys(group, places), contiguous=False)
            self._levels |= {
                (group, place): level for place, level in zip(places, found, strict=True)
            }
        return self._levels[group, at] >= 0


def most_blocks(manager: CacheManager, prompt: Prompt) -> int:
    """Return the blocks of a prompt that could be found, as at least one token is left to compute."""
    return (prompt.tokens.size - 1) // manager.block_size

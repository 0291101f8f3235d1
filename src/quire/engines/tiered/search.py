"""The search for a prompt in the tiers: its blocks there, and the longest hit that they allow."""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from quire.core import CacheManager, FullAttention
from quire.engines.tiered.cost import PrefillCost
from quire.engines.tiered.record_form import RecordForm
from quire.exchange import Residency, required_blocks
from quire.groups import Recurrent
from quire.tiers.stack.stack import TierStack

FIRST_LOOK = 32
"""Blocks of a windowed or recurrent group that are asked for at a time, from the end; then twice as many."""


class Groups(NamedTuple):
    """The layer groups of an engine: what a hit needs of each, and the form of its records.

    `required`      per group a function: which of its blocks a hit of so many blocks needs, rising
    `full, states`  groups of full attention, and of recurrent states
    """

    forms: Sequence[RecordForm]
    block_size: int
    required: Sequence[Callable[[int], Sequence[int]]]
    full: Sequence[int]
    states: Sequence[int] = ()

    @classmethod
    def of(cls, manager: CacheManager, forms: Sequence[RecordForm]) -> "Groups":
        """Return the layer groups of a manager."""
        kinds = [group.kind for group in manager.settings.groups]
        full, states = (
            [group for group, kind in enumerate(kinds) if isinstance(kind, each)]
            for each in (FullAttention, Recurrent)
        )
        required = [partial(required_blocks, manager, group) for group in range(len(kinds))]
        return cls(forms, manager.block_size, required, full, states)

    def most_blocks(self, num_tokens: int) -> int:
        """Return the blocks of a prompt that could be found, as at least one token is left to compute."""
        return (num_tokens - 1) // self.block_size


class Search:
    """Finds the blocks of a prompt in the tiers, beside those that the device holds.

    prompt           |== device ==|== tiers ==|= nobody has it =|
    full groups       b  b  b  b   t  t  t  t  -  -  -              asked in order, up to a hole
    other groups                        t  t                        asked for what a hit there needs

    Groups must agree, as in a lookup on the device: the boundary is lowered until no group objects.
    Asks the tiers for as little as it can, at least one token being left; nothing is loaded. `end` is
    the best boundary in blocks, and `here.accepted` where nothing can be gained.

    `here`        the blocks of the prompt that the device holds
    `num_tokens`  tokens of the prompt
    `find`        `TierStack.find`, with what it is to leave out
    """

    def __init__(
        self, groups: Groups, here: Residency, num_tokens: int, find: Callable[..., list[int]]
    ) -> None:
        self.here = here
        self._groups = groups
        self._num_tokens = num_tokens
        self._find = find
        self._levels: dict[tuple[int, int], int] = {}
        self._looks = [FIRST_LOOK] * len(groups.forms)
        self._sparse = [g for g in range(len(groups.forms)) if g not in groups.full]
        limit = min(groups.most_blocks(num_tokens), len(here.digests))
        self.end = self._agreed(self._full_end(limit))

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
                for at in self._groups.required[group](end)
                if at >= self.here.matched or not held[group][at]
            ]
            for group in range(len(held))
        }

    def blocks(self, end: int) -> list[tuple[int, int]]:
        """Return place and group of the blocks that must come for a hit of `end` blocks, the head first."""
        brought = self.brought(end)
        return sorted((at, group) for group, places in brought.items() for at in places)

    def keys(self, group: int, places: Sequence[int]) -> list[bytes]:
        """Return the keys of blocks of a group."""
        return [self._groups.forms[group].key(self.here.digests[at]) for at in places]

    def lacking(self, end: int) -> tuple[list[bytes], list[int], list[int]]:
        """Return keys, levels and record sizes of `blocks`; levels as `TierStack.find` returns them."""
        blocks, forms = self.blocks(end), self._groups.forms
        return (
            [forms[group].key(self.here.digests[at]) for at, group in blocks],
            [self._levels.get((group, at), -1) for at, group in blocks],
            [forms[group].record_bytes for _, group in blocks],
        )

    def worth(
        self,
        stack: TierStack,
        cost: PrefillCost,
        entering_s: Callable[[float], float] = lambda _: 0.0,
    ) -> int:
        """Return up to which boundary loading beats computing.

        `entering_s`  seconds that so many bytes take to get into the pools
        """
        here, size, end = self.here, self._groups.block_size, self.end
        if end <= here.accepted:
            return end
        keys, levels, sizes = self.lacking(end)
        step = len(keys) // (end - here.matched) if self.is_full else len(keys)
        record_bytes = sum(sizes) / len(sizes)

        def recompute_s(num_keys: int) -> float:
            loaded = num_keys // step if self.is_full else end - here.accepted
            start = (here.accepted + (loaded if num_keys else 0)) * size
            return cost.seconds(start, self._num_tokens) + entering_s(num_keys * record_bytes)

        chosen = stack.choose(keys, levels, sizes, recompute_s, step=step)
        if self.is_full:
            return here.matched + chosen // step
        return end if chosen else here.accepted

    def by_tier(self, end: int, names: Sequence[str]) -> dict[str, int]:
        """Count the tokens that a boundary gains by tier: the slowest group of each place decides."""
        here, size = self.here, self._groups.block_size
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
            end = min([end - 1, *(at for group, at in missing if group in self._groups.full)])
        return self.here.accepted

    def _full_end(self, limit: int) -> int:
        """Return the boundary that groups of full attention could reach, and the pools have room for."""
        here, full, forms = self.here, self._groups.full, self._groups.forms
        for group in full:
            limit = min(limit, here.matched + here.room[group])
        if not full or limit <= here.matched:
            return limit
        blocks = [(group, at) for at in range(here.matched, limit) for group in full]
        found = self._find([forms[group].key(here.digests[at]) for group, at in blocks])
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
            places = self._groups.required[group](end)
            lacking = [at for at in places if not self._is_held(group, at)]
            missing = next((at for at in reversed(lacking) if not self._has(group, at)), None)
            if missing is None:
                if max(len(lacking), group in self._groups.states) <= room:
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

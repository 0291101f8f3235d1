"""The scheduler's side: it owns the tiers, finds hits, and plans the workers' copies."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from quire.core import MediaItem, Scope
from quire.engines.tiered.cost import PrefillCost
from quire.engines.vllm.arena import ArenaPlace, SharedArena
from quire.engines.vllm.figures import Figures, TierFigures
from quire.engines.vllm.loading import Loading, PromptLoad
from quire.engines.vllm.parts import GroupPart
from quire.engines.vllm.prompts import PromptNames
from quire.engines.vllm.residency import Residencies, StoredRecord
from quire.tiers.base import Outcome
from quire.tiers.stack.stack import TierStack

IDLE_WAIT_S = 0.005
"""Where vLLM has nothing to compute, a step waits so long for what is being loaded: the engine would spin."""


Describe: TypeAlias = Callable[[str, int, int], tuple[Any, Any] | None]
"""Returns what is told of a request's block in a layer group when it is stored and when it goes; None: nothing."""

NULL_BLOCK = 0
"""vLLM's id of no block."""


class Copy(NamedTuple):
    """One block to copy, between a slot of the arena and block `block` of a layer group."""

    group: int
    block: int
    slot: int


class StepCopies(NamedTuple):
    """The copies of workers in one step: `loads` before the forward, `saves` behind it."""

    step: int
    place: ArenaPlace
    loads: list[Copy]
    saves: list[Copy]


class _Saved(NamedTuple):
    keys: list[bytes]
    copies: list[Copy]
    parts: list[GroupPart]
    told: list[StoredRecord[Any, Any]]


class _Step(NamedTuple):
    """A step that workers have not reported done: slots to give back, blocks to store, its forward."""

    loaded: list[int]
    saved: list[_Saved]
    computed: tuple[int, int, float] | None


class Following:
    """One request: the names of its blocks, its load, and its saved length."""

    def __init__(self, names: PromptNames, *, stores: bool) -> None:
        self.names = names
        self.load: PromptLoad | None = None
        self.num_saved = 0
        self.is_counted = False
        self.is_passed_over = not stores


class SchedulerSide:
    """The tiers of one engine, as its scheduler uses them.

    One thread uses it; vLLM's scheduler reports a step after it ran.

    stack   the tiers; closed with it
    told    what lies in the tiers, for KV events; None: nobody asks
    now     a clock, in seconds

    A request waits while its prompt is looked for, until `Loading.deadline_s`; others go on. The blocks that it is
    promised lie verified in the arena, so that no load fails behind that. Blocks are copied out in the step that
    computed them, so nothing has to be held for a store, and a request that is preempted, or ends, changes nothing.
    """

    def __init__(
        self,
        stack: TierStack,
        parts: Sequence[GroupPart],
        arena_bytes: int,
        num_workers: int = 1,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stack = stack
        self.counts: Counter[str] = Counter()
        self.told: Residencies[Any, Any] | None = None
        self.describe: Describe = _untold
        self._parts = parts
        self._block_size = parts[0].namespace.block_size
        self._arena = SharedArena(max(part.payload_bytes for part in parts), arena_bytes)
        self._cost = PrefillCost()
        self._loading = Loading(stack, parts, self._arena, self._cost, now)
        self._num_workers = num_workers
        self._now = now
        self._alive: set[str] = set()
        self._requests: dict[str, Following] = {}
        self._loads: list[Copy] = []
        self._steps: dict[int, _Step] = {}
        self._acknowledged: Counter[int] = Counter()
        self._num_steps = 0
        self._under_way: set[bytes] = set()
        self._figures = TierFigures(stack, now)
        stack.feeding.engine_rests()

    # Requests

    def arrived(self, request: str) -> None:
        """Note that vLLM has a request, which may wait for others: until all have ended it does not rest."""
        self._alive.add(request)
        self.stack.feeding.engine_computes()

    def follow(
        self,
        request: str,
        tokens: Sequence[int],
        scope: Scope,
        media: Sequence[MediaItem] = (),
        *,
        stores: bool = True,
    ) -> None:
        """Begin to follow a request, whose blocks are stored; one that is followed already is left alone."""
        self.arrived(request)
        if request not in self._requests:
            names = PromptNames(tokens, self._block_size, scope, media)
            self._requests[request] = Following(names, stores=stores)

    def matched(self, request: str, num_tokens: int, num_computed: int) -> int | None:
        """Return the tokens behind `num_computed` that are loaded, or None while they are looked for.

        At least one of `num_tokens` is left to compute. A prompt of which the tiers have nothing, as far as that is known at
        once, waits for nobody: vLLM would go a step without it.
        """
        following = self._requests.get(request)
        if following is None:
            return 0
        first = num_computed // self._block_size
        load = following.load
        if load is not None and first < load.first:  # vLLM has lost blocks since
            self._end_load(following)
            load = None
        if load is None:
            digests = following.names.digests[: (num_tokens - 1) // self._block_size]
            is_cold = len(digests) <= first or self._loading.surely_lacks(digests[first])
            if not following.is_counted:
                following.is_counted = True
                self._loading.count_use(digests, is_new=is_cold and not first)
            if is_cold:
                return 0
            load = following.load = self._loading.begin(digests, first, num_tokens)
        if not load.done.is_set():
            self._loading.give_room()
            if not self._loading.is_late(load):
                return None
            load.close()  # what comes later finds nobody
            load.finish(load.first, {})
            self.counts["late"] += 1
        return max(load.end - first, 0) * self._block_size

    def allocated(self, request: str, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        """Note the blocks that a request was given: what is loaded for it is copied there before the next forward.

        `blocks`  ids by group and place
        """
        following = self._requests.get(request)
        if following is None or not num_external or following.load is None:
            return
        load = following.load
        self.counts["loaded_tokens"] += num_external
        self.counts["loaded_requests"] += 1
        first = load.end - num_external // self._block_size
        saved_s = self._cost.saved(
            first * self._block_size, load.end * self._block_size, load.num_tokens
        )
        if saved_s < math.inf:
            self.stack.feeding.adjust_budget(saved_s)
        spare: list[int] = []
        for (group, at), slot in load.hand_over().items():
            if at >= first:
                self._loads.append(Copy(group, blocks[group][at], slot))
            else:
                spare.append(slot)
        self._arena.give_back(spare)
        self._end_load(following)

    def ended(self, request: str) -> None:
        """Forget a request."""
        following = self._requests.pop(request, None)
        if following is not None:
            self._end_load(following)
        self._alive.discard(request)
        if not self._alive:
            self.stack.feeding.engine_rests()

    def rename(self, parts: Sequence[GroupPart]) -> None:
        """Keep what is computed from now on under other keys: nothing that is stored is found any more."""
        for following in self._requests.values():
            self._end_load(following)
            following.is_passed_over = True  # what it has was computed before
        self._loading.close()
        self._parts = parts
        self._loading = Loading(self.stack, parts, self._arena, self._cost, self._now)

    # Steps

    def step(
        self,
        scheduled: Mapping[str, tuple[int, int]],
        tokens_of: Callable[[str], Sequence[int]],
        blocks_of: Callable[[str], Sequence[Sequence[int]]],
    ) -> StepCopies | None:
        """Return what workers shall copy in a step that computes `scheduled`: first token and count, by request.

        None where there is nothing to copy, and nothing to learn from how long it takes: most steps make a token for each
        request, and fill no block.

        `tokens_of`  all tokens of a request that are known
        `blocks_of`  ids of its blocks by group and place; `NULL_BLOCK` stands where there is none any more
        """
        saved: list[_Saved] = []
        longest, total = (0, 0), 0
        for request, (start, count) in scheduled.items():
            total += count
            if count > longest[1]:
                longest = start, count
            following = self._requests.get(request)
            if following is None:
                continue
            if following.load is not None and following.load.done.is_set():
                self._end_load(following)  # it had nothing, or less than vLLM
            if (start + count) // self._block_size <= following.num_saved:
                continue
            whole = self._newly_whole(following, tokens_of(request), start + count)
            if whole and not following.is_passed_over:
                part = self._save(request, whole, blocks_of(request))
                saved += [part] if part is not None else []
        if not scheduled:
            self._wait_for_loads()
        is_prompt = longest[1] > 1  # what prompts cost is learned, not single tokens
        if not (self._loads or saved or is_prompt):
            return None
        loads, self._loads = self._loads, []
        self._num_steps += 1
        computed = (longest[0], sum(longest), longest[1] / total) if is_prompt else None
        self._steps[self._num_steps] = _Step([each.slot for each in loads], saved, computed)
        saves = [copy for each in saved for copy in each.copies]
        return StepCopies(self._num_steps, self._arena.place, loads, saves)

    def done(self, step: int, num_workers: int, seconds: float) -> None:
        """Note that so many workers more have done a step; `seconds` of its forward, 0 if not known."""
        self._acknowledged[step] += num_workers
        if self._acknowledged[step] < self._num_workers:
            return
        del self._acknowledged[step]
        loaded, saved, computed = self._steps.pop(step)
        self._arena.give_back(loaded)
        if computed is not None and seconds:
            start, stop, share = computed
            self._cost.observe(start, stop, seconds * share)
        for each in saved:
            num_bytes = sum(part.record_bytes for part in each.parts)
            self._under_way.difference_update(each.keys)
            self.stack.feeding.begin(each.keys, partial(self._store, each), num_bytes)

    def take_counts(self) -> dict[str, int]:
        """Return the counts since the last call."""
        if not self.counts:
            return {}
        counts, self.counts = dict(self.counts), Counter()
        return counts

    def take_figures(self) -> Figures:
        """Return figures of the tiers since the last call that returned some."""
        return self._figures.take()

    def close(self) -> None:
        """Write the queued records, within `close_timeout_s`, and close the tiers."""
        self._loading.close()
        self.stack.close()
        for request in list(self._requests):
            self.ended(request)
        self._arena.close()

    # Helpers

    def _end_load(self, following: Following) -> None:
        """Give back what a load has of the arena, if there is one, and count what it lacked."""
        load, following.load = following.load, None
        if load is not None:
            load.close()
            counts = load.counts + Counter(failed_blocks=sum(load.causes.values()))
            self.counts += counts

    def _newly_whole(self, following: Following, tokens: Sequence[int], num_computed: int) -> range:
        """Return the blocks that are whole, and whose tokens are known, behind this step and were not before."""
        names = following.names
        if len(tokens) > names.num_tokens and len(tokens) // self._block_size > len(names.digests):
            names.extend(tokens[names.num_tokens :])
        whole = range(
            following.num_saved, min(num_computed // self._block_size, len(names.digests))
        )
        following.num_saved = max(following.num_saved, whole.stop)
        return whole

    def _save(self, request: str, whole: range, blocks: Sequence[Sequence[int]]) -> _Saved | None:
        """Take slots for the blocks that tiers want; where there is no room, or no time, the request is passed over."""
        following = self._requests[request]
        digests = following.names.digests
        places = [
            (part, at)
            for at in whole
            for part in self._parts
            if at < len(blocks[part.index]) and blocks[part.index][at] != NULL_BLOCK
        ]
        keys = [part.key(digests[at]) for part, at in places]
        stack = self.stack
        lacking = (stack.wanted(keys) != 0) & ~stack.feeding.has(keys)
        chosen = [at for at in np.flatnonzero(lacking).tolist() if keys[at] not in self._under_way]
        if not chosen:
            return None
        half = self._arena.place.num_slots * self._arena.place.slot_bytes // 2
        slots = self._arena.take(len(chosen)) if stack.feeding.has_room(half) else []
        if len(slots) < len(chosen):
            following.is_passed_over = True  # behind a gap nothing is found
            self.counts["passed_over_blocks"] += len(chosen) - len(slots)
        copies = [
            Copy(places[at][0].index, blocks[places[at][0].index][places[at][1]], slot)
            for at, slot in zip(chosen, slots, strict=False)
        ]
        if not copies:
            return None
        taken = [keys[at] for at in chosen[: len(slots)]]
        self._under_way.update(taken)
        self.counts["saved_blocks"] += len(taken)
        told: list[StoredRecord[Any, Any]] = []
        for at, key in zip(
            chosen[: len(slots)] if self.told is not None else (), taken, strict=False
        ):
            if (said := self.describe(request, places[at][1], places[at][0].index)) is not None:
                told.append(StoredRecord(key, *said))
        return _Saved(taken, copies, [self._parts[each.group] for each in copies], told)

    def _store(self, saved: _Saved) -> None:
        """Make records of what workers have copied, and store them. In the feeding thread."""
        slots = [copy.slot for copy in saved.copies]
        try:
            records = self.stack.records([part.record_bytes for part in saved.parts])
            for part, slot, record, key in zip(
                saved.parts, slots, records, saved.keys, strict=True
            ):
                part.payload(record)[:] = self._arena.view(slot, part.payload_bytes)
                part.seal(record, key, self.stack.settings.key)
        finally:
            self._arena.give_back(slots)
        outcomes = self.stack.store(saved.keys, records)
        if self.told is not None and saved.told:
            there = {
                key
                for key, outcome in zip(saved.keys, outcomes, strict=True)
                if outcome in (Outcome.STORED, Outcome.PRESENT)
            }
            self.told.stored(each for each in saved.told if each.key in there)

    def _wait_for_loads(self) -> None:
        waiting = (each.load for each in self._requests.values())
        load = next((each for each in waiting if each and not each.done.is_set()), None)
        if load is not None:
            load.done.wait(IDLE_WAIT_S)


def _untold(request: str, at: int, group: int) -> None:
    """Describe no block."""

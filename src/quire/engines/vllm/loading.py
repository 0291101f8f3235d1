"""Loading: a prompt's records are verified and in shared memory before vLLM is told of a hit."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from quire.engines.tiered.cost import PrefillCost
from quire.engines.tiered.search import Groups, Search
from quire.engines.vllm.arena import SharedArena
from quire.engines.vllm.parts import GroupPart
from quire.exchange import Residency
from quire.tiers.base import Outcome
from quire.tiers.stack.stack import TierStack

THREADS = 4
"""Prompts that are looked for and loaded at once."""

SLACK_S = 1.0
"""So much longer than the stack's own deadlines a prompt waits, for a thread and for memory to be copied."""


ROOM_SHARE = 0.25
"""A load waits for room in the arena for this share of what its hit saves; the tiers may take as much again."""


class PromptLoad:
    """The blocks of one prompt that come from the tiers: `end` of them are of use when it is `done`.

    first       blocks that vLLM has itself; block `at` of a group lies in `slots[group, at]`, for those that are read
    causes      why not more came, by the name of their `quire.tiers.Outcome`
    counts      `cut_blocks`, which the arena had no room for, and `refused_blocks`, whose loading would not have paid
    since_s     when its last phase began: the search, or the load after a wait for room
    is_waiting  whether it waits for room

    The slots are this load's until `close`, whichever thread that comes from and whenever it is.
    """

    def __init__(
        self,
        arena: SharedArena,
        digests: Sequence[bytes],
        first: int,
        num_tokens: int,
        now_s: float = 0.0,
    ) -> None:
        self.first = self.end = first
        self.since_s = now_s
        self.is_waiting = False
        self.counts: Counter[str] = Counter(cut_blocks=0, refused_blocks=0)
        self.digests = digests
        self.num_tokens = num_tokens
        self.slots: dict[tuple[int, int], int] = {}
        self.causes: Counter[str] = Counter()
        self.done = threading.Event()
        self._arena = arena
        self._lock = threading.Lock()
        self._is_closed = False

    def finish(self, end: int, slots: dict[tuple[int, int], int]) -> None:
        """Say that blocks up to `end` lie in these slots."""
        with self._lock:
            if self._is_closed:
                self._arena.give_back(slots.values())
            else:
                self.end, self.slots = end, slots
        self.done.set()

    @property
    def is_closed(self) -> bool:
        """Whether nobody wants it any more."""
        return self._is_closed

    def hand_over(self) -> dict[tuple[int, int], int]:
        """Return the slots, which are the caller's from now on."""
        with self._lock:
            slots, self.slots = self.slots, {}
            self._is_closed = True
        return slots

    def close(self) -> None:
        """Give the slots back; twice does nothing."""
        self._arena.give_back(self.hand_over().values())


class WaitingLoad(NamedTuple):
    """A load whose blocks are found, and wait for room."""

    load: PromptLoad
    search: Search
    end: int
    saved_s: float
    """Seconds that its hit saves, less twice what asking took; infinite without a gate, or where it is not known."""
    num_blocks: int
    since_s: float
    """When it began to wait."""


class Loading:
    """Finds and loads prompts in threads of its own; only the request itself waits, until its deadline.

    Loads get room in the arena in the order in which their blocks were found. The first that lacks room waits for
    `ROOM_SHARE` of what its hit saves. Without a gate, or before prefill was measured, it waits as long as loads get
    room now and then. After that it loads the head that there is room for.
    """

    def __init__(
        self,
        stack: TierStack,
        parts: Sequence[GroupPart],
        arena: SharedArena,
        cost: PrefillCost,
        now: Callable[[], float],
    ) -> None:
        settings = stack.settings
        self.deadline_s = settings.lookup_timeout_s + settings.load_timeout_s + SLACK_S
        self._stack, self._arena, self._cost, self._now = stack, arena, cost, now
        full = [part.index for part in parts if not part.window]
        block_size = parts[0].namespace.block_size
        self._groups = Groups(parts, block_size, [part.needed for part in parts], full)
        self._threads = ThreadPoolExecutor(THREADS, "quire vllm load")
        self._lock = threading.Lock()
        self._waiting: deque[WaitingLoad] = deque()
        self._given_s = -math.inf

    def count_use(self, digests: Sequence[bytes], *, is_new: bool) -> None:
        """Count that a prompt was asked for; no record of a new one is there to be kept from ageing."""
        if not is_new or self._stack.counts_uses:
            forms = self._groups.forms
            self._stack.count_use([form.key(each) for each in digests for form in forms])

    def surely_lacks(self, digest: bytes) -> bool:
        """Return whether it is known at once that nothing comes of this block, and so nothing of those behind it."""
        full = (self._groups.forms[group] for group in self._groups.full)
        return any(self._stack.surely_lacks(form.key(digest)) for form in full)

    def begin(self, digests: Sequence[bytes], first: int, num_tokens: int) -> PromptLoad:
        """Begin to load what is behind `first` blocks of a prompt with these digests."""
        load = PromptLoad(self._arena, digests, first, num_tokens, self._now())
        self._threads.submit(self._run, load)
        return load

    def is_late(self, load: PromptLoad) -> bool:
        """Return whether a load that is not done is given up; one that waits for room is not."""
        return not load.is_waiting and self._now() - load.since_s >= self.deadline_s

    def give_room(self) -> None:
        """Give room that came to loads that wait for it, the oldest first."""
        while self._waiting:
            with (
                self._lock
            ):  # also for `submit`: behind `close` nothing is given that nobody takes back
                given = self._given_room()
                if given is None:
                    return
                waiting, slots = given
                work = partial(self._fetch, waiting, slots)
                future = self._threads.submit(self._guarded, waiting.load, work, slots)
            future.add_done_callback(
                lambda future, slots=slots: self._arena.give_back(
                    slots if future.cancelled() else ()
                )
            )

    def close(self) -> None:
        """Take no more; what has begun ends by itself."""
        with self._lock:
            self._waiting.clear()
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, load: PromptLoad) -> None:
        self._guarded(load, partial(self._begin, load))

    def _guarded(
        self, load: PromptLoad, work: Callable[[], None], slots: Sequence[int] = ()
    ) -> None:
        """Do work that ends or queues a load; where it fails, the load ends without its slots."""
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever fails here, the prompt is computed
            self._arena.give_back(slots)
            load.causes[type(error).__name__] += 1
            load.finish(load.first, {})

    def _begin(self, load: PromptLoad) -> None:
        """Find what pays of a prompt, and load it, now or when there is room."""
        began_s = self._now()
        search = self._searched(load)
        asked_s = self._now() - began_s
        end = search.worth(self._stack, self._cost)
        load.counts["refused_blocks"] = search.end - end
        if search.end == load.first + self._most_blocks:
            limit = min(self._groups.most_blocks(load.num_tokens), len(load.digests))
            load.counts["cut_blocks"] = limit - search.end
        if end <= load.first:
            load.finish(load.first, {})
            return
        saved_s = math.inf
        if self._stack.settings.gate:
            saved_s = self._saved_s(load, end) - 2 * asked_s
        num_blocks = len(search.blocks(end))
        with self._lock:
            waiting = WaitingLoad(load, search, end, saved_s, num_blocks, self._now())
            self._waiting.append(waiting)
            load.is_waiting = True
        self.give_room()

    def _given_room(self) -> tuple[WaitingLoad, list[int]] | None:
        """Take slots for the load that waits longest; None where it goes on waiting. The lock is held."""
        if not self._waiting:
            return None
        first = self._waiting[0]
        load = first.load
        if first.num_blocks > self._arena.num_free and not load.is_closed:
            until_s = first.since_s + first.saved_s * ROOM_SHARE
            if until_s == math.inf:
                until_s = max(first.since_s, self._given_s) + self.deadline_s
            if self._now() < until_s:
                return None
            first = self._cut(first)
        self._waiting.popleft()
        slots = [] if load.is_closed else self._arena.take(first.num_blocks)
        self._given_s = load.since_s = self._now()
        load.is_waiting = False
        return first, slots

    def _cut(self, waiting: WaitingLoad) -> WaitingLoad:
        """Return a load lowered to what there is room for."""
        load, search, end = waiting.load, waiting.search, waiting.end
        per_block = len(search.blocks(end)) // (end - load.first)
        most = end - load.first  # others may have given slots back meanwhile
        fitting = min(self._arena.num_free // per_block, most) if search.is_full else 0
        load.counts["cut_blocks"] += most - fitting
        end = load.first + fitting
        return waiting._replace(end=end, num_blocks=len(search.blocks(end)))

    def _fetch(self, waiting: WaitingLoad, slots: list[int]) -> None:
        """Copy records into slots, verified.

        Asking and loading together may wait in vain for half of what a hit saves, so what asking took is taken off, and
        what waiting for room took, up to `ROOM_SHARE`: vLLM may have had no seat for the request for longer.
        """
        load, search, end, saved_s = waiting[:4]
        blocks = search.blocks(end)
        if len(slots) < len(blocks):  # a store was faster
            self._arena.give_back(slots)
            load.counts["cut_blocks"] += end - load.first
            end, blocks, slots = load.first, [], []
        if not blocks:
            load.finish(load.first, {})
            return
        keys, levels, sizes = search.lacking(end)
        saved_s -= 2 * min(self._now() - waiting.since_s, ROOM_SHARE * saved_s)
        outcomes, records = self._stack.load(keys, sizes, found=levels, saved_s=saved_s)
        came: set[bytes] = set()
        for at, (_, group) in enumerate(blocks):
            part, record = self._groups.forms[group], records[at]
            if record is None or not part.reads(record):
                load.causes[str(outcomes[at] if record is None else Outcome.FOREIGN)] += 1
                continue
            self._arena.view(slots[at], part.payload_bytes)[:] = part.payload(record)
            came.add(keys[at])
        self._stack.give_back(records)
        end = search.whole(end, came)
        needed = set(search.blocks(end))
        placed = dict(zip(blocks, slots, strict=True))
        self._arena.give_back([slot for block, slot in placed.items() if block not in needed])
        load.finish(end, {(group, at): placed[at, group] for at, group in needed})

    @property
    def _most_blocks(self) -> int:
        """Blocks of each group that the whole arena holds."""
        return self._arena.place.num_slots // len(self._groups.forms)

    def _searched(self, load: PromptLoad) -> Search:
        """Find in which tiers the blocks are that a hit could need, as far as the arena could hold them."""
        first, stop, groups = load.first, len(load.digests), self._groups
        num_bytes = sum(groups.forms[group].record_bytes for group in groups.full) * (stop - first)
        find = partial(self._stack.find, saved_s=self._saved_s(load, stop), num_bytes=num_bytes)
        held = (np.ones(first, np.bool_),) * len(groups.forms)
        room = (self._most_blocks,) * len(groups.forms)
        here = Residency(first, first, held, room, [*load.digests])
        return Search(groups, here, load.num_tokens, find)

    def _saved_s(self, load: PromptLoad, end: int) -> float:
        size = self._groups.block_size
        return self._cost.saved(load.first * size, end * size, load.num_tokens)

"""Loading: a prompt's records are verified and in shared memory before vLLM is told of a hit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

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


class PromptLoad:
    """The blocks of one prompt that come from the tiers: `end` of them are of use when it is `done`.

    first   blocks that vLLM has itself; block `at` of a group lies in `slots[group, at]`, for those that are read
    causes  why not more came, by the name of their `quire.tiers.Outcome`

    The slots are this load's until `close`, whichever thread that comes from and whenever it is.
    """

    def __init__(
        self, arena: SharedArena, digests: Sequence[bytes], first: int, num_tokens: int
    ) -> None:
        self.first = self.end = first
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

    def hand_over(self) -> dict[tuple[int, int], int]:
        """Return the slots, which are the caller's from now on."""
        with self._lock:
            slots, self.slots = self.slots, {}
            self._is_closed = True
        return slots

    def close(self) -> None:
        """Give the slots back; twice does nothing."""
        self._arena.give_back(self.hand_over().values())


class Loading:
    """Finds and loads prompts in threads of its own; only the request itself waits, until its deadline."""

    def __init__(
        self, stack: TierStack, parts: Sequence[GroupPart], arena: SharedArena, cost: PrefillCost
    ) -> None:
        settings = stack.settings
        self.deadline_s = settings.lookup_timeout_s + settings.load_timeout_s + SLACK_S
        self._stack, self._arena, self._cost = stack, arena, cost
        full = [part.index for part in parts if not part.window]
        block_size = parts[0].namespace.block_size
        self._groups = Groups(parts, block_size, [part.needed for part in parts], full)
        self._threads = ThreadPoolExecutor(THREADS, "quire vllm load")

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
        load = PromptLoad(self._arena, digests, first, num_tokens)
        self._threads.submit(self._run, load)
        return load

    def close(self) -> None:
        """Take no more; what has begun ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _run(self, load: PromptLoad) -> None:
        end, slots = load.first, dict[tuple[int, int], int]()
        try:
            end, slots = self._load(load)
        except Exception as error:  # noqa: BLE001 - whatever fails here, the prompt is computed
            load.causes[type(error).__name__] += 1
        load.finish(end, slots)

    def _load(self, load: PromptLoad) -> tuple[int, dict[tuple[int, int], int]]:
        """Copy what pays of a prompt into slots, verified; return the boundary that is reached, and the slots.

        Asking and loading together may wait in vain for half of what a hit saves, so what asking took is taken off.
        """
        began_s = time.monotonic()
        search = self._searched(load)
        found_s = time.monotonic() - began_s
        end = search.worth(self._stack, self._cost)
        blocks = search.blocks(end)
        slots = self._arena.take(len(blocks))
        if len(slots) < len(blocks):  # others were faster
            self._arena.give_back(slots)
            load.causes["no_memory"] += 1
            return load.first, {}
        keys, levels, sizes = search.lacking(end)
        saved_s = self._saved_s(load, end) - 2 * found_s
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
        return end, {(group, at): placed[at, group] for at, group in needed}

    def _searched(self, load: PromptLoad) -> Search:
        """Find in which tiers the blocks are that a hit could need, as far as the arena has room."""
        first, stop, groups = load.first, len(load.digests), self._groups
        num_bytes = sum(groups.forms[group].record_bytes for group in groups.full) * (stop - first)
        find = partial(self._stack.find, saved_s=self._saved_s(load, stop), num_bytes=num_bytes)
        held = (np.ones(first, np.bool_),) * len(groups.forms)
        room = (self._arena.num_free // len(groups.forms),) * len(groups.forms)
        here = Residency(first, first, held, room, [*load.digests])
        return Search(groups, here, load.num_tokens, find)

    def _saved_s(self, load: PromptLoad, end: int) -> float:
        size = self._groups.block_size
        return self._cost.saved(load.first * size, end * size, load.num_tokens)

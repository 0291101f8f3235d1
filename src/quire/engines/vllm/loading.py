"""Loading: a prompt's records are verified and in shared memory before vLLM is told of a hit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.engines.tiered.cost import PrefillCost
from quire.engines.vllm.arena import SharedArena
from quire.engines.vllm.parts import GroupPart
from quire.tiers.base import Outcome
from quire.tiers.format import payload_of
from quire.tiers.stack.stack import TierStack

THREADS = 4
"""Prompts that are looked for and loaded at once."""

SLACK_S = 1.0
"""So much longer than the stack's own deadlines a prompt waits, for a thread and for memory to be copied."""


class Cost(PrefillCost):
    """The cost of prefill, learned by one thread and read by others."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def observe(self, start: int, stop: int, seconds: float) -> None:
        """Learn from one forward over tokens [start, stop) of a prompt."""
        with self._lock:
            super().observe(start, stop, seconds)

    def seconds(self, start: int, stop: int) -> float:
        """Return the seconds of computing tokens [start, stop)."""
        with self._lock:
            return super().seconds(start, stop)


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
        self, stack: TierStack, parts: Sequence[GroupPart], arena: SharedArena, cost: Cost
    ) -> None:
        settings = stack.settings
        self.deadline_s = settings.lookup_timeout_s + settings.load_timeout_s + SLACK_S
        self._stack, self._parts, self._arena, self._cost = stack, parts, arena, cost
        self._full = [part for part in parts if not part.window]
        self._windowed = [part for part in parts if part.window]
        self._threads = ThreadPoolExecutor(THREADS, "quire vllm load")
        self._block_size = parts[0].namespace.block_size

    def count_use(self, digests: Sequence[bytes], *, is_new: bool) -> None:
        """Count that a prompt was asked for; no record of a new one is there to be kept from ageing."""
        if not is_new or self._stack.counts_uses:
            self._stack.count_use([part.key(each) for each in digests for part in self._parts])

    def surely_lacks(self, digest: bytes) -> bool:
        """Return whether it is known at once that nothing comes of this block, and so nothing of those behind it."""
        return any(self._stack.surely_lacks(part.key(digest)) for part in self._full)

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
        began_s = time.monotonic()
        levels = self._find(load)
        found_s = time.monotonic() - began_s
        end = self._agreed(load.first, len(load.digests), levels)
        end = min(end, load.first + self._arena.num_free // len(self._parts))
        end = self._worth(load, self._agreed(load.first, end, levels), levels)
        wanted = self._wanted(load.first, end)
        slots = self._arena.take(len(wanted))
        if len(slots) < len(wanted):  # others were faster
            self._arena.give_back(slots)
            load.causes["no_memory"] += 1
            return load.first, {}
        placed = dict(zip(wanted, slots, strict=True))
        came = self._fetch(load, placed, levels, found_s)
        end = self._whole(load.first, end, came)
        needed = set(self._wanted(load.first, end))
        self._arena.give_back([slot for at, slot in placed.items() if at not in needed])
        return end, {at: slot for at, slot in placed.items() if at in needed}

    def _find(self, load: PromptLoad) -> dict[tuple[int, int], int]:
        """Return the tier of each block that a hit could need, by group and place."""
        first, stop = load.first, len(load.digests)
        blocks = [(part.index, at) for at in range(first, stop) for part in self._full]
        num_bytes = sum(self._parts[group].record_bytes for group, _ in blocks)
        saved_s = self._saved_s(load, stop)
        found = self._stack.find(self._keys(load, blocks), saved_s=saved_s, num_bytes=num_bytes)
        levels = dict(zip(blocks, found, strict=True))
        if not self._windowed:
            return levels
        end = next((at for group, at in blocks if levels[group, at] < 0), stop)
        for part in self._windowed:
            places = [(part.index, at) for at in range(first, end)]
            found = self._stack.find(self._keys(load, places), contiguous=False)
            levels |= dict(zip(places, found, strict=True))
        return levels

    def _agreed(self, first: int, end: int, levels: dict[tuple[int, int], int]) -> int:
        """Lower a boundary until all that a hit there reads is in some tier."""
        return self._whole(first, end, {at for at, level in levels.items() if level >= 0})

    def _whole(self, first: int, end: int, there: set[tuple[int, int]]) -> int:
        while end > first:
            missing = [each for each in self._wanted(first, end) if each not in there]
            if not missing:
                return end
            full = [at for group, at in missing if not self._parts[group].window]
            # Behind the last gap of a window no boundary is left; before it there may be one.
            end = min(full) if full else max(at for _, at in missing)
        return first

    def _wanted(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return group and place of what a hit of `end` blocks reads beyond `first`, the head first."""
        begins = [part.first_needed(end) for part in self._parts]
        return [
            (part.index, at)
            for at in range(first, end)
            for part, begin in zip(self._parts, begins, strict=True)
            if at >= begin
        ]

    def _worth(self, load: PromptLoad, end: int, levels: dict[tuple[int, int], int]) -> int:
        """Return up to which boundary loading beats computing."""
        wanted = self._wanted(load.first, end)
        if not wanted:
            return load.first
        step = 1 if self._windowed else len(self._full)
        size = self._block_size

        def recompute_s(num_keys: int) -> float:
            if self._windowed:
                start = end if num_keys == len(wanted) else load.first
            else:
                start = load.first + num_keys // step
            return self._cost.seconds(start * size, load.num_tokens)

        chosen = self._stack.choose(
            self._keys(load, wanted),
            [levels[each] for each in wanted],
            [self._parts[group].record_bytes for group, _ in wanted],
            recompute_s,
            step=step,
        )
        if self._windowed:
            return end if chosen == len(wanted) else load.first
        return load.first + chosen // step

    def _fetch(
        self,
        load: PromptLoad,
        placed: dict[tuple[int, int], int],
        levels: dict[tuple[int, int], int],
        found_s: float,
    ) -> set[tuple[int, int]]:
        """Copy verified payloads into slots; return what has come.

        Asking and loading together may wait in vain for half of what a hit saves, so what asking took is taken off.
        """
        blocks = list(placed)
        sizes = [self._parts[group].record_bytes for group, _ in blocks]
        end = max((at for _, at in blocks), default=load.first) + 1
        outcomes, records = self._stack.load(
            self._keys(load, blocks),
            sizes,
            found=[levels[each] for each in blocks],
            saved_s=self._saved_s(load, end) - 2 * found_s,
        )
        came: set[tuple[int, int]] = set()
        for block, outcome, record in zip(blocks, outcomes, records, strict=True):
            part = self._parts[block[0]]
            if record is None or not part.reads(record):
                load.causes[str(outcome if record is None else Outcome.FOREIGN)] += 1
                continue
            size = part.payload_bytes
            self._arena.view(placed[block], size)[:] = payload_of(record, size)
            came.add(block)
        self._stack.give_back(records)
        return came

    def _saved_s(self, load: PromptLoad, end: int) -> float:
        size = self._block_size
        return self._cost.saved(load.first * size, end * size, load.num_tokens)

    def _keys(self, load: PromptLoad, blocks: Sequence[tuple[int, int]]) -> list[bytes]:
        return [self._parts[group].key(load.digests[at]) for group, at in blocks]

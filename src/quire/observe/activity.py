"""The activity of a cache by its events: occupancy, stores and removals, hot prefixes."""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence as Items
from contextlib import suppress

import msgspec

from quire.core import CacheManager
from quire.errors import QuireError
from quire.exchange.wire import BlockHash, ClearedEvent, EventBatch, RemovedEvent, StoredEvent
from quire.foresight import LiveCurve
from quire.foresight.whatif import WhatIf
from quire.observe.mirror import DEVICE, Mirror

SAME_REQUEST_S = 5.0
"""What continues a run so much later, in seconds, is another request, as in traces of events."""

MAX_KNOWN = 100_000
"""Prefixes and removed blocks that are remembered; of more, those seen longest ago are forgotten."""

CURVE_BLOCKS = 1 << 16
"""Blocks of the manager that the curve is made with; it knows other capacities as well."""


class SeenRequest(msgspec.Struct, gc=False, eq=False):
    """A request in the making: when its last blocks were stored, and its prompt as far as it was seen."""

    last_s: float
    prompt: array[int]
    has_answer: bool = False


class HotPrefix(msgspec.Struct, frozen=True):
    """A prefix that requests went on from: its length in tokens, how many did, and its last tokens."""

    num_tokens: int
    num_uses: int
    last_tokens: list[int]


class Activity:
    """Keeps a mirror and counts what happens; a consumer for a `Follower`.

    Events tell of requests only where they store something: a run of blocks that continues none of the last
    `SAME_REQUEST_S` is taken for a request that found all before it. One that found all of its blocks is not seen, so
    the engine's own hit rate is higher.

    `mirror`         what is cached
    `num_requests`, `found_tokens`, `new_tokens`  of the requests that were seen
    `num_stored`, `num_removed`, `num_again`  blocks of the device; again: stored after they had been removed
    `num_cleared`    times that all was
    `peak_blocks`    most blocks of the device at once
    """

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.num_requests = self.found_tokens = self.new_tokens = 0
        self.num_stored = self.num_removed = self.num_again = self.num_cleared = 0
        self.peak_blocks = 0
        self._open: OrderedDict[BlockHash, SeenRequest] = (
            OrderedDict()
        )  # by the block where they end
        self._uses: Counter[BlockHash] = Counter()
        self._gone: OrderedDict[BlockHash, None] = OrderedDict()
        self._curve: CacheManager | None = None

    def begin(self, batches: Items[EventBatch]) -> None:
        """Take in the cached blocks at the start; none of them is counted."""
        self.mirror.begin(batches)
        self._open.clear()
        self._gone.clear()
        self._measure()

    def receive(self, batch: EventBatch) -> None:
        """Take in the events of a batch."""
        self._end_before(batch.time_s - SAME_REQUEST_S)
        for event in batch.events:
            self.mirror.apply(event)
            match event:
                case StoredEvent() if _is_first(event.group_idx, event.medium):
                    self._see_stored(event, batch.time_s)
                case RemovedEvent() if _is_first(event.group_idx, event.medium):
                    self._see_removed(event)
                case ClearedEvent():
                    self.num_cleared += 1
                case _:
                    pass
        self._measure()

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found, among the requests that were seen."""
        return self.found_tokens / max(self.found_tokens + self.new_tokens, 1)

    def hottest(self, count: int) -> list[HotPrefix]:
        """Return the prefixes that are cached and from which most requests went on."""
        hot: list[HotPrefix] = []
        for name, uses in self._uses.most_common():
            if len(hot) == count:
                break
            if tokens := self.mirror.prefix(name):
                hot.append(HotPrefix(len(tokens), uses, tokens[-8:].tolist()))
        return hot

    def end(self) -> None:
        """Take all requests for ended: nothing is followed any more."""
        self._end_before(math.inf)

    def what_if(self) -> WhatIf | None:
        """Return the hit-rate curve of the requests that ended; None before the first.

        A request ends when nothing continued it for `SAME_REQUEST_S`.
        """
        if self._curve is None:
            return None
        found = self._curve.kernel.watchers.of(LiveCurve).what_if()
        blocks = max(self.peak_blocks, 1)  # the pool that was seen is another than the mirror's
        return msgspec.structs.replace(found, capacity_blocks=blocks, measured=None)

    def _see_stored(self, event: StoredEvent, time_s: float) -> None:
        hashes, parent = event.block_hashes, event.parent_block_hash
        self.num_stored += len(hashes)
        for name in hashes:
            if name in self._gone:
                del self._gone[name]
                self.num_again += 1
        if not hashes or len(event.token_ids) != event.block_size * len(hashes):
            return
        request = self._open.pop(parent, None) if parent is not None else None
        is_answer = request is not None and len(hashes) == 1
        if request is None or (request.has_answer and not is_answer):
            found = array("i") if parent is None else self.mirror.prefix(parent) or array("i")
            request = SeenRequest(time_s, found + array("i", event.token_ids))
            self.num_requests += 1
            self.found_tokens += len(found)
            self.new_tokens += len(event.token_ids)
            if parent is not None:
                self._uses[parent] += 1
                if len(self._uses) > MAX_KNOWN:
                    self._uses = Counter(dict(self._uses.most_common(MAX_KNOWN // 2)))
        elif is_answer:
            request.has_answer = True
        else:
            request.prompt.extend(event.token_ids)
            self.new_tokens += len(event.token_ids)
        request.last_s = time_s
        self._open[hashes[-1]] = request

    def _see_removed(self, event: RemovedEvent) -> None:
        self.num_removed += len(event.block_hashes)
        self._gone.update(dict.fromkeys(event.block_hashes))
        while len(self._gone) > MAX_KNOWN:
            self._gone.popitem(last=False)

    def _end_before(self, time_s: float) -> None:
        """Let the curve know the requests that nothing continued since."""
        while self._open:
            name, request = next(iter(self._open.items()))
            if request.last_s > time_s:
                return
            del self._open[name]
            self._note(request.prompt)

    def _note(self, prompt: array[int]) -> None:
        size = self.mirror.groups[0].block_size
        if self._curve is None or self._curve.block_size != size:
            self._curve = CacheManager(CURVE_BLOCKS, size, watchers=[LiveCurve()], sub_block=False)
        prompt.append(0)  # the last token of a prompt is never found
        with suppress(QuireError):  # longer than any pool, or no tokens
            seq = self._curve.open(prompt)
            self._curve.reserve(seq, len(prompt) - seq.computed)
            self._curve.commit(seq, prompt[seq.computed :])
            self._curve.close(seq)

    def _measure(self) -> None:
        held = self.mirror.num_copies.get((0, DEVICE), {})
        self.peak_blocks = max(self.peak_blocks, len(held))


def _is_first(group: int | None, medium: str | None) -> bool:
    """Whether an event is of the first layer group on the device: those of others follow it."""
    return not group and (medium or DEVICE) == DEVICE

"""Planned copies between slots: what the data plane does before the next forward."""

from __future__ import annotations

from typing import NamedTuple


class SlotCopy(NamedTuple):
    """Give slot `dst` the KV of the first `num_tokens` positions of slot `src`, in all layers.

    The first `start` of them are in `dst` already, so positions [start, num_tokens) are
    enough. Copying all from position 0 is right as well.
    """

    src: int
    dst: int
    num_tokens: int
    start: int = 0


class SlotCopyPlan:
    """The copies planned since the last `take`, as one simultaneous assignment.

    Every source is read before any destination is written, and destinations are distinct. So
    a plan stays right when a source is given to another request before it is taken: nothing
    writes to a slot before the copies are done. A source is always a slot whose memory holds
    what is to be read: a copy from a slot that itself waits for one reads that one's source.

    `waiting`: destination -> its copy
    """

    def __init__(self) -> None:
        self.waiting: dict[int, SlotCopy] = {}

    def plan(self, copy: SlotCopy) -> None:
        """Add a copy, in place of one into the same slot that was not done yet."""
        src, dst, num_tokens, start = copy
        earlier = self.waiting.get(src)
        if earlier is not None:
            src = earlier.src  # holds the same tokens, at least as many
        replaced = self.waiting.pop(dst, None)
        if replaced is not None:
            start = min(start, replaced.start)  # beyond it, memory is not yet what it should be
        if src != dst and start < num_tokens:
            self.waiting[dst] = SlotCopy(src, dst, num_tokens, start)

    def cut(self, slot: int, num_tokens: int) -> None:
        """Copy no more into a slot than it will keep."""
        copy = self.waiting.get(slot)
        if copy is not None and num_tokens < copy.num_tokens:
            del self.waiting[slot]
            if copy.start < num_tokens:
                self.waiting[slot] = copy._replace(num_tokens=num_tokens)

    def in_the_way(self, slot: int, num_tokens: int) -> SlotCopy | None:
        """Return a copy that a write into a slot from position `num_tokens` on came too early for."""
        for copy in self.waiting.values():
            if copy.dst == slot or (copy.src == slot and copy.num_tokens > num_tokens):
                return copy
        return None

    def take(self) -> list[SlotCopy]:
        """Return the plan and start an empty one."""
        plan = list(self.waiting.values())
        self.waiting.clear()
        return plan

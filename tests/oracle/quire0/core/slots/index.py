"""The contents of one scope's slots, sorted: who starts as a prompt does, and how far."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from quire0.core.tokens import TOKEN_BYTES, IntArray, Key
from quire.errors import InvariantError

FIRST_STEP = 64 * TOKEN_BYTES
"""Bytes that the first comparison of two keys takes; each further one takes twice as many."""


class SlotIndex:
    """Slots in the order of their contents' bytes, and how much neighbours share.

    `order`   slots with content, sorted by it; contents that are equal stand side by side
    `shared`  shared[i] tokens are the same at the start of order[i] and order[i + 1]; the last
              is 0

    A sorted list with the lengths that neighbours share is a radix tree written flat: slots
    that start with the same n tokens stand side by side, and order[i] and order[k] share
    min(shared[i:k]). So a lookup is a bisection that compares no byte twice: where the bound
    already says how a content compares, the lengths decide. (Manber and Myers, Suffix arrays,
    SIAM Journal on Computing 22(5), 1993, doi:10.1137/0222058, section 2.)

    `keys[slot]` are the contents as key bytes, owned by `SlotContents` and changed here;
    `alone[slot]` is kept as the tokens at the slot's end that no other slot of its scope holds.
    """

    def __init__(self, keys: list[bytearray], alone: IntArray) -> None:
        self.keys = keys
        self.order: list[int] = []
        self.shared: list[int] = []
        self._alone = alone

    def find(self, key: Key) -> tuple[int, list[int]]:
        """Return the longest prefix of `key` in tokens that slots start with, and those slots.

        Pure. No slot starts with the first token: (0, []).
        """
        at, left, right = self._locate(key)
        num_tokens = max(left, right)
        if not num_tokens:
            return 0, []
        return num_tokens, self.order[self._run(at, left, right)]

    def append(self, slot: int, key: Key) -> None:
        """Lengthen a content; O(len(key)) unless another slot continues the old one."""
        content = self.keys[slot]
        if not content:
            content += key
            self._insert(slot)
            return
        at = self.order.index(slot)
        if self.shared[at] * TOKEN_BYTES < len(content):
            content += key
            self._alone[slot] += len(key) // TOKEN_BYTES
            return
        self._remove(at)
        content += key
        self._insert(slot)

    def cut(self, slot: int, num_tokens: int) -> None:
        """Shorten a content to its first `num_tokens` tokens; 0 takes it out."""
        at = self.order.index(slot)
        first = self._first_sharing(at, num_tokens) if num_tokens else at
        del self.keys[slot][num_tokens * TOKEN_BYTES :]
        if num_tokens and first == at:
            self.shared[at] = min(self.shared[at], num_tokens)
            self._weigh(at)
            return
        self._remove(at)
        if num_tokens:
            self._place(slot, first, num_tokens)

    def copy(self, slot: int, source: int, num_tokens: int) -> None:
        """Give a slot without content the first `num_tokens` tokens of another one."""
        self.keys[slot] += memoryview(self.keys[source])[: num_tokens * TOKEN_BYTES]
        self._place(slot, self._first_sharing(self.order.index(source), num_tokens), num_tokens)

    def check(self) -> None:
        """Raise `InvariantError` unless order, shared lengths and `alone` are right."""
        ordered = [bytes(self.keys[slot]) for slot in self.order]
        if ordered != sorted(ordered) or not all(ordered):
            raise InvariantError("contents of slots out of order, or empty in the index")
        shared = [_common(a, memoryview(b), 0) for a, b in pairwise(ordered)]
        if self.shared != [*shared, 0][: len(ordered)]:
            raise InvariantError(f"neighbours share {shared}, noted are {self.shared}")
        for at, slot in enumerate(self.order):
            if self._alone[slot] != self._alone_at(at):
                raise InvariantError(f"slot {slot}: {self._alone[slot]} tokens alone is wrong")

    def _locate(self, key: Key) -> tuple[int, int, int]:
        """Return how many contents come before `key`, and the tokens shared on both sides."""
        shared = self.shared
        low, high = -1, len(self.order)
        left = right = 0
        while high - low > 1:
            middle = (low + high) // 2
            if left >= right:  # order[low] knows more: compare the middle with it
                between = min(shared[low:middle]) if low >= 0 else 0
                if between > left:
                    low = middle
                    continue
                if between < left:
                    high, right = middle, between
                    continue
            else:
                between = min(shared[middle:high])
                if between > right:
                    high = middle
                    continue
                if between < right:
                    low, left = middle, between
                    continue
            content = self.keys[self.order[middle]]
            same = _common(content, key, between)
            end = same * TOKEN_BYTES
            if end < len(key) and content[end : end + 4] < key[end : end + 4].tobytes():
                low, left = middle, same
            else:
                high, right = middle, same
        return high, left, right

    def _run(self, at: int, left: int, right: int) -> slice:
        """Return the part of `order` around `at` that shares max(left, right) tokens."""
        num_tokens, shared = max(left, right), self.shared
        first = at - 1 if left == num_tokens else at
        stop = at + 1 if right == num_tokens else at
        while first and shared[first - 1] >= num_tokens:
            first -= 1
        while stop < len(shared) and shared[stop - 1] >= num_tokens:
            stop += 1
        return slice(first, stop)

    def _first_sharing(self, at: int, num_tokens: int) -> int:
        """Return the first place from which on all share `num_tokens` tokens with place `at`."""
        while at and self.shared[at - 1] >= num_tokens:
            at -= 1
        return at

    def _insert(self, slot: int) -> None:
        at, left, right = self._locate(memoryview(self.keys[slot]))
        if at:
            self.shared[at - 1] = left
        self._place(slot, at, right)

    def _place(self, slot: int, at: int, right: int) -> None:
        self.order.insert(at, slot)
        self.shared.insert(at, right)
        self._weigh(at)

    def _remove(self, at: int) -> None:
        self._alone[self.order[at]] = 0
        gone = self.shared[at]
        del self.order[at], self.shared[at]
        if at:
            self.shared[at - 1] = min(self.shared[at - 1], gone)
        self._weigh(at)

    def _weigh(self, at: int) -> None:
        """Note what the slots around a place hold alone."""
        for each in range(max(at - 1, 0), min(at + 2, len(self.order))):
            self._alone[self.order[each]] = self._alone_at(each)

    def _alone_at(self, at: int) -> int:
        elsewhere = max(self.shared[at], self.shared[at - 1] if at else 0)
        return len(self.keys[self.order[at]]) // TOKEN_BYTES - elsewhere


def common_tokens(content: bytearray, key: Key) -> int:
    """Count the leading tokens that a content and a key share, at memcmp speed."""
    return _common(content, key, 0)


def _common(content: bytes | bytearray, key: Key, start: int) -> int:
    """Count the leading tokens in common; the first `start` are known to be equal."""
    at = start * TOKEN_BYTES
    stop = min(len(content), len(key))
    step = FIRST_STEP
    while at < stop:
        end = min(at + step, stop)
        if not content.startswith(key[at:end], at):
            break
        at = end
        step *= 2
    else:
        return stop // TOKEN_BYTES
    a = np.frombuffer(content, np.int32, (end - at) // TOKEN_BYTES, at)
    b = np.frombuffer(key, np.int32, (end - at) // TOKEN_BYTES, at)
    return at // TOKEN_BYTES + int((a != b).argmax())

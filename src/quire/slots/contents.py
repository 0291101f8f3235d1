"""Tokens, scopes and generations of the slots."""

from __future__ import annotations

import numpy as np

from quire.core.tokens import INT32, TOKEN_BYTES, IntArray, Key
from quire.errors import InvariantError
from quire.scope import NO_SCOPE, Scope
from quire.slots.copies import SlotCopy, SlotCopyPlan
from quire.slots.sorted import Sharers, SortedContents, common_tokens


class SlotContents:
    """The tokens of every slot once the copies planned are done, findable by prefix within a scope.

    `keys[slot]`         token ids of positions [0, n) as key bytes; empty: nothing is there
    `scopes[slot]`       under which scope they were computed
    `generations[slot]`  rises whenever a content gets shorter or is replaced; growing does not
                         count, since what was found there stays true
    `alone[slot]`        tokens at the end of a content that no other slot of the scope holds
    `copies`             the copies planned

    A slot with content stands in `by_scope` of its scope, any other in none.
    """

    interrupted = ""

    def __init__(self, num_slots: int, generation: int = 0) -> None:
        self.keys: list[bytearray] = [bytearray() for _ in range(num_slots)]
        self.scopes: list[Scope] = [NO_SCOPE] * num_slots
        self.generations = [generation] * num_slots
        self.alone: IntArray = np.zeros(num_slots, INT32)
        self.copies = SlotCopyPlan()
        self.by_scope: dict[Scope, SortedContents] = {}

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        return len(self.keys[slot]) // TOKEN_BYTES

    def find(self, scope: Scope, key: Key) -> Sharers:
        """Return the longest prefix of `key` that slots of a scope start with. Pure."""
        contents = self.by_scope.get(scope)
        return contents.find(key) if contents is not None else Sharers(0, [])

    def common(self, slot: int, scope: Scope, key: Key) -> int:
        """Return how many leading tokens a slot shares with a key of a scope."""
        return common_tokens(self.keys[slot], key) if self.scopes[slot] == scope else 0

    def lost(self, slot: int, num_tokens: int) -> int:
        """Return how many tokens no slot would hold if one were cut to `num_tokens`."""
        return min(int(self.alone[slot]), self.length(slot) - num_tokens)

    def append(self, slot: int, key: Key) -> None:
        """Lengthen a content."""
        if not key:
            return
        scope = self.scopes[slot]
        contents = self.by_scope.get(scope)
        if contents is None:
            contents = self.by_scope[scope] = SortedContents(self.keys, self.alone)
        contents.append(slot, key)

    def cut(self, slot: int, num_tokens: int) -> None:
        """Shorten a content to its first `num_tokens` tokens; no change if it has no more."""
        if len(self.keys[slot]) > num_tokens * TOKEN_BYTES:
            self._shorten(slot, num_tokens)
            self.copies.cut(slot, num_tokens)

    def clear(self, slot: int, scope: Scope) -> None:
        """Forget a content; the next one will be of `scope`."""
        self.cut(slot, 0)
        self.scopes[slot] = scope

    def copy(self, slot: int, source: int, num_tokens: int, start: int) -> None:
        """Replace a content by the first `num_tokens` tokens of another slot's, by a planned copy.

        The first `start` of them are there already.
        """
        if self.keys[slot]:
            self._shorten(slot, 0)
        scope = self.scopes[slot] = self.scopes[source]
        self.by_scope[scope].copy(slot, source, num_tokens)
        self.copies.plan(SlotCopy(source, slot, num_tokens, start))

    def _shorten(self, slot: int, num_tokens: int) -> None:
        self.generations[slot] += 1
        scope = self.scopes[slot]
        contents = self.by_scope[scope]
        contents.cut(slot, num_tokens)
        if not contents.order:
            del self.by_scope[scope]

    def check(self) -> None:
        """Raise `InvariantError` unless every content stands in its scope's order, once."""
        found = sorted(slot for each in self.by_scope.values() for slot in each.order)
        if found != [slot for slot, key in enumerate(self.keys) if key]:
            raise InvariantError(f"slots {found} can be found; other ones hold content")
        for scope, contents in self.by_scope.items():
            if any(self.scopes[slot] != scope for slot in contents.order) or not contents.order:
                raise InvariantError(f"{scope!r} has no contents, or another scope's")
            contents.check()
        if self.alone[[not key for key in self.keys]].any():
            raise InvariantError("a slot without content holds tokens alone")

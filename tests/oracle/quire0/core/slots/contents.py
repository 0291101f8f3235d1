"""What the slots hold: token contents, their scopes and generations."""

from __future__ import annotations

import msgspec
import numpy as np

from quire0.core.scope import Scope
from quire0.core.slots.index import SlotIndex, common_tokens
from quire0.core.tokens import INT32, TOKEN_BYTES, IntArray, Key
from quire.errors import InvariantError

NO_SCOPE = Scope()


class Found(msgspec.Struct, frozen=True, gc=False):
    """A lookup's raw result: `slots` all start with the first `num_tokens` tokens."""

    num_tokens: int
    slots: list[int]


class SlotContents:
    """The tokens of every slot, findable by prefix within a scope.

    `keys[slot]`         token ids of positions [0, n) as key bytes; empty: nothing is there
    `scopes[slot]`       under which scope they were computed
    `generations[slot]`  rises whenever a content gets shorter or is replaced; growing does not
                         count, since what was found there stays true
    `alone[slot]`        tokens at the end of a content that no other slot of the scope holds

    A slot with content stands in the index of its scope, any other in none.
    """

    interrupted = ""

    def __init__(self, num_slots: int, generation: int = 0) -> None:
        self.keys: list[bytearray] = [bytearray() for _ in range(num_slots)]
        self.scopes: list[Scope] = [NO_SCOPE] * num_slots
        self.generations = [generation] * num_slots
        self.alone: IntArray = np.zeros(num_slots, INT32)
        self.indexes: dict[Scope, SlotIndex] = {}

    def length(self, slot: int) -> int:
        """Return how many tokens a slot holds."""
        return len(self.keys[slot]) // TOKEN_BYTES

    def find(self, scope: Scope, key: Key) -> Found:
        """Return the longest prefix of `key` that slots of a scope start with. Pure."""
        index = self.indexes.get(scope)
        return Found(*index.find(key)) if index is not None else Found(0, [])

    def common(self, slot: int, scope: Scope, key: Key) -> int:
        """Return how many leading tokens a slot shares with a key of a scope."""
        return common_tokens(self.keys[slot], key) if self.scopes[slot] == scope else 0

    def append(self, slot: int, key: Key) -> None:
        """Lengthen a content."""
        if key:
            scope = self.scopes[slot]
            index = self.indexes.get(scope)
            if index is None:
                index = self.indexes[scope] = SlotIndex(self.keys, self.alone)
            index.append(slot, key)

    def cut(self, slot: int, num_tokens: int) -> None:
        """Shorten a content to its first `num_tokens` tokens; longer than that stays true."""
        if len(self.keys[slot]) <= num_tokens * TOKEN_BYTES:
            return
        self.generations[slot] += 1
        scope = self.scopes[slot]
        index = self.indexes[scope]
        index.cut(slot, num_tokens)
        if not index.order:
            del self.indexes[scope]

    def clear(self, slot: int, scope: Scope) -> None:
        """Forget a content; the next one will be of `scope`."""
        self.cut(slot, 0)
        self.scopes[slot] = scope

    def copy(self, slot: int, source: int, num_tokens: int) -> None:
        """Replace a content by the first `num_tokens` tokens of another slot's."""
        scope = self.scopes[source]
        self.cut(slot, 0)
        self.scopes[slot] = scope
        self.indexes[scope].copy(slot, source, num_tokens)

    def check(self) -> None:
        """Raise `InvariantError` unless every content stands in its scope's index, once."""
        indexed = sorted(slot for index in self.indexes.values() for slot in index.order)
        if indexed != [slot for slot, key in enumerate(self.keys) if key]:
            raise InvariantError(f"slots {indexed} are indexed; other ones hold content")
        for scope, index in self.indexes.items():
            if any(self.scopes[slot] != scope for slot in index.order) or not index.order:
                raise InvariantError(f"the index of {scope!r} is empty or holds another's slots")
            index.check()
        if self.alone[[not key for key in self.keys]].any():
            raise InvariantError("a slot without content holds tokens alone")


class Ghosts:
    """The contents that were overwritten last, so that a later miss can say why.

    As many as there are slots; tokens only, no KV. `SlotContents` finds them again.
    """

    def __init__(self, num_slots: int) -> None:
        self._contents = SlotContents(num_slots)
        self._next = 0

    def remember(self, key: bytearray, scope: Scope) -> None:
        """Note a content that is about to be overwritten; the oldest one noted is forgotten."""
        self._contents.clear(self._next, scope)
        with memoryview(key) as view:
            self._contents.append(self._next, view)
        self._next = (self._next + 1) % len(self._contents.keys)

    def find(self, scope: Scope, key: Key) -> int:
        """Return the longest prefix of `key` that was held and is not any more, in tokens."""
        return self._contents.find(scope, key).num_tokens

    @property
    def keys(self) -> list[bytearray]:
        """The contents noted."""
        return self._contents.keys

    def check(self) -> None:
        """Raise `InvariantError` unless they can be found as they should."""
        self._contents.check()

    def forget(self) -> None:
        """Forget all of them."""
        for slot in range(len(self._contents.keys)):
            self._contents.clear(slot, NO_SCOPE)

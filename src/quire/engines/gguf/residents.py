"""Sequences that are resident in a context of llama.cpp, for the requests that run, and of some that have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.core.tokens import TOKEN_BYTES
from quire.engines.gguf.context import SCRATCH, Context, NoCells
from quire.errors import InvariantError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from quire.core import Scope, Sequence

IDLE_STEPS = 64
"""Steps in which an idle resident costs others about as much as restoring it."""


class Resident:
    """A sequence of llama.cpp: positions `[0, num_tokens)` of `scope` and `key`, the tokens' bytes.

    ids    its ids; a windowed model's second id guards cells behind the window
    owner  the request that it is of; None: it is idle, and all of it is in host memory
    used   the step that used it last
    lacks_state  whether its recurrent state is still to be restored, of a model that keeps some
    """

    def __init__(self, ids: tuple[int, ...], scope: Scope, owner: Sequence) -> None:
        self.ids, self.scope = ids, scope
        self.key = bytearray()
        self.owner: Sequence | None = owner
        self.used = 0
        self.lacks_state = False

    @property
    def num_tokens(self) -> int:
        """Its positions."""
        return len(self.key) // TOKEN_BYTES


class SequencePool:
    """The residents of a context, each of `width` ids.

    `save`  called with a resident whose request runs, before it has to go: what only it has goes to host memory

    Cells that residents share count once, and llama.cpp alone counts them: where it has none left, `make_room` drops the
    least recently used idle resident, then one of a request that is not needed now.

    `idle_steps`  steps that a resident outlives its request

    len(free ids) + width * len(residents) == number of ids - 1 (the scratch sequence)
    """

    def __init__(self, context: Context, width: int, save: Callable[[Resident], None]) -> None:
        self.context, self.width, self._save = context, width, save
        self.step, self.idle_steps = 0, IDLE_STEPS
        self._start()

    def _start(self) -> None:
        numbers = range(SCRATCH + 1, self.context.num_ids - self.width + 1, self.width)
        self._free = [tuple(range(each, each + self.width)) for each in reversed(numbers)]
        self._num_ids = len(self._free)
        self.by_owner: dict[Sequence, Resident] = {}
        self.idle: dict[Resident, None] = {}  # the least recently used first

    @property
    def most_running(self) -> int:
        """The most requests that can be resident at once."""
        return self._num_ids

    def longest(self, scope: Scope, key: bytes) -> tuple[Resident | None, int]:
        """Return the resident with the longest prefix of a key, and its tokens; None for none. Pure."""
        best, most = None, 0
        for each in (*self.by_owner.values(), *self.idle):
            if each.scope == scope and (num := common(each.key, key)) > most:
                best, most = each, num
        return best, most

    def adopt(
        self, owner: Sequence, scope: Scope, key: bytes, needed: Collection[Sequence]
    ) -> Resident:
        """Return a new resident for a request, with as much of `key` as another one has.

        An idle one that has nothing else is taken over. Others make room, but those of `needed`. Raises `NoCells`.
        """
        found, num_tokens = self.longest(scope, key)
        if not self.context.layout.num_words:  # a state is of one length
            found, num_tokens = None, 0
        if found is not None and found in self.idle and found.num_tokens == num_tokens:
            del self.idle[found]
            found.owner = owner
        else:
            while not self._free:
                self.make_room(needed, but=found)
            ids = self._free.pop()
            if found is not None:
                self.context.share(found.ids[0], ids, 0, num_tokens)
                if found in self.idle:  # used
                    self.idle[found] = self.idle.pop(found)
                    found.used = self.step
            found = Resident(ids, scope, owner)
            found.key[:] = key[: num_tokens * TOKEN_BYTES]
        found.used = self.step
        found.lacks_state = self.context.state_bytes > 0 and len(key) > 0
        self.by_owner[owner] = found
        return found

    def cut(self, resident: Resident, num_tokens: int) -> None:
        """Forget a resident's positions from `num_tokens` on."""
        if num_tokens < resident.num_tokens:
            self.context.cut(resident.ids, num_tokens)
            del resident.key[num_tokens * TOKEN_BYTES :]

    def release(self, owner: Sequence) -> None:
        """Have a resident outlive its request, all of which is in host memory."""
        resident = self.by_owner.pop(owner)
        resident.owner = None
        if resident.num_tokens:
            self.idle[resident] = None
        else:
            self._give_back(resident)

    def make_room(self, needed: Collection[Sequence], but: Resident | None = None) -> None:
        """Drop one resident. Raises `NoCells` where all are needed."""
        for each in self.idle:
            if each is not but:
                del self.idle[each]
                self._give_back(each)
                return
        for owner, each in self.by_owner.items():
            if owner not in needed and each is not but:
                self._save(each)
                del self.by_owner[owner]
                self._give_back(each)
                return
        raise NoCells("all sequences of the context are needed at once")

    def begin_step(self) -> None:
        """Count a step, and drop residents that were idle for too many."""
        self.step += 1
        while self.idle:
            oldest = next(iter(self.idle))
            if self.step - oldest.used <= self.idle_steps:
                return
            del self.idle[oldest]
            self._give_back(oldest)

    def drop(self, owner: Sequence) -> None:
        """Drop a request's resident with all that only it has."""
        self._give_back(self.by_owner.pop(owner))

    def clear(self, *, data: bool = False) -> None:
        """Drop all residents, with all that only they have; with `data` their bytes are overwritten."""
        self.context.clear(data=data)
        self._start()

    def check(self) -> None:
        """Raise `InvariantError` unless each sequence has the positions that its resident has, and no other any."""
        residents = [*self.by_owner.values(), *self.idle]
        wanted = {number: each.num_tokens for each in residents for number in each.ids}
        for number in range(self.context.num_ids):
            num = wanted.get(number, 0)
            first = num - 1 if self.context.state_bytes else 0
            extent = (first, num - 1) if num else (-1, -1)
            if (found := self.context.extent(number)) != extent:
                raise InvariantError(f"sequence {number} has positions {found}, not {extent}")
        if len(self._free) + len(residents) != self._num_ids:
            raise InvariantError(f"{len(residents)} residents and {len(self._free)} free ids")
        if any(each.owner is not owner for owner, each in self.by_owner.items()):
            raise InvariantError("a resident is kept for another request than its own")

    def _give_back(self, resident: Resident) -> None:
        self.context.cut(resident.ids)
        self._free.append(resident.ids)


def common(one: bytes | bytearray, other: bytes) -> int:
    """Return how many leading tokens two keys have in common."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size // TOKEN_BYTES
    a, b = (np.frombuffer(each, np.int32, size // TOKEN_BYTES) for each in (bytes(one), other))
    return int((a != b).argmax())

"""Which session a prompt belongs to: a number for each, and which prompts sessions share."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from quire.core.distances import Ints, Words
from quire.core.node import Node
from quire.core.tokens import TOKEN_BYTES, Key

NAME_BYTES = 48
"""Bytes of a prompt that name its session: the end of its first block that is not shared."""

SCOPE_BYTES = 8
"""Room for a scope's name behind those bytes."""

LITTLE = 0.05
"""Where less than this share of tokens is in sessions that share a prompt unnoticed, they are left alone."""

ALMOST_ALL = 0.75
"""A prompt that this share of requests begins with is looked behind first of all."""

MOST_FORKS = 1 << 10
"""So many runs that go on in several ways are kept in sight, the latest."""

MOST_PARTINGS = 1 << 12
"""So many shared prompts are told apart."""

MIX = np.arange(1, (NAME_BYTES + SCOPE_BYTES) // 4, 2, dtype=np.uint64) * np.uint64(
    0x9E3779B97F4A7C15
)
"""Odd multiples of 2**64 / golden ratio: a word of a name times one of them is mixed."""

Place: TypeAlias = "slice[int, int, None]"


class Numbering:
    """Numbers the sessions of prompts.

    A session's name is the end of the first block below the prompt that sessions share. A
    name that was looked up in a prompt gets a number, and the tree's node where the cached part
    ends keeps that as a label; what grows below inherits it. So a session that goes on is known without
    a look at its text, and a name may have several numbers. `open` does all this in line.

    Which prompts are shared the tree tells: where a run of blocks goes on in several ways, sessions
    part, and are named by the block that follows.

    `names`     by number, from `base` on; `since` is the first number that still holds
    `first`     where in a prompt the name is, if it begins with no shared prompt that is known; in block `depth`
    `surely`    tokens of a prompt without which it has no name
    `partings`  names that many sessions have, and where in a prompt those part
    """

    def __init__(self, block_size: int, forks: deque[Node]) -> None:
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._forks = forks
        self.base = 1
        self.names: list[bytes] = []
        self.name_at(1)

    def name_at(self, depth: int) -> None:
        """Name sessions by block `depth` of their prompts from now on, or further down."""
        self.depth = depth
        self.first = self._place(depth)
        self.surely = self.first.stop // TOKEN_BYTES
        self.partings: dict[bytes, Place] = {}
        self.forget_names()

    def forget_names(self) -> None:
        """Forget the names that were given."""
        self.base += len(self.names)
        self.since = self.base
        self.names = []
        self._above: dict[int, tuple[bytes, int]] = {}

    def number_below(self, key: Key, name: bytes, node: Node) -> int:
        """Return the number of a prompt's session behind the prompts that many share; `node` keeps it.

        Unless more of the prompt would be needed to tell.
        """
        stop, above = self.first.stop, b""
        scope = name[stop - self.first.start :]
        place = self.partings.get(name)
        while place is not None and stop < place.stop <= len(key):
            above, name, stop = name, key[place].tobytes() + scope, place.stop
            place = self.partings.get(name)
        if above:
            self._above[len(self.names)] = above, stop // TOKEN_BYTES - self._block_size
        number = self.base + len(self.names)
        self.names.append(name)
        is_sure = place is None or place.stop <= stop
        if is_sure and stop <= node.end * self._block_bytes:
            node.label = number
        return number

    def learn(self, tokens: Sequence[int], numbers: Sequence[int]) -> float:
        """See which prompts sessions share, and tell these apart if that matters for the latest requests.

        Takes the tokens and the numbers of those requests. Returns which share of these tokens is in
        requests whose names will change.
        """
        forks = dict.fromkeys(self._forks)
        self._forks.clear()
        found: dict[bytes, int] = {}
        for node in forks:
            if node.parent is None or node.end <= self.depth:
                continue
            self._forks.append(node)
            if node.label < self.since:
                continue
            name = self.names[node.label - self.base]
            known = self.partings.get(name)
            if known is None or self._place(node.end).stop < known.stop:
                found[name] = min(node.end, found.get(name, node.end))
        if not found:
            return 0.0
        names = self.names_of(numbers)
        concerned = sum(n for n, name in zip(tokens, names, strict=True) if name in found)
        share = concerned / sum(tokens)
        if share < LITTLE:
            return 0.0
        self.partings |= {name: self._place(depth) for name, depth in found.items()}
        if len(self.partings) > MOST_PARTINGS:
            self.partings.clear()
        self.since = self.base + len(self.names)
        return share

    def common_depth(self, numbers: Sequence[int]) -> int:
        """Return where sessions part if nearly all of these have one prompt in common, else as before."""
        name, times = Counter(self.names_of(numbers)).most_common(1)[0]
        if times < ALMOST_ALL * len(numbers) or name not in self.partings:
            return self.depth
        return self.partings[name].stop // self._block_bytes - 1

    def names_of(self, numbers: Sequence[int]) -> list[bytes]:
        """Return the names that have these numbers."""
        return [self.names[number - self.base] for number in numbers]

    def units(self, numbers: Ints) -> Words:
        """Return a mixed number for each session, equal where the names are, uint64 [n]."""
        return _mixed_names(self.names)[numbers - self.base]

    def shared_above(self, numbers: Ints) -> tuple[Words, Ints] | None:
        """Return the shared prompt that each session is below, 0 for none, and its tokens: uint64, int64 [n]."""
        if not self._above:
            return None
        family, told = np.zeros(len(self.names), np.uint64), np.zeros(len(self.names), np.int64)
        above, tokens = zip(*self._above.values(), strict=True)
        at = list(self._above)
        family[at], told[at] = _mixed_names(above), tokens
        return family[numbers - self.base], told[numbers - self.base]

    def _place(self, depth: int) -> Place:
        """Return where in a prompt the name is that block number `depth` gives."""
        stop = (depth + 1) * self._block_bytes
        return slice(stop - min(self._block_bytes, NAME_BYTES), stop)


def scope_name(root: Node) -> bytes:
    """Return bytes that name a scope."""
    return root.named.tobytes() if root.named else b""


def _mixed_names(names: Sequence[bytes]) -> Words:
    """Return a number for each name, uint64 [names]."""
    padded = np.fromiter(names, f"S{NAME_BYTES + SCOPE_BYTES}", len(names))
    return mixed(padded.view(np.uint64).reshape(len(names), -1) @ MIX)


def mixed(numbers: Words) -> Words:
    """Return numbers that differ in all bits, uint64 [n]."""
    numbers = (numbers ^ (numbers >> np.uint64(31))) * MIX[0]
    return numbers ^ (numbers >> np.uint64(29))

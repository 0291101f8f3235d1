"""The live curve: what any capacity would find, from a short note per request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np

from quire.core.distances import Ints, Sample, Words, hit_curve
from quire.core.node import Node
from quire.core.stats import Counters
from quire.core.tokens import TOKEN_BYTES, Key
from quire.core.whatif import WhatIf

NOTE = 3
"""Entries of a note: tokens of a prompt; those that were found or, where the cache forgot, minus all
that seem to have been there once; bytes that name its session."""

MAX_SAMPLES = 1 << 15
"""Requests that are remembered, 64 bytes each. Beyond, every second session is forgotten."""

BATCH = 1 << 13
"""Requests between two readings of the notes, which take about 200 bytes each."""

WITH_WORDS = 1 << 9
"""So many requests of each batch are noted with a word of their text."""

LEARN_AT = tuple(1 << bits for bits in range(6, 13))
"""Notes in the first batch after which is decided where sessions part; then at the end of each."""

LEARN_FROM = 8
"""One in so many of the requests until then decides it, the latest, but at least 64."""

BEGIN_ANEW = 1 << 10
"""Up to so many notes that were named too soon are dropped."""

NAME_BYTES = 48
"""Bytes of a prompt that tell sessions apart: the end of their first block that is not shared."""

SCOPE_BYTES = 8
"""Room for a scope's name behind those bytes."""

WORD_BYTES = 8
"""Bytes of a prompt that tell whether two prompts are still the same there: two tokens."""

FAMILY = 3
"""So many requests of one name that leave each other's text at one place are sessions of a shared prompt."""

MOST_PARTINGS = 1 << 12
"""So many shared prompts are told apart."""

ALMOST_ALL = 0.75
"""A prompt that this share of requests begins with is looked behind in line."""

MUCH = 0.25
"""Where more than this share of requests was named too soon, what was noted before is of no use."""

MIX = np.arange(1, (NAME_BYTES + SCOPE_BYTES) // 4, 2, dtype=np.uint64) * np.uint64(
    0x9E3779B97F4A7C15
)
"""Odd multiples of 2**64 / golden ratio: a word of a name times one of them is mixed."""

ALL = (1 << 64) - 1

NEVER = -(1 << 62)
"""Tokens: less is never found."""


class CurveSampler:
    """Makes a hit-rate curve, when asked, of a note per request.

    A note is the size of a prompt, how much of it was found, and a few bytes of its text that name
    its session: the end of the first block below the prompt that sessions share. So a request
    costs at most a copy of some bytes and a longer list, in line in `open`; no prompt is hashed, the node of a
    session that goes on has its name as a label, and what is noted need not be counted. Which prompts
    sessions share is learned from the notes: where several requests of one name leave each other's
    text at the same place, a session's name is that of the block behind it, and so on. Where
    the cache forgot how much of a prompt is as in the session's request before, a word of each
    tells, the two tokens that end at the largest power of two within the prompt. It is kept for the
    first 512 of 8,192 requests, which stand for all. The notes are read 8,192 at a time.

    Memory is bounded by sampling sessions (C. A. Waldspurger et al., *Efficient MRC construction
    with SHARDS*, 2015, USENIX FAST): all of them until `MAX_SAMPLES` requests are remembered, then those
    whose number is below a limit that is halved each time. Times are of all requests.

    `notes`     of the requests since they were last read, one after the other
    `name`      where in a prompt the bytes are that name its session
    `depth`     the number of the block that it is in
    `unsure`    tokens; of who finds fewer a word of the text is kept
    `partings`  names that many sessions have, and where in a prompt those part
    `epoch`     what the labels of nodes carry as long as they hold

    len(sample) <= MAX_SAMPLES; the sampled units are those with unit <= limit.
    """

    def __init__(self, block_size: int, counters: Counters) -> None:
        self._block_size = block_size
        self._counters = counters
        self.notes: list[Any] = []
        self._num_counted = 0
        self.restart()

    def restart(self) -> None:
        """Forget all requests; the curve is of those from now on."""
        self.count()
        self._num_read = 0
        self._halvings = 0
        self.depth = 0
        self._samples = [Sample.of(0)]
        self._clock = 0
        self._begin(1)
        self._learn_at = list(LEARN_AT)

    def look(self) -> None:
        """Read the notes if they are many; see whether sessions part further down.

        Wants to be called every 64 requests.
        """
        num_notes = self._num_notes
        if self._learn_at and num_notes >= self._learn_at[0]:
            del self._learn_at[0]
            is_much = self._learn()
            if is_much and num_notes <= BEGIN_ANEW and not any(map(len, self._samples)):
                self.count()
                self._num_read += num_notes
                self._begin(self._common_depth())
                num_notes = 0
        if num_notes >= WITH_WORDS:
            self.unsure = NEVER
        if num_notes >= BATCH:
            self._learn()
            self._read()
            self._learn_at.clear()

    def deeper(self, key: Key, name: bytes, node: Node) -> bytes:
        """Return the name of a prompt's session behind the prompts that many share.

        The node where the cached part ends keeps it for the next request there, if all that it
        depends on lies above.
        """
        family, stop = b"", self.name.stop
        scope = name[stop - self.name.start :]
        while (place := self.partings.get(name)) is not None and stop < place.stop <= len(key):
            family, name, stop = name, key[place].tobytes() + scope, place.stop
        if family:
            self._families[name] = family, stop // TOKEN_BYTES - self._block_size
        ends_behind = stop <= node.end * self._block_size * TOKEN_BYTES
        if ends_behind and (place is None or place.stop <= stop):
            node.label = self.epoch, name
        return name

    def keep_word(self, key: Key, num_tokens: int) -> None:
        """Keep the two tokens of the next prompt that end at the largest power of two within it."""
        end = TOKEN_BYTES << num_tokens.bit_length() >> 1
        if end >= WORD_BYTES:
            self._words[self._num_notes] = key[end - WORD_BYTES : end].tobytes()

    def count(self) -> None:
        """Add the requests that were noted since the last time to the counters; `open` leaves them to this."""
        self._add(*self._columns(self._num_counted))

    def _add(self, prompt: Ints, reused: Ints) -> None:
        """Count requests; of those that the cache forgot, `open` has counted what was found and what not."""
        self._num_counted += len(prompt)
        counters, missed = self._counters, self._counters.missed
        counters.prompt_tokens += prompt.sum().item()
        counters.hit_tokens += np.maximum(reused, 0).sum().item()
        missed["last_token"] += len(prompt)
        missed["cold"] += counters.prompt_tokens - counters.hit_tokens - sum(missed.values())

    @property
    def num_requests(self) -> int:
        """Requests since the curve was begun."""
        return self._num_read + self._num_notes

    @property
    def _num_notes(self) -> int:
        return len(self.notes) // NOTE

    @property
    def rate(self) -> float:
        """Share of the sessions that are sampled."""
        return 0.5**self._halvings

    def what_if(self, capacity_blocks: int) -> WhatIf:
        """Return the curve of the requests so far."""
        self._read()
        sample = self._all()
        corners, found = hit_curve(sample, self._block_size, self.rate)
        return WhatIf(
            capacity_blocks=capacity_blocks,
            capacities=corners / self._block_size,
            token_hit=found,
            num_requests=self._num_read,
            sampled_requests=len(sample),
            rate=self.rate,
        )

    def _begin(self, depth: int) -> None:
        """Tell sessions apart by block number `depth` of their prompts from now on, or further down."""
        if depth != self.depth:
            self.partings: dict[bytes, slice[int, int, None]] = {}
            self._leaving: dict[tuple[bytes, int], int] = {}
        self.depth = depth
        self.name = self._place(depth)
        self._surely = self.name.stop // TOKEN_BYTES
        self._generated = self._generated_tokens()
        self._forget_notes()

    def _forget_notes(self) -> None:
        self.notes, self._num_counted = [], 0
        self._words: dict[int, bytes] = {}
        self._families: dict[bytes, tuple[bytes, int]] = {}
        self.epoch = object()
        self.unsure = self._surely

    def _generated_tokens(self) -> int:
        counters = self._counters
        return counters.computed_tokens + counters.hit_tokens - counters.prompt_tokens

    def _place(self, depth: int) -> slice[int, int, None]:
        """Return where in a prompt the name is that block number `depth` gives."""
        block_bytes = self._block_size * TOKEN_BYTES
        stop = (depth + 1) * block_bytes
        return slice(stop - min(block_bytes, NAME_BYTES), stop)

    def _learn(self) -> bool:
        """See below which prompts several sessions part, from the latest notes; return whether much changes."""
        first = self._num_notes - max(LEARN_AT[0], self._num_notes // LEARN_FROM)
        names = self._names(first)
        prompt, reused = self._columns(first)
        places = abs(reused) // self._block_size
        # Behind the place where it left what was there, a whole block goes on.
        leaves = (places > self.depth) & (places < (prompt - 1) // self._block_size)
        leaving, found = self._leaving, set[bytes]()
        for left in zip(compress(names, leaves), places[leaves].tolist(), strict=True):
            times = leaving[left] = leaving.get(left, 0) + 1
            if times != FAMILY:
                continue
            name, place = left
            known = self.partings.get(name)
            if known is None or self._place(place).stop < known.stop:
                self.partings[name] = self._place(place)
                found.add(name)
        if len(leaving) > MOST_PARTINGS:
            leaving.clear()
        if len(self.partings) > MOST_PARTINGS:
            self.partings.clear()
        if not found:
            return False
        self.epoch = object()
        return sum(name in found for name in names) > MUCH * len(names)

    def _common_depth(self) -> int:
        """Return where sessions part if nearly all of the latest have one prompt in common, else as before."""
        latest = self._names(self._num_notes - LEARN_AT[0])
        name, times = Counter(latest).most_common(1)[0]
        if times < ALMOST_ALL * len(latest) or name not in self.partings:
            return self.depth
        return self.partings[name].stop // (self._block_size * TOKEN_BYTES) - 1

    def _read(self) -> None:
        """Turn the notes into samples."""
        if not self.notes:
            return
        more = self._noted()
        self._num_read += len(more)
        self._forget_notes()
        if self._halvings:
            more = more.where(more.unit <= np.uint64(ALL >> self._halvings))
        self._samples.append(more)
        if sum(map(len, self._samples)) > MAX_SAMPLES:
            self._thin()

    def _all(self) -> Sample:
        """Return all samples, joined."""
        if len(self._samples) > 1:
            self._samples = [Sample.joined(self._samples)]
        return self._samples[0]

    def _thin(self) -> None:
        """Forget every second session until the samples are few enough."""
        sample = self._all()
        while len(sample) > MAX_SAMPLES:
            self._halvings += 1
            sample = sample.where(sample.unit <= np.uint64(ALL >> self._halvings))
        self._samples = [sample]

    def _noted(self) -> Sample:
        """Return the notes as columns; generated tokens are spread evenly over the requests."""
        num_notes = self._num_notes
        more = Sample.of(num_notes)
        more.prompt, more.reused = self._columns(0)
        self._add(more.prompt[self._num_counted :], more.reused[self._num_counted :])
        more.unit = _session_numbers(self._names(0))
        more.word = _word_numbers(self._words, num_notes)
        if self._families:
            more.family, more.told = self._families_of(more.unit)
        generated = self._generated_tokens()
        between = max(generated - self._generated, 0) // num_notes
        # Prompts that are not computed yet count as less: only the highest count is sure.
        self._generated = max(generated, self._generated)
        more.size = more.prompt - 1
        more.size -= more.size % self._block_size
        touched = (more.size + between).cumsum()
        touched += self._clock
        self._clock = touched.item(-1)
        more.begun = touched - more.size
        short = more.prompt <= self._surely
        if short.any():
            more.unit[short] = _mixed(~more.begun[short].astype(np.uint64))
        return more

    def _families_of(self, unit: Words) -> tuple[Words, Ints]:
        """Return the shared prompt that each session is below, 0 for none, and its tokens: uint64, int64 [notes]."""
        known = _session_numbers(list(self._families))
        above, tokens = zip(*self._families.values(), strict=True)
        order = known.argsort()
        at = order[np.searchsorted(known, unit, sorter=order) % len(order)]
        told = known[at] == unit
        return _session_numbers(above)[at] * told, np.array(tokens)[at] * told

    def _columns(self, first: int) -> Any:
        """Return the tokens of notes from the first one on, and those reused: int64 [2, notes]."""
        columns = (self.notes[NOTE * first + entry :: NOTE] for entry in range(2))
        return np.array([np.fromiter(column, np.int64, len(column)) for column in columns])

    def _names(self, first: int) -> list[bytes]:
        """Return the names in the notes from the first one on."""
        return self.notes[NOTE * first + 2 :: NOTE]


def scope_name(root: Node) -> bytes:
    """Return bytes that name a scope."""
    return root.named.tobytes() if root.named else b""


def _session_numbers(names: Sequence[bytes]) -> Words:
    """Return a number for each session's name, uint64 [names]."""
    padded = np.fromiter(names, f"S{NAME_BYTES + SCOPE_BYTES}", len(names))
    return _mixed(padded.view(np.uint64).reshape(len(names), -1) @ MIX)


def _word_numbers(words: dict[int, bytes], num_notes: int) -> Words:
    """Return a number for each note's word, 0 where none was kept, uint64 [notes]."""
    numbers = np.zeros(num_notes, np.uint64)
    if words:
        kept = np.frombuffer(b"".join(words.values()), np.uint64)
        numbers[list(words)] = _mixed(kept) | np.uint64(1)
    return numbers


def _mixed(numbers: Words) -> Words:
    """Return numbers that differ in all bits, uint64 [n]."""
    numbers = (numbers ^ (numbers >> np.uint64(31))) * MIX[0]
    return numbers ^ (numbers >> np.uint64(29))

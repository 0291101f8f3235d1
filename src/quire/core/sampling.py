"""The live curve: what any capacity would find, from a short note per request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.core.distances import Sample, Words, hit_curve
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
"""Odd multiples of 2**64 / golden ratio: a word times one of them is mixed."""

ALL = (1 << 64) - 1


class CurveSampler:
    """Makes a hit-rate curve, when asked, of a note per request.

    A note is the size of a prompt, how much of it was found, and a few bytes of its text that name
    its session: the end of the first block below the prompt that sessions share. So a request
    costs one copy of some bytes and an append, in line in `open`; no prompt is hashed. Which prompts
    sessions share is learned from the notes: where several requests of one name leave each other's
    text at the same place, a session's name is that of the block behind it, and so on. Where
    the cache forgot how much of a prompt is as in the session's request before, a word of each
    tells, the two tokens that end at the largest power of two within the prompt. It is kept for the
    first 512 of 8,192 requests, which stand for all. The notes are read 8,192 at a time.

    Memory is bounded by sampling sessions (C. A. Waldspurger et al., *Efficient MRC construction
    with SHARDS*, 2015, USENIX FAST): all of them until `MAX_SAMPLES` requests are remembered, then those
    whose number is below a limit that is halved each time. Times are of all requests.

    `note`        takes a request's (tokens, reused ones, name)
    `name`        where in a prompt the bytes are that name its session
    `with_words`  whether a word of the text is kept, where the cache forgot or a session begins
    `surely`      tokens; who finds as many goes on with a session
    `partings`    names that many sessions have, and where in a prompt those part
    `epoch`       what the labels of nodes carry as long as they hold

    len(sample) <= MAX_SAMPLES; the sampled units are those with unit <= limit.
    """

    def __init__(self, block_size: int, counters: Counters) -> None:
        self._block_size = block_size
        self._counters = counters
        self.restart()

    def restart(self) -> None:
        """Forget all requests; the curve is of those from now on."""
        self._num_read = 0
        self._halvings = 0
        self._depth = 0
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
                self._num_read += num_notes
                self._begin(self._common_depth())
                num_notes = 0
        self.with_words = num_notes < WITH_WORDS
        if num_notes >= BATCH:
            self._learn()
            self._read()
            self._learn_at.clear()

    def deeper(self, key: Key, name: bytes, node: Node, reused: int) -> bytes:
        """Return the name of a prompt behind the prompts that many share.

        A node that lies behind it keeps it, for the next request that ends there.
        """
        family, stop = name, 0
        scope = name[self.name.stop - self.name.start :]
        while (place := self.partings.get(name)) is not None and stop < place.stop <= len(key):
            family, name, stop = name, key[place].tobytes() + scope, place.stop
        num_tokens = stop // TOKEN_BYTES
        if stop:
            self._families[name] = family, num_tokens - self._block_size
        if 0 < num_tokens <= reused:
            node.label = self.epoch, name
        return name

    def keep_word(self, key: Key, num_tokens: int) -> None:
        """Keep the two tokens of the last prompt that end at the largest power of two within it."""
        end = TOKEN_BYTES << num_tokens.bit_length() >> 1
        if end >= WORD_BYTES:
            self._words[len(self._notes)] = key[end - WORD_BYTES : end].tobytes()

    @property
    def num_requests(self) -> int:
        """Requests since the curve was begun."""
        return self._num_read + self._num_notes

    @property
    def _num_notes(self) -> int:
        return len(self._notes) // NOTE

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
        if depth != self._depth:
            self.partings: dict[bytes, slice[int, int, None]] = {}
            self._leaving: dict[tuple[bytes, int], int] = {}
        self._depth = depth
        self.name = self._place(depth)
        self.surely = self.name.stop // TOKEN_BYTES
        self._generated = self._generated_tokens()
        self._forget_notes()

    def _forget_notes(self) -> None:
        self._notes: list[Any] = []
        self._words: dict[int, bytes] = {}
        self._families: dict[bytes, tuple[bytes, int]] = {}
        self.epoch = object()
        self.note = self._notes.extend
        self.with_words = True

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
        count = max(LEARN_AT[0], self._num_notes // LEARN_FROM)
        latest, size = iter(self._notes[-NOTE * count :]), self._block_size
        depth, leaving, found = self._depth, self._leaving, set[bytes]()
        for num_tokens, reused, name in zip(latest, latest, latest, strict=True):
            place = abs(reused) // size
            # Behind the place where it left what was there, a whole block goes on.
            if not depth < place < (num_tokens - 1) // size:
                continue
            number = leaving[name, place] = leaving.get((name, place), 0) + 1
            known = self.partings.get(name)
            if number == FAMILY and (known is None or self._place(place).stop < known.stop):
                self.partings[name] = self._place(place)
                found.add(name)
        if len(leaving) > MOST_PARTINGS:
            leaving.clear()
        if len(self.partings) > MOST_PARTINGS:
            self.partings.clear()
        if found:
            self.epoch = object()
        return sum(name in found for name in self._notes[2::NOTE][-count:]) > MUCH * count

    def _common_depth(self) -> int:
        """Return where sessions part if nearly all of the latest have one prompt in common, else as before."""
        latest = self._notes[2::NOTE][-LEARN_AT[0] :]
        name, number = Counter(latest).most_common(1)[0]
        if number < ALMOST_ALL * len(latest) or name not in self.partings:
            return self._depth
        return self.partings[name].stop // (self._block_size * TOKEN_BYTES) - 1

    def _read(self) -> None:
        """Turn the notes into samples."""
        if not self._notes:
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
        more.prompt = np.fromiter(self._notes[::NOTE], np.int64, num_notes)
        more.reused = np.fromiter(self._notes[1::NOTE], np.int64, num_notes)
        more.family, more.told = np.zeros(num_notes, np.uint64), np.zeros(num_notes, np.int64)
        more.unit = _session_numbers(self._notes[2::NOTE])
        more.word = _word_numbers(self._words, num_notes)
        names: list[bytes] = self._notes[2::NOTE]
        families = self._families
        if told := [at for at, name in enumerate(names) if name in families] if families else []:
            known = [families[names[at]] for at in told]
            more.family[told] = _session_numbers([family for family, _ in known])
            more.told[told] = [tokens for _, tokens in known]
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
        short = more.prompt <= self.surely
        if short.any():
            more.unit[short] = _mixed(~more.begun[short].astype(np.uint64))
        return more


def scope_name(root: Node) -> bytes:
    """Return bytes that name a scope."""
    return root.named.tobytes() if root.named else b""


def _session_numbers(names: Sequence[bytes]) -> Words:
    """Return a number for each session's name, uint64 [notes]."""
    text = b"".join(names)
    if len(text) != len(names) * NAME_BYTES:
        width = NAME_BYTES + SCOPE_BYTES
        text = b"".join(name.ljust(width, b"\0") for name in names)
    words = np.frombuffer(text, np.uint64).reshape(len(names), -1)
    return _mixed(words @ MIX[: words.shape[1]])


def _word_numbers(words: dict[int, bytes], num_notes: int) -> Words:
    """Return a number for each note's word, 0 where none was kept, uint64 [notes]."""
    numbers = np.zeros(num_notes, np.uint64)
    if words:
        notes = np.fromiter(words, np.int64) // NOTE - 1
        numbers[notes] = _mixed(np.frombuffer(b"".join(words.values()), np.uint64)) | np.uint64(1)
    return numbers


def _mixed(numbers: Words) -> Words:
    """Return numbers that differ in all bits, uint64 [n]."""
    numbers = (numbers ^ (numbers >> np.uint64(31))) * MIX[0]
    return numbers ^ (numbers >> np.uint64(29))

"""The live curve: what any capacity would find, from a short note per request."""

from __future__ import annotations

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
"""Requests that are remembered, 48 bytes each. Beyond, every second session is forgotten."""

BATCH = 1 << 13
"""Requests between two readings of the notes, which take about 200 bytes each."""

WITH_WORDS = 1 << 9
"""So many requests of each batch are noted with a word of their text."""

LEARN_AT = (64, WITH_WORDS)
"""Notes in the first batch after which is decided where sessions part."""

LEARN_FROM = 64
"""The latest requests that decide it."""

NAME_BYTES = 48
"""Bytes of a prompt that tell sessions apart: the end of their first block that is not shared."""

SCOPE_BYTES = 8
"""Room for a scope's name behind those bytes."""

WORD_BYTES = 8
"""Bytes of a prompt that tell whether two prompts are still the same there: two tokens."""

DIVERGING = 0.25
"""Above this share of requests that leave their session's text, sessions part further down."""

MIX = np.arange(1, (NAME_BYTES + SCOPE_BYTES) // 4, 2, dtype=np.uint64) * np.uint64(
    0x9E3779B97F4A7C15
)
"""Odd multiples of 2**64 / golden ratio: a word times one of them is mixed."""

ALL = (1 << 64) - 1


class CurveSampler:
    """Makes a hit-rate curve, when asked, of a note per request.

    A note is the size of a prompt, how much of it was found, and a few bytes of its text that name
    its session: the end of the first block below the prompt that sessions share. So a request
    costs one copy of some bytes and an append, in line in `open`; no prompt is hashed. Where
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
        self._samples = [Sample.of(0)]
        self._clock = 0
        self._begin(1)
        self._learn_at = list(LEARN_AT)

    def look(self) -> None:
        """Read the notes if they are many; at first, see whether sessions part further down.

        Wants to be called every 64 requests.
        """
        num_notes = self._num_notes
        if self._learn_at and num_notes >= self._learn_at[0]:
            del self._learn_at[0]
            depth = self._parting()
            if depth > self._depth:
                self._num_read += num_notes
                self._begin(depth)
                num_notes = 0
        self.with_words = num_notes < WITH_WORDS
        if num_notes >= BATCH:
            self._read()

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
        """Tell sessions apart by block number `depth` of their prompts from now on."""
        block_bytes = self._block_size * TOKEN_BYTES
        self._depth = depth
        stop = (depth + 1) * block_bytes
        self.name = slice(stop - min(block_bytes, NAME_BYTES), stop)
        self.surely = stop // TOKEN_BYTES
        self._generated = self._generated_tokens()
        self._forget_notes()

    def _forget_notes(self) -> None:
        self._notes: list[Any] = []
        self._words: dict[int, bytes] = {}
        self.note = self._notes.extend
        self.with_words = True

    def _generated_tokens(self) -> int:
        counters = self._counters
        return counters.computed_tokens + counters.hit_tokens - counters.prompt_tokens

    def _parting(self) -> int:
        """Return the block at which sessions part: as before, or more where many leave at one place."""
        latest = self._notes[-NOTE * LEARN_FROM :]
        lengths: dict[bytes, int] = {}
        places: dict[int, int] = {}
        for size, reused, name in zip(*(latest[at::NOTE] for at in range(NOTE)), strict=True):
            num_blocks = size // self._block_size
            left = max(reused, 0) // self._block_size
            common = min(lengths.get(name, 0), num_blocks)
            lengths[name] = num_blocks
            if self._depth < left < common - 2:
                places[left] = places.get(left, 0) + 1
        if not places:
            return self._depth
        place = max(places, key=places.__getitem__)
        return place if places[place] > DIVERGING * LEARN_FROM else self._depth

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
        more.unit = _session_numbers(self._notes[2::NOTE])
        more.word = _word_numbers(self._words, num_notes)
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

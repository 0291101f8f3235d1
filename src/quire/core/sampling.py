"""The live curve: what any capacity would find, from a short note per request."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

import numpy as np

from quire.core.distances import Ints, Sample, Words, hit_curve
from quire.core.node import Node
from quire.core.numbering import Numbering, mixed
from quire.core.stats import Counters
from quire.core.tokens import TOKEN_BYTES, Key
from quire.core.whatif import WhatIf

NOTE = 3
"""Entries of a note: tokens of a prompt; those that were found or, where the cache forgot, `FORGOTTEN` and
all that seem to have been there once; the number of its session."""

FORGOTTEN = 1 << 62

MAX_SAMPLES = 1 << 15
"""Requests that are remembered, 64 bytes each. Beyond, every second session is forgotten."""

BATCH = 1 << 13
"""Requests between two readings of the notes, which take 24 bytes each, and 90 where a session was named."""

WITH_WORDS = 1 << 9
"""So many requests of each batch are noted with a word of their text."""

LEARN_AT = tuple(1 << bits for bits in range(6, 13))
"""Notes in the first batch after which is decided where sessions part; then at the end of each."""

LEARN_FROM = 1 << 6
"""So many requests, the latest, tell whether it matters where sessions part."""

BEGIN_ANEW = 1 << 10
"""Up to so many notes that were named too soon are dropped."""

MUCH = 0.25
"""Where more than this share of tokens was named too soon, what was noted before is of no use."""

WORD_BYTES = 8
"""Bytes of a prompt that tell whether two prompts are still the same there: two tokens."""

ALL = (1 << 64) - 1


class CurveSampler(Numbering):
    """Makes a hit-rate curve, when asked, of a note per request.

    A note is the size of a prompt, how much of it was found, and the number of its session: three
    appends, in line in `open`. No prompt is hashed, and what is noted need not be counted. Where
    the cache forgot how much of a prompt is as in the session's request before, a word of each
    tells, the two tokens that end at the largest power of two within the prompt. It is kept for the
    first 512 of 8,192 requests, which stand for all. The notes are read 8,192 at a time.

    Memory is bounded by sampling sessions (C. A. Waldspurger et al., *Efficient MRC construction
    with SHARDS*, 2015, USENIX FAST): all of them until `MAX_SAMPLES` requests are remembered, then those
    whose number is below a limit that is halved each time. Times are of all requests.

    `notes`        of the requests since they were last read
    `keeps_words`  whether the next requests are noted with a word

    len(sample) <= MAX_SAMPLES; the sampled units are those with unit <= limit.
    """

    def __init__(self, block_size: int, counters: Counters, forks: deque[Node]) -> None:
        super().__init__(block_size, forks)
        self._counters = counters
        self._num_counted = 0
        self.notes: array[int] = array("Q")
        self.restart()

    def restart(self) -> None:
        """Forget all requests; the curve is of those from now on."""
        self.count()
        self._num_read = 0
        self._halvings = 0
        self._samples = [Sample.of(0)]
        self._clock = 0
        self._learn_at = list(LEARN_AT)
        self.name_at(1)
        self._forget_notes()
        self._generated = self._generated_tokens()

    def look(self) -> None:
        """Read the notes if they are many; see whether sessions part further down.

        Wants to be called every 64 requests.
        """
        num_notes = self._num_notes
        if num_notes >= WITH_WORDS:
            self.keeps_words = False
        if self._learn_at and num_notes >= self._learn_at[0]:
            del self._learn_at[0]
            is_much = self._learn() > MUCH
            if is_much and num_notes <= BEGIN_ANEW and not any(map(len, self._samples)):
                self._begin_anew()
                num_notes = 0
        if num_notes >= BATCH:
            self._learn_at.clear()
            self._learn()
            self._read()

    def keep_word(self, key: Key) -> None:
        """Keep the two tokens of the next prompt that end at the largest power of two within it."""
        end = TOKEN_BYTES << (len(key) // TOKEN_BYTES).bit_length() >> 1
        if end >= WORD_BYTES:
            self._words[self._num_notes] = key[end - WORD_BYTES : end].tobytes()

    def count(self) -> None:
        """Add the requests that were noted since the last time to the counters; `open` leaves them to this."""
        prompt, reused, _ = self._columns(self._num_counted)
        self._add(prompt, reused)

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

    def _forget_notes(self) -> None:
        self.notes = array("Q")
        self._num_counted = 0
        self.forget_names()
        self._words: dict[int, bytes] = {}
        self.keeps_words = True

    def _generated_tokens(self) -> int:
        counters = self._counters
        return counters.computed_tokens + counters.hit_tokens - counters.prompt_tokens

    def _learn(self) -> float:
        """See which prompts sessions share; return for which share of the latest tokens that matters."""
        latest = self.notes[-NOTE * LEARN_FROM :]
        return self.learn(latest[::NOTE], latest[2::NOTE])

    def _begin_anew(self) -> None:
        """Drop the notes, whose sessions were named too soon."""
        self.count()
        self._num_read += self._num_notes
        depth = self.common_depth(self.notes[2 - NOTE * LEARN_FROM :: NOTE])
        if depth != self.depth:
            self.name_at(depth)
        self._forget_notes()
        self._generated = self._generated_tokens()

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
        more.prompt, more.reused, numbers = self._columns(0)
        self._add(more.prompt[self._num_counted :], more.reused[self._num_counted :])
        more.unit = self.units(numbers)
        more.word = _word_numbers(self._words, num_notes)
        if (above := self.shared_above(numbers)) is not None:
            more.family, more.told = above
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
            more.unit[short] = mixed(~more.begun[short].astype(np.uint64))
        return more

    def _columns(self, first: int) -> Any:
        """Return the notes from the first one on: tokens, those reused, sessions; int64 [3, notes]."""
        notes = np.frombuffer(self.notes, np.int64)[NOTE * first :]
        columns = notes.reshape(-1, NOTE).T.copy()
        reused = columns[1]
        np.copyto(reused, FORGOTTEN - reused, where=reused >= FORGOTTEN)
        return columns


def _word_numbers(words: dict[int, bytes], num_notes: int) -> Words:
    """Return a number for each note's word, 0 where none was kept, uint64 [notes]."""
    numbers = np.zeros(num_notes, np.uint64)
    if words:
        kept = np.frombuffer(b"".join(words.values()), np.uint64)
        numbers[list(words)] = mixed(kept) | np.uint64(1)
    return numbers

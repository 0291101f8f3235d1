"""The live curve: what any capacity would find, from a short note per request."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from quire.core.distances import Sample, hit_curve
from quire.core.tokens import TOKEN_BYTES, Key
from quire.core.whatif import WhatIf

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.core.stats import Counters

Text: TypeAlias = tuple[bytes, bytes, bytes]
"""Bytes of a prompt: those that name its session, and the words before two of its tokens."""

MAX_SAMPLES = 1 << 15
"""Requests that are remembered, 56 bytes each. Beyond, every second session is forgotten."""

BATCH = 1 << 12
"""Requests between two readings of the notes, which take about 300 bytes each."""

LEARN_FROM = 64
"""Requests after which is decided for the first time where sessions part."""

LEARNING = 2
"""So often it is decided."""

UNIT_BYTES = 48
"""Bytes of a prompt that tell sessions apart: the end of their first block that is not shared."""

WORD_BYTES = 8
"""Bytes of a prompt that tell whether two prompts are still the same there: two tokens."""

DIVERGING = 0.25
"""Above this share of requests that leave their session's text, sessions part further down."""

MIX = np.arange(1, 2 * UNIT_BYTES, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
"""Odd multiples of 2**64 / golden ratio: a word times one of them is mixed."""

NO_WORD = bytes(WORD_BYTES)
ALL = (1 << 64) - 1


class CurveSampler:
    """Notes one line per request and makes a hit-rate curve of them when asked.

    A note is the size of a prompt, how much of it was ever cached, and a few bytes of its text: some that
    name its session, the end of the first block below the prompt that sessions share; and
    the words that end at token p and p / 2, where p is the largest power of two within the
    prompt. They tell how far two prompts of one session are the same where the cache forgot. So
    a request costs one copy of some bytes and one append; no prompt is hashed. The notes are
    read 4,096 at a time.

    Memory is bounded by sampling sessions (C. A. Waldspurger et al., *Efficient MRC construction
    with SHARDS*, 2015, USENIX FAST): all of them until `MAX_SAMPLES` requests are remembered, then those
    whose number is below a limit that is halved each time. Times are of all requests.

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
        self._read_at = LEARN_FROM
        self._learning = LEARNING

    def opened(self, key: Key, num_tokens: int, reused: int, scope: int) -> None:
        """Note a request.

        `reused`  tokens of its prompt that were found; or, as a negative number, those that were
                  found and those that seem to have been evicted
        `scope`   a number of its scope, 0 for the default one
        """
        sizes = self._sizes
        if scope:
            self._scoped[len(sizes)] = scope
        # Flat lists: containers per note would set the garbage collector to work.
        self._texts += self._text[num_tokens.bit_length()](key)
        sizes.append(num_tokens)
        self._reused.append(reused)
        if len(sizes) >= self._read_at:
            self._read_batch()

    @property
    def num_requests(self) -> int:
        """Requests since the curve was begun."""
        return self._num_read + len(self._sizes)

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
        width = min(block_bytes, UNIT_BYTES)
        self._unit = slice(stop - width, stop)
        self._text: list[Callable[[Key], Text]] = [
            _reader(self._unit, 1 << bits >> 1) for bits in range(33)
        ]
        self._generated = self._generated_tokens()
        self._forget_notes()

    def _forget_notes(self) -> None:
        self._texts: list[bytes] = []
        self._sizes: list[int] = []
        self._reused: list[int] = []
        self._scoped: dict[int, int] = {}

    def _generated_tokens(self) -> int:
        counters = self._counters
        return counters.computed_tokens + counters.hit_tokens - counters.prompt_tokens

    def _read_batch(self) -> None:
        """Read the notes; at first, see whether sessions part further down than was thought."""
        first = self._read_at < BATCH
        if self._learning:
            self._learning -= 1
            self._read_at = BATCH
            depth = self._parting()
            if depth > self._depth:
                self._num_read += len(self._sizes)
                self._begin(depth)
        if not first:
            self._read()

    def _parting(self) -> int:
        """Return the block at which sessions part: as before, or more where many leave at one place."""
        names = self._texts[::3]
        sizes: dict[tuple[bytes, int], int] = {}
        places: dict[int, int] = {}
        first = max(len(names) - LEARN_FROM, 0)
        for index in range(first, len(names)):
            name = names[index], self._scoped.get(index, 0)
            num_blocks = self._sizes[index] // self._block_size
            left = self._reused[index] // self._block_size
            common = min(sizes.get(name, 0), num_blocks)
            sizes[name] = num_blocks
            if self._depth < left < common - 2:
                places[left] = places.get(left, 0) + 1
        if not places:
            return self._depth
        place = max(places, key=places.__getitem__)
        return place if places[place] > DIVERGING * (len(names) - first) else self._depth

    def _read(self) -> None:
        """Turn the notes into samples."""
        if not self._sizes:
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
        num_notes = len(self._sizes)
        more = Sample.of(num_notes)
        more.prompt = np.fromiter(self._sizes, np.int64, num_notes)
        more.reused = np.fromiter(self._reused, np.int64, num_notes)
        text = np.frombuffer(b"".join(self._texts), np.uint32)
        text = text.reshape(num_notes, -1).astype(np.uint64)
        stop = (self._unit.stop - self._unit.start) // TOKEN_BYTES
        mixed = (text[:, :stop] * MIX[:stop]).sum(axis=1)
        more.middle = text[:, stop] * MIX[0] + text[:, stop + 1] * MIX[1]
        more.end = text[:, stop + 2] * MIX[0] + text[:, stop + 3] * MIX[1]
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
        for index, scope in self._scoped.items():
            mixed[index] ^= np.uint64(scope) << np.uint64(33)
        short = more.prompt <= self._unit.stop // TOKEN_BYTES
        if short.any():
            mixed[short] = ~more.begun[short].astype(np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(31))) * MIX[0]
        more.unit = mixed ^ (mixed >> np.uint64(29))
        return more


def _reader(unit: slice, power: int) -> Callable[[Key], Text]:
    """Return what takes the text out of prompts of `power` to 2 * `power` - 1 tokens."""
    middle = power // 2 * TOKEN_BYTES - WORD_BYTES
    end = power * TOKEN_BYTES - WORD_BYTES
    if middle >= unit.stop:
        width = unit.stop - unit.start
        form = f"={unit.start}x{width}s{middle - unit.stop}x{WORD_BYTES}s"
        form += f"{end - middle - WORD_BYTES}x{WORD_BYTES}s"
        return Struct(form).unpack_from  # pyright: ignore[reportReturnType]
    blank = bytes(unit.stop - unit.start)

    def short(key: Key) -> Text:
        name = key[unit].tobytes() if len(key) > unit.stop else blank
        return name, NO_WORD, NO_WORD

    return short

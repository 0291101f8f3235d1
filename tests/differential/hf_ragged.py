"""Ragged batches in every relation of padding, cached length, window and block, each compared."""

import random
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from hf_help import VOCAB, check_stored, left_padded, make_cache, tiny_model

from quire import ops
from quire.errors import ConfigError

_WINDOW = {
    "llama4_text": "attention_chunk_size",
    "qwen3_next": None,
    "lfm2": None,
    "falcon_h1": None,
    "bamba": None,
    "llama": None,
}
"""The setting that a family's windows have, where it is not `sliding_window`; None: it has none."""

HOW = ["generate", "beams", "samples", "pieces", "session", "loop"]
"""Ways to compute a batch: generate's, and by hand."""


def windowed_model(family, window):
    """The tiny model of a family with windows or chunks of this size."""
    name = _WINDOW.get(family, "sliding_window")
    return tiny_model(family, **({name: window} if name else {}))


@dataclass
class Batch:
    """A batch to be computed: rows of ids, what is cached of each before, and how it is fed.

    cached[r]: leading tokens of row r that a request of its own has computed, 0 for none; more
    than the row has: the request went on behind it. cropped: columns that a loop takes off again
    before it feeds any, where all rows hold what is left.
    """

    rows: list[list[int]]
    cached: list[int]
    extra: int = 0
    how: str = "generate"
    step: int = 7
    by_session: bool = False
    new: list[int] = field(default_factory=list)
    cropped: int = 0

    @property
    def pads(self):
        longest = max(map(len, self.rows)) + self.extra
        return [longest - len(row) for row in self.rows]


def any_batch(rng, window, block):
    """Draw 1 to 4 rows in any order: lengths and cached ends lie about every border there is.

    A border of lengths is a multiple of window or block. A border of cached ends is that too, and
    in columns the begin and the cached end of the other rows, and where their windows begin.
    """
    borders = [0, block, 2 * block, window, 2 * window, 3 * window + block]
    trunks = [_text(seed, 4 * window + 2 * block + 8) for seed in (1, 2)]
    rows = []
    for index in range(rng.choice([1, 2, 2, 3, 3, 4])):
        length = max(rng.choice(borders) + rng.choice([-1, 0, 1]) + rng.choice([0, 1, 5]), 1)
        shared = rng.choice([0, 0, block, window, length - 1, length, rng.randint(0, length)])
        rows.append((rng.choice(trunks)[:shared] + _text(10 + index, length))[:length])
    extra = rng.choice([0, 0, 0, 1, window])
    columns = max(map(len, rows)) + extra
    ends = {0, columns} | {columns - len(row) for row in rows}
    cached = []
    for row in rows:
        pad = columns - len(row)
        at = rng.choice(sorted(ends)) + rng.choice([-window, -block, -1, 0, 1, block, window])
        end = rng.choice([0, len(row), at - pad, at - pad, rng.choice(borders)])
        end = max(min(end, len(row) + block), 0)
        cached.append(end)
        ends.add(pad + end // block * block)
    step = rng.choice([1, block, window - 1, window + 1])
    by_session = rng.random() < 0.5
    new = [rng.randint(3, VOCAB - 1) for _ in range(rng.randint(1, 3))]
    how = rng.choice(HOW)
    cropped = rng.choice([0, 1, block, window - 1, window, window + 1, rng.randint(1, 2 * window)])
    return Batch(rows, cached, extra, how, step, by_session, new, cropped)


def _text(seed, num_tokens):
    rng = random.Random(seed)
    return [rng.randint(3, VOCAB - 1) for _ in range(num_tokens)]


class Ragged:
    """One cache of a model, and the batches that are computed with it."""

    def __init__(self, family, window, block):
        self.model = windowed_model(family, window)
        self.cache = make_cache(self.model, block_size=block, num_blocks=600 // block + 60)
        self.texts = []

    def run(self, batch):
        """Store what is to be cached, compute the batch, then find every text again, alone."""
        for row, end in zip(batch.rows, batch.cached, strict=True):
            if end:
                self.alone((row + batch.new * end)[:end], by_session=batch.by_session)
        padded, mask = left_padded([torch.tensor(row) for row in batch.rows])
        ids = torch.nn.functional.pad(padded, (batch.extra, 0))
        mask = torch.nn.functional.pad(mask, (batch.extra, 0))
        getattr(self, batch.how)(ids, mask, batch)
        ops.check(self.cache.manager)
        assert self.cache.manager.num_active == 0
        for text in list(self.texts):
            check_stored(self.model, self.cache, torch.tensor(text))
            self.alone(text + batch.new)

    def alone(self, text, *, by_session=False):
        """Compute a text of one row and compare the logits of its last token."""
        ids = torch.tensor([text])
        if by_session:
            with self.cache.session(ids) as past, torch.no_grad():
                logits = self.model(ids[:, past.get_seq_length() :], past_key_values=past).logits[
                    :, -1
                ]
                past.check()
        else:
            out = self.cache.generate(
                ids, max_new_tokens=1, return_dict_in_generate=True, output_logits=True
            )
            logits = out.logits[0]
        self._compare(logits, ids, torch.ones_like(ids))
        self.texts.append(text)

    def generate(self, ids, mask, batch, **arguments):
        """Compare `generate` of the cache and of the model: tokens, and logits of every step."""
        outputs = []
        for generate in (self.model.generate, self.cache.generate):
            torch.manual_seed(3)
            outputs.append(
                generate(
                    ids,
                    attention_mask=mask,
                    max_new_tokens=2,
                    return_dict_in_generate=True,
                    output_logits=True,
                    **arguments,
                )
            )
        plain, ours = outputs
        for one, two in zip(plain.logits, ours.logits, strict=True):
            _close(two, one)
        assert torch.equal(plain.sequences, ours.sequences)
        self._remember(plain.sequences, mask)

    def beams(self, ids, mask, batch):
        self.generate(ids, mask, batch, num_beams=2, num_return_sequences=2)

    def samples(self, ids, mask, batch):
        self.generate(ids, mask, batch, do_sample=True, num_return_sequences=2)

    def pieces(self, ids, mask, batch):
        self.generate(ids, mask, batch, prefill_chunk_size=batch.step)

    def session(self, ids, mask, batch):
        """The model's own generate over a lent cache."""
        with self.cache.session(ids, attention_mask=mask) as past:
            out = self.model.generate(
                ids,
                attention_mask=mask,
                past_key_values=past,
                max_new_tokens=2,
                return_dict_in_generate=True,
                output_logits=True,
            )
            past.check()
        self._compare(out.logits[0], ids, mask)
        self._remember(out.sequences, mask)

    def loop(self, ids, mask, batch):
        """A loop over a lent cache that feeds a few columns at a time."""
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        with self.cache.session(ids, attention_mask=mask) as past, torch.no_grad():
            if batch.cropped <= past.get_seq_length():
                with suppress(ConfigError):
                    past.crop(-batch.cropped)
            for start in range(past.get_seq_length(), ids.shape[1], batch.step):
                stop = min(start + batch.step, ids.shape[1])
                logits = self.model(
                    ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    past_key_values=past,
                ).logits
            past.check()
        self._compare(logits[:, -1], ids, mask)
        self._remember(ids, mask)

    def _remember(self, sequences, mask):
        per_row = len(sequences) // len(mask)
        for index, row in enumerate(sequences):
            pad = int((mask[index // per_row] == 0).sum())
            self.texts.append([token for token in row[pad:].tolist() if token])

    def _compare(self, logits, ids, mask):
        """The logits of the last column are those of a forward over each row alone."""
        for row in range(len(ids)):
            text = ids[row, mask[row] != 0][None]
            with torch.no_grad():
                expected = self.model(text, use_cache=False).logits[:, -1]
            _close(logits[row : row + 1], expected)


def _close(ours, expected):
    torch.testing.assert_close(ours.float(), expected.float(), atol=2e-4, rtol=2e-4)

"""llama.cpp alone: logits of texts from scratch, and elsewhere in a context that others use."""

import random

import numpy as np

from quire.engines.gguf.context import Chunk

OWN, OTHERS = 1, range(3, 9)


class LlamaAlone:
    """llama.cpp alone, in contexts of its own: logits of texts from scratch, at the same or at random places."""

    def __init__(self, model):
        self._fresh, self._used = model.context(), model.context()
        self.random = random.Random(0)
        self._lengths = dict.fromkeys(OTHERS, 0)

    def close(self):
        self._fresh.close()
        self._used.close()

    def logits(self, tokens, num_asked):
        """The logits of the last tokens of a text, computed at once in an empty context."""
        self._fresh.clear()
        return self._fresh.decode([chunk(OWN, tokens, 0, num_asked)])

    def answer(self, prompt, num_tokens, num_kept):
        """The likeliest tokens, one after the other, and their logits; what is behind `num_kept` is computed twice."""
        row, told, rows = self.logits(prompt, 1)[-1], [], []
        if num_kept:
            self._fresh.cut((OWN, OWN + 100), num_kept)
            row = self._fresh.decode([chunk(OWN, prompt[num_kept:], num_kept)])[-1]
        for at in range(num_tokens):
            told.append(int(row.argmax()))
            rows.append(row)
            row = self._fresh.decode([chunk(OWN, told[-1:], len(prompt) + at)])[-1]
        return told, np.array(rows)

    def elsewhere(self, tokens, num_asked):
        """The logits of a text between cells of others, in pieces of random lengths, beside tokens of others."""
        draw, found, at, first = self.random, [], 0, len(tokens) - num_asked
        one_by_one = draw.random() < 0.5
        for _ in range(2):
            self._change_other()
        while at < len(tokens):
            stop = min(at + draw.choice((7, 40, 150, 600)), len(tokens))
            if one_by_one:
                stop = min(stop, first) if at < first else at + 1
            own = chunk(OWN, tokens[at:stop], at, max(stop - max(at, first), 0))
            found.append(self._used.decode([own, *self._beside()])[: int(own.asked.sum())])
            at = stop
        self._used.cut((OWN, OWN + 100))
        return np.concatenate(found)

    def _beside(self):
        """Tokens of others for the same batch: mostly none."""
        other = self.random.choice(OTHERS)
        if self.random.random() < 0.6 or not 0 < self._lengths[other] < 120:
            return []
        self._lengths[other] += 1
        return [chunk(other, [9], self._lengths[other] - 1)]

    def _change_other(self):
        """Drop a tail of another sequence, or all of it, and compute more."""
        other = self.random.choice(OTHERS)
        kept = min(self._lengths[other], self.random.choice((0, 0, 30)))
        self._used.cut((other, other + 100), kept)
        more = self.random.choice((3, 20, 60))
        self._used.decode([chunk(other, self.random.choices(range(5, 90), k=more), kept)])
        self._lengths[other] = kept + more


def chunk(number, tokens, start, num_asked=1):
    """Tokens of a sequence with a second id, whose last ones' logits are asked for."""
    asked = np.zeros(len(tokens), np.int8)
    asked[len(tokens) - num_asked :] = 1
    return Chunk((number, number + 100), start, np.array(tokens, np.int32), asked)

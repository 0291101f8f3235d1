"""Which texts a call leaves in the rows of its working cache."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from quire.engines.hf.inputs import Plan, Prompts
from quire.engines.hf.request import Kept
from quire.engines.hf.working import WorkingCache


def recorded(past: WorkingCache) -> Iterator[Kept]:
    """Every row of a working cache, with all tokens that it holds."""
    for row, tokens in enumerate(past.ledger.rows()):
        yield Kept(row, tokens)


def returned(prompts: Prompts, plan: Plan, past: WorkingCache, output: Any) -> Iterator[Kept]:
    """Each returned sequence, cut after its end, as far as a row of its prompt holds it."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    texts = sequences.cpu().numpy().astype(np.int32)
    per_prompt = max(len(texts) // len(prompts.tokens), 1)
    held = past.ledger.rows()
    for index, padded in enumerate(texts):
        origin = index // per_prompt
        text = padded[prompts.pads[origin] :]
        ends = np.flatnonzero(np.isin(text[prompts.tokens[origin].size :], plan.eos))
        if ends.size:
            text = text[: prompts.tokens[origin].size + int(ends[0]) + 1]
        candidates = [
            (_shared(text, held[row]), -int(row))
            for row in np.flatnonzero(past.ledger.origins == origin)
        ]
        length, row = max(candidates)
        yield Kept(-row, text[:length])


def _shared(one: Any, two: Any) -> int:
    length = min(one.size, two.size)
    differ = np.flatnonzero(one[:length] != two[:length])
    return int(differ[0]) if differ.size else length

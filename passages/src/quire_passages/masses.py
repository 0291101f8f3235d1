"""Attention masses of a capture, and Cache-Craft's scores from them.

Cache-Craft: Agarwal et al., SIGMOD 2025, https://doi.org/10.1145/3725273, equations 3 to 14.

    inter(i, j) = attention that tokens of passage i gave to tokens of passage j before it           (3)
    intra(i)    = attention that tokens of passage i gave to tokens of passage i                    (4)
    beta        = inter to predecessors that are there again / inter to all that there were         (6)
    gamma       = pairs of common predecessors in another order / all pairs of these                (7)
    beta'       = beta * (1 - gamma)                                                                (8)
    cci         = 1 / (1 + exp(-a / b)), a and b: inter and intra per pair of tokens               (9-11)
    cfo         = alpha * cci * (1 - beta'), the share of the passage to compute again             (12)

Corrected, where the published form reuses what is stale:

- beta asks whether the old predecessors are still there, and not whether new ones have come: it is
  multiplied by the share of the new predecessors that are old ones, and is 0 where there was none.
- tokens of equal attention are ranked from the head of the passage, whose tokens were captured first
  in their text and became sinks; the published form leaves ties to chance.
- the mean over all layers and heads is dilute, as attention of late layers changes no K or V: the
  maximum over heads is taken, in the first half of the layers.

The head of a prompt is no predecessor: as a sink of attention it would outweigh all of them. The published
form is measured beside the corrected one in `quire_passages.bench.published`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Masses:
    """Attention of a passage to the passages before it and to itself, summed over layers.

    lengths  tokens of each predecessor
    inter    [predecessors]  to each predecessor
    intra    to itself
    tokens   [n]  of each token to all predecessors
    """

    lengths: tuple[int, ...]
    inter: Floats
    intra: float
    tokens: Floats


def in_place(old: Sequence[bytes], new: Sequence[bytes], inter: Floats) -> float:
    """Return beta' of a variant captured behind `old` passages, to some of which it looked, behind `new` ones."""
    present = set(new)
    beta = float(sum(mass for each, mass in zip(old, inter, strict=True) if each in present))
    beta /= float(inter.sum())
    common = [each for each in dict.fromkeys(old) if each in present]
    places = {each: at for at, each in enumerate(new)}
    pairs = list(combinations(common, 2))
    if pairs:
        beta *= 1 - sum(places[a] > places[b] for a, b in pairs) / len(pairs)
    return beta


def overlap(old: Sequence[bytes], new: Sequence[bytes], inter: Floats) -> float:
    """Return beta', corrected, of a variant captured behind `old` passages that stands behind `new` ones."""
    if not old or not float(inter.sum()):
        return 0.0 if new else 1.0
    known = set(old)
    return in_place(old, new, inter) * sum(each in known for each in new) / max(len(new), 1)


def context_impact(masses: Masses, num_tokens: int) -> float:
    """Return CCI, from 0.5 for a passage that looked at itself alone to 1."""
    outside = sum(
        float(mass) / (num_tokens * length)
        for mass, length in zip(masses.inter, masses.lengths, strict=True)
    )
    inside = masses.intra / num_tokens**2
    return 1 / (1 + math.exp(-outside / max(inside, 1e-12)))

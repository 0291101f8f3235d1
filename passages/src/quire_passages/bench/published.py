"""Cache-Craft as its paper says, to be measured beside quire's corrected form.

`quire_passages.masses` says where the two differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_passages import CacheCraft, Variant
from quire_passages.masses import in_place
from quire_passages.selectors import Rows

if TYPE_CHECKING:
    import torch


class PublishedCacheCraft(CacheCraft):
    """The rows that looked most at other passages, by the published equations.

    It goes by masses that `mean_of_all` counts.
    """

    def __init__(self, alpha: float = 0.5) -> None:
        super().__init__(alpha)
        self.name = f"cache-craft-published {alpha:g}"

    def kept_context(self, variant: Variant, before: tuple[bytes, ...]) -> float:
        masses, known = variant.masses, variant.predecessors
        if masses is None:
            return 0.0 if known else 1.0
        if not known or not float(masses.inter.sum()):
            return (
                1.0  # published implementations divide 0 by 0 here, and take it for a perfect match
            )
        return in_place(known, before, masses.inter)

    def order(self, variant: Variant) -> Rows:
        if variant.masses is None or variant.masses.tokens.any():
            return super().order(variant)
        # All are equal: the published form says nothing of it, and any order is one.
        return np.random.default_rng(variant.num_tokens).permutation(variant.num_tokens)


def mean_of_all(by_head: torch.Tensor, depth: float) -> torch.Tensor:  # noqa: ARG001 - a `Counting`
    """Count the mean of the heads, in all layers."""
    return by_head.mean(0)

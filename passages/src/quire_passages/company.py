"""Companies of passages: those before a passage, how alike two are, and which variants cover most of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Company = Sequence[bytes]
"""The passages before a passage, in order."""


def nearness(old: Company, new: Company) -> float:
    """Return how alike two companies are, from 0 to 1 where they are the same.

    A passage weighs one over its distance, as tokens look most at what stands right before them. One that stands in
    both counts by its greater distance; the weights are over those of the larger company.
    """
    if tuple(old) == tuple(new):
        return 1.0
    here, there = _distances(old), _distances(new)
    common = sum(1 / max(at, there[each]) for each, at in here.items() if each in there)
    return common / sum(1 / at for at in range(1, max(len(old), len(new)) + 1))


def goes_for(new: Company, held: Sequence[Company]) -> int | None:
    """Return the index of the company that goes for a new one; None: the new one adds nothing.

    It is the one that is nearest to another one; of several, the first. A new one that is nearer to one adds nothing.
    """
    at = max(range(len(held)), key=lambda each: _nearest(held, each))
    near = max(nearness(new, each) for each in held)
    return at if near == 0 or near < _nearest(held, at) else None


def related(vectors: npt.NDArray[np.float32], count: int) -> list[list[int]]:
    """Return for each passage the `count` others of the most similar vectors, the most similar one last.

    vectors  `[passages, width]`; what all of them have in common is no similarity
    """
    apart = vectors - vectors.mean(0)
    apart /= np.maximum(np.linalg.norm(apart, axis=1, keepdims=True), 1e-12)
    alike = apart @ apart.T
    np.fill_diagonal(alike, -np.inf)
    nearest = np.argsort(-alike, axis=1, kind="stable")[:, : min(count, len(vectors) - 1)]
    return [each[::-1].tolist() for each in nearest]


def _nearest(companies: Sequence[Company], at: int) -> float:
    others = (each for other, each in enumerate(companies) if other != at)
    return max((nearness(companies[at], each) for each in others), default=0.0)


def _distances(company: Company) -> dict[bytes, int]:
    """Return how far each passage stands, 1 for the last one; of one that comes twice, the nearer counts."""
    return {each: len(company) - at for at, each in enumerate(company)}

"""Made-up K and V, and prompts of small ids, for tests without a model."""

from dataclasses import dataclass

import numpy as np

from quire_passages import Segments, Variant


@dataclass(frozen=True)
class Kept:
    """Stands for K and V of so many bytes."""

    num_bytes: int


def ids(*tokens):
    """Return token ids as bytes."""
    return np.array(tokens, np.int32).tobytes()


def run(first, count=20):
    """Return a passage of rising ids."""
    return list(range(first, first + count))


def variant(passage, before=(), kind="isolated", *, num_bytes=100, predecessors=(), masses=None):
    """Return a variant of a passage that was captured behind some ids."""
    kv = Kept(num_bytes)
    return Variant(ids(*passage), ids(*before), kind, kv, tuple(predecessors), masses)


A, B, C, D = (run(start) for start in (100, 200, 300, 400))
HEAD, QUESTION = run(0, 10), run(900, 5)


def asked(*passages, head=HEAD):
    """Return a prompt of these passages."""
    return Segments.of([head, *passages, QUESTION])

"""Helpers of the core's contract tests: whole requests in one call, and the state."""

from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from quire import ops
from quire.errors import OutOfBlocks


def run(start, num_tokens):
    """Return `num_tokens` token ids that no other `start` (a multiple of 1000) shares."""
    return np.arange(start, start + num_tokens, dtype=np.int32)


def prefill(manager, tokens, scope=None, **options):
    """Open, reserve, copy and commit a whole prompt; return the open sequence."""
    seq = manager.open(tokens, scope, **options)
    rest = tokens[seq.num_cached :]
    manager.reserve(seq, len(rest))
    manager.take_copies()
    manager.commit(seq, rest)
    return seq


def generate(manager, seq, ids):
    """Reserve and commit generated tokens."""
    manager.reserve(seq, len(ids))
    manager.take_copies()
    manager.commit(seq, ids)


def serve(manager, tokens, scope=None, **options):
    """Prefill a prompt and close it: its whole blocks are cached afterwards."""
    manager.close(prefill(manager, tokens, scope, **options))


def use(manager, tokens, scope=None, **options):
    """Serve a prompt that stores nothing: what is found of it is used."""
    seq = manager.open(tokens, scope, **options)
    ops.admit(manager, seq)
    manager.close(seq)


def found(manager, tokens, scope=None, **options):
    """Return how many tokens of `tokens` a longer prompt would find, in whole blocks."""
    hit = manager.probe([*tokens, 2**31 - 1], scope, **options)
    return hit.num_tokens - hit.partial_tokens


def state(manager):
    """Return everything the manager says about itself."""
    return msgspec.msgpack.encode(ops.snapshot(manager)), ops.dump(manager)


@contextmanager
def rejected(manager, error, *mentions):
    """Expect `error` with these texts in its message, and a state that did not change."""
    before = state(manager)
    with pytest.raises(error) as caught:
        yield caught
    assert state(manager) == before
    ops.check(manager)
    for text in mentions:
        assert str(text) in str(caught.value), f"{text!r} is not in {caught.value}"


def order(manager):
    """Return the tokens that end the cached runs, in the order in which they lose blocks, and the orders of sparse groups."""
    tree = manager.kernel.tree
    full = [(bytes(node.key[-4:]), node.priority) for node in tree.order.order()]
    return full, [group.eviction_order() for group in tree.sparse]


def refuse(manager, tokens, **terms):
    """Open a prompt, ask for more than there is, and close; what the request found."""
    seq = manager.open(tokens, **terms)
    with rejected(manager, OutOfBlocks):
        manager.reserve(seq, 10_000)
    manager.close(seq)
    return seq.num_cached

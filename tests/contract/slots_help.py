"""Helpers of the contract tests of slots: whole requests in one call, and the state."""

from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from quire.slots import check, snapshot


def text(start, num_tokens):
    """Return `num_tokens` token ids that no other `start` (a multiple of 1000) shares."""
    return np.arange(start, start + num_tokens, dtype=np.int32)


def prefill(cache, tokens, scope=None, **options):
    """Open a prompt, do its copies and commit the rest; return the open handle."""
    handle = cache.open(tokens, scope, **options)
    cache.take_copies()
    cache.commit(handle, tokens[handle.num_cached :])
    return handle


def serve(cache, tokens, scope=None, **options):
    """Prefill a prompt and close it; return its slot."""
    handle = prefill(cache, tokens, scope, **options)
    cache.close(handle)
    return handle.slot


def found(cache, tokens, scope=None, **options):
    """Return how many tokens of `tokens` a longer prompt would find."""
    match = cache.find([*tokens, 2**31 - 1], scope, **options)
    return match.num_tokens if match else 0


@contextmanager
def rejected(cache, error, *mentions):
    """Expect `error` with these texts in its message, and a state that did not change."""
    before = msgspec.msgpack.encode(snapshot(cache))
    with pytest.raises(error) as caught:
        yield caught
    assert msgspec.msgpack.encode(snapshot(cache)) == before
    check(cache)
    for mention in mentions:
        assert str(mention) in str(caught.value), f"{mention!r} is not in {caught.value}"

"""A tenant's calls do not depend on the prompts that another tenant has cached.

Nothing here measures time: the lines that a call runs are compared, one by one.
"""

from __future__ import annotations

import gc
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core import CacheManager, LayerGroup, Scope
from quire.exchange import residency
from quire.groups import Recurrent, SlidingWindow
from quire.slots import SlotCache

SIZE = 4
MINE = Scope(salt="mine")
KINDS = {
    "full": [LayerGroup("full", 256)],
    "hybrid": [
        LayerGroup("full", 256),
        LayerGroup("sliding", 256, SlidingWindow(8)),
        LayerGroup("state", 256, Recurrent(8)),
    ],
}


def lines_of(call):
    """Return every line of Python that a call runs, in order."""
    ran = []

    def trace(frame, event, _arg):
        if event == "line":
            ran.append((frame.f_code.co_qualname, frame.f_lineno))
        return trace

    before = sys.gettrace()
    gc.disable()  # what becomes of managers of other examples is none of this call's lines
    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(before)
        gc.enable()
    return ran, result


def serve(manager, tokens, scope):
    seq = manager.open(tokens, scope)
    manager.take_copies()
    manager.reserve(seq, len(tokens) - seq.computed)
    manager.take_copies()
    manager.commit(seq, tokens[seq.computed :])
    manager.close(seq)


def text(start, length):
    return list(range(start, start + length))


@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", KINDS)
@given(
    prompt=st.integers(1, 40),
    head=st.integers(0, 40),
    num_others=st.integers(1, 20),
    known_here=st.integers(0, 40),
)
def test_open_and_probe_run_the_same_lines_whoever_else_has_the_prompt(
    kind, prompt, head, num_others, known_here
):
    def ran(begins):
        """The lines that a tenant's calls run, beside tenants whose prompts begin with `begins`."""
        manager = CacheManager(groups=KINDS[kind], block_size=SIZE)
        for each in range(num_others):
            serve(manager, text(begins, head) + text(5000 + 50 * each, 8), Scope(salt=str(each)))
        if known_here:
            serve(manager, text(0, known_here), MINE)
        tokens = text(0, prompt)
        probed = lines_of(lambda: manager.probe(tokens, MINE))
        resident = lines_of(lambda: residency(manager, tokens, MINE).accepted)
        opened, seq = lines_of(lambda: manager.open(tokens, MINE))
        return probed, resident, opened, seq.num_cached, manager.stats.missed

    assert ran(begins=0) == ran(begins=9000)


@given(prompt=st.integers(1, 40), head=st.integers(0, 40), num_others=st.integers(1, 6))
def test_slots_of_other_scopes_are_not_looked_at(prompt, head, num_others):
    def ran(begins):
        cache = SlotCache(8, 64)
        for each in range(num_others):
            handle = cache.open(text(begins, head + 1), Scope(salt=str(each)))
            cache.commit(handle, text(begins, head + 1))
            cache.close(handle)
        tokens = text(0, prompt)
        found = lines_of(lambda: cache.find(tokens, MINE))
        opened, handle = lines_of(lambda: cache.open(tokens, MINE))
        return found, opened, handle.num_cached, cache.stats.hit_tokens

    assert ran(begins=0) == ran(begins=9000)

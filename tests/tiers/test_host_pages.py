"""A host tier's memory is there before anybody writes to it, and nothing of what is in it changes."""

import resource
import sys

import numpy as np
import pytest
from stack_help import KEYS, RECORDS

from quire.tiers.host import Host
from quire.tiers.host import arena as arenas
from quire.tiers.host.arena import Arena

PAGE = 1 << 12
CAPACITY = 32 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")


@pytest.fixture
def arena():
    arena = Arena(CAPACITY)
    ahead = arenas.PagesAhead(arena.memory)
    yield arena.memory, ahead
    ahead.background.stop()


def faults_of(writing):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    writing()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_first_write_waits_for_no_page(arena):
    memory, ahead = arena
    assert ahead.background.settle(60)
    if ahead._madvise is None:
        pytest.skip("an older Linux: pages come with the first write")
    assert faults_of(lambda: memory[::PAGE].fill(1)) < CAPACITY // PAGE // 10


def test_bytes_written_while_pages_are_touched_ahead_stay(arena):
    memory, ahead = arena
    memory[::PAGE] = 8
    assert ahead.background.settle(60)
    assert np.count_nonzero(memory) == np.count_nonzero(memory == 8) == CAPACITY // PAGE


def test_only_so_much_is_taken_ahead(monkeypatch):
    monkeypatch.setattr(arenas, "AHEAD_BYTES", 8 << 20)
    monkeypatch.setattr(arenas, "STEP_BYTES", 1 << 20)
    ahead = arenas.PagesAhead(Arena(CAPACITY).memory)
    taken = []
    for end in (0, 3 << 20, 5 << 20, 30 << 20, CAPACITY):
        ahead.reach(end)
        assert ahead.background.settle(60)
        taken.append(ahead._taken >> 20)
    assert ahead._madvise is None or taken == [8, 8, 13, 32, 32]
    ahead.background.stop()


def test_a_tier_reaches_further_as_it_fills(monkeypatch):
    monkeypatch.setattr(arenas, "AHEAD_BYTES", 1 << 16)
    monkeypatch.setattr(arenas, "STEP_BYTES", 1 << 14)
    with Host(1 << 20) as host:
        ahead = host._arena.pages
        assert ahead.background.settle(60)
        begun = ahead._taken
        for key, record in zip(KEYS, RECORDS, strict=True):
            host.put([key], [record])
        assert ahead.background.settle(60)
        used = sum(len(shelf.chunks) for shelf in host._arena.shelves.values())
        assert ahead._madvise is None or begun < used * host._arena.chunk_bytes <= ahead._taken

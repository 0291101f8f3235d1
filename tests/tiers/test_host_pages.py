"""A host tier's memory is there before anybody writes to it, and nothing of what is in it changes."""

import resource
import sys
import threading

import numpy as np
import pytest

from quire.tiers.host import Host, pages

CAPACITY = 32 << 20


def wait_for_pages():
    for thread in threading.enumerate():
        if thread.name == "quire host pages":
            thread.join(60)
            assert not thread.is_alive()


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")
def test_a_first_write_waits_for_no_page():
    with Host(CAPACITY) as host:
        wait_for_pages()
        before = faults()
        host._arena.memory[:: 1 << 12] = 1
        assert faults() - before < CAPACITY >> 13  # half of all; a system may not know how


def test_what_was_written_meanwhile_stays():
    memory = np.full(CAPACITY, 7, np.uint8)
    pages.take_pages(memory, lambda: True)
    memory[::4096] = 8
    wait_for_pages()
    assert (memory[::4096] == 8).all()
    assert np.count_nonzero(memory == 7) == CAPACITY - CAPACITY // 4096


def test_a_tier_that_is_closed_takes_no_more():
    asked = []
    memory = np.zeros(CAPACITY, np.uint8)
    pages.take_pages(memory, lambda: asked.append(1) or len(asked) < 2)
    wait_for_pages()
    assert len(asked) <= 2


def test_no_more_is_taken_than_half_of_what_there_is_to_spare(monkeypatch):
    asked = []
    monkeypatch.setattr(pages, "_spare_bytes", lambda: 2 * pages.STEP_BYTES)
    pages.take_pages(np.zeros(CAPACITY, np.uint8), lambda: asked.append(1) or True)
    wait_for_pages()
    assert len(asked) <= 1

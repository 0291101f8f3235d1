"""A call of an object store's tier that is cut off anywhere, as by Ctrl-C, leaves it fit for every thread."""

import gc
import threading

import pytest
from cut_tiers import (
    CALLS,
    HELD,
    LONG,
    ROOMS,
    SAMPLES,
    STDLIB,
    TIMEOUT_S,
    assert_fit_after_cuts,
    cut_opening_and_closing,
)
from objects_help import s3_server, s3_tier
from processes import wait_until

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import records_of
from quire.tiers.objects import Objects

BELOW = (*ROOMS, str(STDLIB / "asyncio"))
OPENING = (ROOMS[0], str(STDLIB / "threading.py"))
"""Not in the constructor of asyncio's loop, which warns of itself when it is cut off."""

KINDS = {
    "memory": lambda: Objects("memory://", bundle="64KiB"),
    "s3": lambda: s3_tier(s3_server().url, bundle="64KiB"),
}


def prepared(kind):
    tier = KINDS[kind]()
    assert tier.put(HELD, records_of(HELD), TIMEOUT_S) == [Outcome.STORED] * len(HELD)
    return tier


def num_threads():
    """Count the threads that run; Python's own `start` leaves one that never begins where it is cut off."""
    named = (thread for thread in threading.enumerate() if thread.name == "quire-objects")
    return sum(thread.is_alive() for thread in named)


@pytest.mark.cases(2)
@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "touch"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_answers_in_time_after_a_call_that_was_cut_off(kind, name, samples):
    assert_fit_after_cuts(lambda: prepared(kind), name, samples, rooms=BELOW)


@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_whose_opening_or_closing_was_cut_off_leaves_no_thread(kind, samples):
    gc.collect()
    before = num_threads()
    cut_opening_and_closing(KINDS[kind], kind, samples, OPENING)
    wait_until(lambda: num_threads() <= before, "a thread stays")

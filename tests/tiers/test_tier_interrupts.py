"""A call of a tier that is cut off anywhere, as by Ctrl-C, leaves the tier fit for use."""

import contextlib
import threading
from random import Random

import pytest

from interrupt_help import QUIRE, SignalCut
from quire.tiers.background import Background
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, names_of, records_of
from quire.tiers.disk import Disk
from quire.tiers.files import Files
from quire.tiers.format import record_bytes
from quire.tiers.host import Host

ROOM = (str(QUIRE / "tiers"), contextlib.__file__)
SAMPLES, LONG = 6, 150
"""So many places of each call are tried by default, and in the long run."""

SIZE = record_bytes(1000)
HELD, MORE = names_of(range(12)), names_of(range(100, 108))

KINDS = {
    "host": lambda path: Host(16 * SIZE),
    "disk": lambda path: Disk(path, 16 * SIZE, ahead=1),
    "files": lambda path: Files(path, 16 * SIZE),
}

CALLS = {
    "put": lambda tier: tier.put(MORE, records_of(MORE)),
    "put_again": lambda tier: tier.put(HELD, records_of(HELD)),
    "put_larger": lambda tier: tier.put(HELD[:4], records_of(HELD[:4], 2000)),
    "get": lambda tier: tier.get(HELD, buffers_like(records_of(HELD))),
    "delete": lambda tier: tier.delete(HELD[::2]),
    "touch": lambda tier: tier.touch(HELD),
    "lend": lambda tier: tier.take_back(tier.lend([SIZE] * 6)),
}


def prepared(kind, path):
    tier = KINDS[kind](path)
    assert tier.put(HELD, records_of(HELD)) == [Outcome.STORED] * len(HELD)
    return tier


def close(tier):
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive(), "it hangs"


@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_is_fit_for_use_after_a_call_that_was_cut_off(kind, name, samples, tmp_path):
    whole = SignalCut(rooms=ROOM)
    with prepared(kind, tmp_path / "whole") as tier:
        whole.run(lambda: CALLS[name](tier))
    places = range(1, whole.count + 1)
    if len(places) > samples:
        places = sorted(Random(name).sample(places, samples))
    key = names_of([500])
    for at in places:
        tier = prepared(kind, tmp_path / str(at))
        cut = SignalCut(at, rooms=ROOM)
        comes_out = cut.run(lambda tier=tier: CALLS[name](tier))
        assert comes_out or cut.count < at, f"the cut at {at} was swallowed"
        tier.check()
        records = records_of(key)
        buffers = buffers_like(records)
        assert tier.put(key, records, 0.5) == [Outcome.STORED], f"cut at {at}"
        assert tier.get(key, buffers, 0.5) == [Outcome.HIT]
        assert buffers == records
        close(tier)


def test_background_work_that_was_cut_off_when_it_should_begin_is_waited_for_by_nobody():
    whole = SignalCut(rooms=ROOM)
    whole.run(Background(lambda: False, "whole").wake)
    for at in range(1, whole.count + 1):
        done = threading.Event()
        background = Background(lambda done=done: done.set() or False, "cut")
        SignalCut(at, rooms=ROOM).run(background.wake)
        assert background.settle(10)
        background.wake()
        assert done.wait(10)
        background.stop()

"""Cutting calls of remote tiers off where CPython looks for signals, also in what they stand on."""

import faulthandler
import gc
import queue
import threading
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest

from interrupt_help import QUIRE, SignalCut
from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, names_of, records_of
from quire.tiers.format import tag_of_key

STDLIB = Path(threading.__file__).parent
BELOW = ("threading.py", "queue.py", "contextlib.py", "concurrent/futures/", "_weakrefset.py")
"""Where locks are held by functions of Python: a signal comes there as well."""

ROOMS = (str(QUIRE / "tiers"), *(str(STDLIB / each) for each in BELOW))
SAMPLES, LONG = 3, 120
"""So many places of each call are tried by default, and in the long run."""

TIMEOUT_S = 60.0
"""Of calls behind a cut, none of which takes a second on an idle machine: only one that waits for ever takes as long."""

TAG = tag_of_key(names_of([0])[0])
HELD, MORE = names_of(range(6)), names_of(range(100, 104))

CALLS = {
    "put": lambda tier: tier.put(MORE, records_of(MORE), TIMEOUT_S),
    "put_again": lambda tier: tier.put(HELD, records_of(HELD), TIMEOUT_S),
    "put_larger": lambda tier: tier.put(HELD[:3], records_of(HELD[:3], 200_000), TIMEOUT_S),
    "get": lambda tier: tier.get(HELD, buffers_like(records_of(HELD)), TIMEOUT_S),
    "contains": lambda tier: tier.contains([*HELD, *MORE], TIMEOUT_S),
    "touch": lambda tier: tier.touch(HELD),
    "delete": lambda tier: tier.delete(HELD[::2], TIMEOUT_S),
    "scan": lambda tier: list(tier.scan()),
    "purge": lambda tier: tier.purge(TAG, TIMEOUT_S),
}


class KeptCut(SignalCut):
    """Keeps what it raised, with all frames, as an interpreter keeps the last traceback.

    `meanwhile` is called where the error is about to be raised.
    """

    def __init__(self, at=None, *, rooms=ROOMS, meanwhile=None):
        super().__init__(at, rooms=rooms)
        self.kept, self.meanwhile = [], meanwhile
        self.places = defaultdict(list)
        """The numbers of the times that a place in the code was come to, by place."""

    def may_come(self, frame):
        may = super().may_come(frame) and not is_in_finalizer(frame)
        if may:
            self.places[frame.f_code, frame.f_lasti].append(self.count + 1)
        if may and self.count + 1 == self.at and self.meanwhile is not None:
            self.meanwhile()
        return may

    def run(self, call):
        def keeping():
            try:
                call()
            except self.error as error:
                self.kept.append(error)
                raise

        came = super().run(keeping)
        assert came == (self.at is not None and self.count >= self.at), "an interrupt is swallowed"
        return came


def is_in_finalizer(frame):
    """Return whether a finalizer or the callback of a weak reference runs, out of which Python lets no error come."""
    while frame is not None:
        code = frame.f_code
        of_weak = code.co_filename.endswith("/_weakrefset.py") and code.co_name == "_remove"
        if of_weak or code.co_name == "__del__" or code.co_filename.endswith("/weakref.py"):
            return True
        frame = frame.f_back
    return False


def places_of(call, samples, seed, rooms=ROOMS):
    """Return so many places of a call where it may be cut off: half of them in Python's own library, none twice if it can be."""
    whole = KeptCut(rooms=rooms)
    whole.run(call)
    assert whole.count
    random = Random(seed)
    if whole.count <= samples:
        return range(1, whole.count + 1)
    below, own = [], []
    for (code, _), times in whole.places.items():
        (below if code.co_filename.startswith(str(STDLIB)) else own).append(random.choice(times))
    chosen = random.sample(below, min(len(below), samples // 2))
    chosen += random.sample(own, min(len(own), samples - len(chosen)))
    left = sorted({*range(1, whole.count + 1)} - {*chosen})
    return sorted([*chosen, *random.sample(left, samples - len(chosen))])


def in_time(call):
    """Run a call on a thread of its own, as another user of the tier; return or raise what it does.

    One that hangs fails the test, with the stacks of all threads.
    """
    answers = queue.SimpleQueue()

    def run():
        try:
            answers.put((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised below
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=2 * TIMEOUT_S)
    except queue.Empty:
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail("it hangs")
    if error is not None:
        raise error
    return answer


def cut_off(prepared, name, samples, *, call=None, rooms=ROOMS):
    """Yield tiers, each of which a call was cut off of at another place, and the number of the place."""
    call = call or CALLS[name]
    with prepared() as tier:
        places = places_of(lambda: call(tier), samples, name, rooms)
    for at in places:
        tier, cut = prepared(), KeptCut(at, rooms=rooms)
        cut.run(lambda tier=tier: call(tier))
        yield tier, at
        tier = None
        del cut


def assert_fit_after_cuts(prepared, name, samples, *, call=None, rooms=ROOMS):
    """Cut a call off at many places; assert that the tier is fit for every thread behind each, and ends."""
    for tier, at in cut_off(prepared, name, samples, call=call, rooms=rooms):
        tier.check()
        assert_fit(tier, at, name)
        close(tier)


def cut_opening_and_closing(opened, name, samples, rooms):
    """Cut the opening of a tier and then its closing off at many places; a tier that was opened is fit for use."""
    for at in places_of(lambda: opened().close(), samples, name, rooms):
        tiers = []
        KeptCut(at, rooms=rooms).run(lambda tiers=tiers: tiers.append(opened()))
        for tier in tiers:
            assert_fit(tier, at)
            KeptCut(at, rooms=rooms).run(tier.close)
            close(tier)
        tier = None
    del tiers
    gc.collect()


def assert_fit(tier, at, name=""):
    """Assert that a tier answers, rightly, and in time, to another thread than the one that was cut off, in a call of this name."""

    def used():
        key = names_of([500 + at])
        records = records_of(key)
        buffers = buffers_like(records)
        stored = tier.put(key, records, TIMEOUT_S)
        if name == "purge" and stored == [Outcome.SKIPPED]:  # its mark is another process's to it
            stored = tier.put(key, records, TIMEOUT_S)
        outcomes = [*stored, *tier.get(key, buffers, TIMEOUT_S)]
        assert outcomes == [Outcome.STORED, Outcome.HIT], f"cut at {at}: {outcomes}"
        assert buffers == records
        there = tier.contains(key, TIMEOUT_S)
        held = buffers_like(records_of(HELD))
        found = tier.get(HELD, held, TIMEOUT_S)
        for outcome, buffer, record in zip(found, held, records_of(HELD), strict=True):
            assert outcome is not Outcome.HIT or buffer == record
        tier.delete(key, TIMEOUT_S)
        left = tier.contains(key, TIMEOUT_S)
        purged = tier.purge(TAG, TIMEOUT_S)  # no put of before is taken to be under way
        assert purged.is_complete, f"cut at {at}: {purged.reason}"
        assert tier.put(key, records, TIMEOUT_S) == [Outcome.STORED], "barred"
        return there, left, set(found)

    there, left, found = in_time(used)
    assert (there, left) == ([True], [False]), f"cut at {at}"
    assert found <= {Outcome.HIT, Outcome.ABSENT, Outcome.FOREIGN}, f"cut at {at}"
    tier.check()


def close(tier):
    in_time(tier.close)
    gc.collect()

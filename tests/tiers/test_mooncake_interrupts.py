"""A call of the Mooncake tier that is cut off anywhere, as by Ctrl-C, keeps no caller from the next call."""

import threading
import time

import pytest
from cut_tiers import (
    CALLS,
    HELD,
    LONG,
    TIMEOUT_S,
    KeptCut,
    assert_fit,
    close,
    cut_off,
    in_time,
    places_of,
)
from mooncake_server import MooncakeServer
from processes import wait_until

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import records_of
from quire.tiers.mooncake import Mooncake
from quire.tiers.mooncake.calls import Callers

SAMPLES, FEW = 24, 40
"""Places of calls over the store, and of calls of a caller alone: they cost milliseconds."""

NAMES = [name for name in CALLS if name not in ("touch", "scan")]


class ManyTiers:
    """Tiers of one caller each over one store: a caller that stays taken keeps everybody waiting."""

    def __init__(self, store):
        self.store, self.count = store, 0

    def prepared(self):
        self.count += 1
        tier = Mooncake(store=self.store, prefix=f"cut{self.count}:", callers=1, buffer="1MiB")
        assert tier.put(HELD, records_of(HELD), TIMEOUT_S) == [Outcome.STORED] * len(HELD)
        return tier


@pytest.fixture(scope="module")
def tiers(tmp_path_factory):
    server = MooncakeServer(tmp_path_factory.mktemp("mooncake") / "log")
    with Mooncake(server.address) as tier:
        yield ManyTiers(tier._store)
    server.kill()


@pytest.mark.cases(2)
@pytest.mark.system("mooncake")
@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [*NAMES, "close"])
def test_a_mooncake_tier_answers_in_time_after_a_call_that_was_cut_off(tiers, name, samples):
    call = CALLS.get(name, lambda tier: tier.close())
    for tier, at in cut_off(tiers.prepared, name, samples, call=call):
        if name != "close":
            assert_fit(tier, at, name)
        close(tier)
        assert tier._callers._has_ended


def called(callers, job):
    return callers.use(TIMEOUT_S, lambda caller: caller.call(job))


def closed(callers):
    callers.close(lambda _: True, time.monotonic() + TIMEOUT_S)
    assert callers._has_ended


def new_callers():
    return Callers(1, lambda address, size: 0)


def places_of_a_call(samples):
    whole = new_callers()
    places = places_of(lambda: called(whole, lambda: 1), samples, "callers")
    closed(whole)
    return places


@pytest.mark.parametrize("samples", [FEW, pytest.param(LONG, marks=pytest.mark.long)])
def test_a_caller_is_free_after_a_call_that_was_cut_off(samples):
    for at in places_of_a_call(samples):
        callers, cut, done = new_callers(), KeptCut(at), []
        cut.run(lambda callers=callers, done=done: called(callers, lambda: done.append(1)))
        assert in_time(lambda callers=callers: called(callers, lambda: 2)) == 2
        assert len(done) <= 1
        closed(callers)


@pytest.mark.ci
@pytest.mark.parametrize("samples", [FEW, pytest.param(LONG, marks=pytest.mark.long)])
def test_a_call_waits_for_a_native_call_that_was_cut_off_and_still_runs(samples):
    for at in places_of_a_call(samples):
        callers, cut, may_end = new_callers(), KeptCut(at), threading.Event()

        def end_when_waited_for(callers=callers, may_end=may_end):
            wait_until(lambda: callers._bell._gates or not callers._all[0]._calls, "a caller waits")
            may_end.set()

        assert cut.run(lambda callers=callers, may_end=may_end: called(callers, may_end.wait))
        threading.Thread(target=end_when_waited_for, daemon=True).start()
        assert in_time(lambda callers=callers: called(callers, lambda: 2)) == 2
        closed(callers)


def test_a_call_fails_at_once_where_one_that_was_cut_off_runs_beyond_its_deadline():
    callers, may_end = new_callers(), threading.Event()
    cut = KeptCut(places_of_a_call(10**6)[-1])  # by then the call has been given to the thread
    assert cut.run(lambda: called(callers, may_end.wait))
    wait_until(lambda: callers._all[0]._calls[0].has_begun, "the call begins")
    assert not callers.num_hanging
    callers._all[0]._calls[0]._deadline = time.monotonic()
    with pytest.raises(TimeoutError, match="1 calls hang"):
        called(callers, lambda: 2)
    may_end.set()
    wait_until(lambda: not callers.num_hanging, "the call ends")
    assert called(callers, lambda: 2) == 2
    closed(callers)

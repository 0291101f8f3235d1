"""A call of a local tier that is cut off anywhere, as by Ctrl-C, leaves the tier fit for every thread."""

import threading
from itertools import count

import pytest
from cut_tiers import (
    CALLS,
    HELD,
    LONG,
    TIMEOUT_S,
    KeptCut,
    assert_fit_after_cuts,
    in_time,
    names_of,
    places_of,
    records_of,
)
from processes import wait_until

from quire.tiers.base import Outcome
from quire.tiers.disk import Disk
from quire.tiers.disk.crew import Crew
from quire.tiers.files import Files
from quire.tiers.format import record_bytes
from quire.tiers.host import Host
from quire.tiers.stack.lanes import Lanes, TierLane
from quire.tiers.threads import Background, BusyKeys, Signal, wait_for

SAMPLES = 6
SIZE, LARGE = record_bytes(1000), record_bytes(100_000)
MANY = names_of(range(200, 212))


def telling(tier):
    """Return a tier that tells of what makes room, as one over another does."""
    tier.evicting = lambda keys, records: None
    return tier


KINDS = {
    "host": lambda path: Host(16 * SIZE),
    "host_telling": lambda path: telling(Host(16 * SIZE)),
    "disk": lambda path: Disk(path, 16 * SIZE, ahead=1),
    "disk_telling": lambda path: telling(Disk(path, 16 * SIZE, ahead=1)),
    "disk_large": lambda path: Disk(path, 16 * LARGE, ahead=1),
    "files": lambda path: Files(path, 16 * SIZE),
}
"""Of room for less than is put; `disk_large` has records of which several are read or written at once."""

LOCAL = {
    **CALLS,
    "put_many": lambda tier: tier.put(MANY, records_of(MANY, payload_of(tier)), TIMEOUT_S),
    "lend": lambda tier: tier.take_back(tier.lend([SIZE] * 6)),
}


LENDING = [(kind, "lend") for kind in KINDS if kind.startswith("host")]


def payload_of(tier):
    return 100_000 if tier.stats().capacity_bytes > 200 * SIZE else 1000


def prepared(kind, path):
    tier = KINDS[kind](path)
    assert tier.put(HELD, records_of(HELD), TIMEOUT_S) == [Outcome.STORED] * len(HELD)
    if kind == "disk_large":
        tier.put(MANY, records_of(MANY, 100_000), TIMEOUT_S)
    return tier


@pytest.mark.cases(2)
@pytest.mark.parametrize("samples", [SAMPLES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in LOCAL if name != "lend"] + LENDING
)
def test_a_tier_is_fit_for_use_after_a_call_that_was_cut_off(kind, name, samples, tmp_path):
    paths = (tmp_path / str(number) for number in count())
    assert_fit_after_cuts(lambda: prepared(kind, next(paths)), name, samples, call=LOCAL[name])


@pytest.mark.parametrize("samples", [24, pytest.param(1000, marks=pytest.mark.long)])
def test_a_crew_that_helped_a_call_that_was_cut_off_does_nothing_of_it_and_helps_the_next(samples):
    def call(crew, done):
        crew.each(8, done.append, 3)

    whole = Crew(3, "whole")
    call(whole, [])
    places = places_of(lambda: call(whole, []), samples, "crew")
    whole.close()
    for at in places:
        for is_new in (False, True):
            crew, done, cut = Crew(3, "cut"), [], KeptCut(at)
            if not is_new:
                call(crew, [])
            cut.run(lambda crew=crew, done=done: call(crew, done))
            left = list(done)
            assert len(left) == len(set(left)) <= 8
            again = []
            in_time(lambda crew=crew, again=again: call(crew, again))
            assert sorted(again) == list(range(8))
            assert done == left, f"cut at {at}: a helper goes on"
            in_time(crew.close)
            assert not any(t.name == "cut" and t.is_alive() for t in threading.enumerate())


def test_a_thread_that_waits_for_a_busy_key_goes_on_when_its_end_was_cut_off():
    def begun():
        busy = BusyKeys()
        busy.begin([b"a", b"b"])
        return busy, [busy.ended(b"a"), busy.ended(b"b")]

    whole, _ = begun()
    for at in places_of(lambda: whole.end([b"a", b"b"]), 1000, "busy"):
        (busy, ended), cut = begun(), KeptCut(at)
        cut.run(lambda busy=busy: busy.end([b"a", b"b"]))
        in_time(busy.end_all)  # as the tier does behind a cut
        in_time(lambda ended=ended: wait_for(ended, TIMEOUT_S))
        assert all(each.is_set() for each in ended), f"cut at {at}"


def idle_lane(*, has_thread):
    lane = TierLane(Lanes(), "cut", 1)
    if has_thread:
        lane.submit("before", lambda: None, lambda: None)
        wait_until(lambda: lane._idle, "a thread is idle")
    return lane


@pytest.mark.parametrize("has_thread", [False, True])
def test_a_lane_does_the_next_job_after_one_that_was_cut_off(has_thread):
    def submit(lane, told):
        lane.submit("me", lambda: told.append("run"), lambda: told.append("dropped"))

    whole = idle_lane(has_thread=has_thread)
    for at in places_of(lambda: submit(whole, []), 1000, "lane"):
        lane, told, done, cut = idle_lane(has_thread=has_thread), [], Signal(), KeptCut(at)
        cut.run(lambda lane=lane, told=told: submit(lane, told))
        in_time(lambda lane=lane, done=done: lane.submit("me", done.set, lambda: None))
        assert in_time(lambda done=done: done.wait(TIMEOUT_S)), f"cut at {at}"
        assert len(told) <= 1
        in_time(lane.close)
        assert in_time(lambda lane=lane: lane.ended.wait(TIMEOUT_S)), f"cut at {at}"
        assert not lane._alive


def test_a_lane_ends_when_closing_it_was_cut_off_and_is_done_again():
    for at in places_of(idle_lane(has_thread=True).close, 1000, "lane"):
        lane, cut = idle_lane(has_thread=True), KeptCut(at)
        cut.run(lane.close)
        in_time(lane.close)
        assert in_time(lambda lane=lane: lane.ended.wait(TIMEOUT_S)), f"cut at {at}"


def test_a_thread_that_waits_for_a_signal_goes_on_when_setting_or_awaiting_it_was_cut_off():
    for name in ("set", "wait"):
        calls = {"set": Signal.set, "wait": lambda signal: signal.wait(0.01)}
        for at in places_of(lambda call=calls[name]: call(Signal()), 1000, name):
            signal, cut, waited = Signal(), KeptCut(at), threading.Event()
            threading.Thread(
                target=lambda signal=signal, waited=waited: signal.wait() and waited.set(),
                daemon=True,
            ).start()
            wait_until(lambda signal=signal: signal._bell._gates, "a thread waits")
            cut.run(lambda signal=signal, call=calls[name]: call(signal))
            in_time(signal.set)
            assert waited.wait(TIMEOUT_S), f"cut at {at}"


def test_background_work_interrupted_at_its_start_is_not_waited_for():
    for at in places_of(Background(lambda: False, "whole").wake, 1000, "background"):
        done = threading.Event()
        background, cut = Background(lambda done=done: done.set() or False, "cut"), KeptCut(at)
        cut.run(background.wake)
        assert in_time(lambda background=background: background.settle(TIMEOUT_S))
        in_time(background.wake)
        assert done.wait(TIMEOUT_S)
        in_time(background.stop)

"""Threads that help a call, and the thread that works when nobody waits."""

import threading
import time

import pytest

from quire.tiers.disk.crew import Crew
from quire.tiers.threads import Background


def test_a_crew_does_every_number_once_and_several_at_the_same_time():
    crew = Crew(3, "test")
    done, together = [], threading.Barrier(4)

    def work(number):
        if number < 4:
            together.wait(60)
        done.append(number)

    crew.each(40, work, 3)
    assert sorted(done) == list(range(40))
    crew.each(1, done.append, 3)
    crew.each(0, done.append, 3)
    assert len(done) == 41
    crew.close()


def test_a_crew_without_helpers_works_in_order_on_the_callers_thread():
    crew = Crew(3, "test")
    done = []
    crew.each(40, lambda number: done.append((number, threading.get_ident())), 0)
    assert done == [(number, threading.get_ident()) for number in range(40)]
    crew.close()


def test_an_error_in_a_crew_reaches_the_caller():
    crew = Crew(2, "test")

    def work(number):
        if number == 5:
            raise ValueError(number)

    with pytest.raises(ValueError, match="5"):
        crew.each(20, work, 2)
    crew.close()


def test_no_helper_works_on_after_an_interrupted_call():
    crew = Crew(1, "test")
    caller, helping, begun, done = threading.get_ident(), threading.Event(), [], []

    def work(number):
        if threading.get_ident() == caller:
            helping.wait(60)
            raise KeyboardInterrupt
        begun.append(number)
        helping.set()
        time.sleep(0.02)
        done.append(number)

    with pytest.raises(KeyboardInterrupt):
        crew.each(10_000, work, 1)
    reached = len(begun)
    assert 0 < reached < 9999
    assert done == begun
    time.sleep(0.1)
    assert len(begun) == reached
    crew.close()


def test_background_work_goes_on_until_there_is_none_and_begins_again_when_woken():
    left = [3]

    def chore():
        left[0] -= 1
        return left[0] > 0

    background = Background(chore, "test")
    background.wake()
    assert background.settle(10)
    assert left == [0]
    left[0] = 2
    background.wake()
    assert background.settle(10)
    assert left == [0]
    background.stop()
    background.wake()
    assert left == [0]


def test_stopping_background_work_waits_for_the_piece_at_hand_only():
    count = [0]

    def chore():
        count[0] += 1
        time.sleep(0.005)
        return True

    background = Background(chore, "test")
    background.wake()
    while not count[0]:
        time.sleep(0.001)
    background.stop()
    reached = count[0]
    time.sleep(0.02)
    assert count[0] == reached


def test_background_work_that_raises_is_over(monkeypatch):
    raised = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: raised.set())

    def chore():
        raise ZeroDivisionError

    background = Background(chore, "test")
    background.wake()
    assert background.settle(10)
    background.stop()
    assert raised.wait(10)


def no_thread(self):
    raise RuntimeError("can't start new thread")


def test_a_crew_without_threads_works_on_the_callers_thread(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    crew, done = Crew(3, "test"), []
    crew.each(40, done.append, 3)
    assert done == list(range(40))
    crew.close()
    background = Background(lambda: pytest.fail("nobody does it"), "test")
    background.wake()
    assert background.settle(0)
    background.stop()


def test_background_work_that_got_no_thread_runs_at_the_next_wake(monkeypatch):
    done = threading.Event()
    background = Background(lambda: done.set() or False, "test")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        background.wake()
    background.wake()
    assert done.wait(10)
    background.stop()

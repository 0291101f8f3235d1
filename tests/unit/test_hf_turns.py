"""Turns: one thread at a time is inside, and may come in again from within."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from quire.engines.hf.turns import Turn, in_turn
from quire.errors import CacheBusy


@pytest.fixture
def turn():
    return Turn()


@pytest.fixture
def elsewhere():
    """Runs a function in one other thread, always the same, and gives what it gives."""
    with ThreadPoolExecutor(1, thread_name_prefix="other") as pool:
        yield lambda function: pool.submit(function).result(10)


def come_in(turn):
    with turn:
        return "was inside"


def test_another_thread_is_turned_away_until_the_first_has_left(turn, elsewhere):
    with turn, turn:
        with pytest.raises(CacheBusy, match="'MainThread' is using this cache, and one thread"):
            elsewhere(lambda: come_in(turn))
        assert come_in(turn)
    assert elsewhere(lambda: come_in(turn))


def test_what_raises_has_left(turn, elsewhere):
    with pytest.raises(KeyError), turn, turn.lending():
        raise KeyError
    assert elsewhere(lambda: come_in(turn))


def test_what_is_lent_keeps_others_out_and_the_lender_may_come_in(turn, elsewhere):
    with turn, turn.lending():
        with pytest.raises(CacheBusy, match=r"'MainThread' .* or has a session open"):
            elsewhere(lambda: come_in(turn))
        assert come_in(turn)
        with turn, turn.lending():
            assert come_in(turn)
        with pytest.raises(CacheBusy):
            elsewhere(lambda: come_in(turn))
    assert elsewhere(lambda: come_in(turn))


def test_what_is_lent_may_be_given_back_by_another_thread(turn, elsewhere):
    turn.__enter__()
    lent = turn.lending()
    lent.__enter__()
    elsewhere(lambda: (lent.__exit__(None, None, None), turn.__exit__()))
    assert come_in(turn)
    assert elsewhere(lambda: come_in(turn))


def test_giving_back_waits_for_the_call_that_runs(turn):
    turn.__enter__()
    lent = turn.lending()
    lent.__enter__()
    order, began = [], threading.Event()

    def give_back():
        began.set()
        lent.__exit__(None, None, None)
        order.append("given back")
        turn.__exit__()

    other = threading.Thread(target=give_back)
    with turn:
        other.start()
        began.wait()
        other.join(0.02)
        order.append("call ended")
    other.join()
    assert order == ["call ended", "given back"]


def test_those_who_may_not_come_in_can_see_it(turn, elsewhere):
    def free():
        with turn.if_free() as is_ours:
            return is_ours

    with turn:
        assert free()
        assert not elsewhere(free)
    assert elsewhere(free)


def test_of_many_threads_one_is_inside(turn):
    inside, most, refused = [], [0], [0]

    class Thing:
        _turn = turn

        @in_turn
        def use(self):
            inside.append(1)
            most[0] = max(most[0], len(inside))
            inside.pop()

    def run():
        for _ in range(300):
            try:
                Thing().use()
            except CacheBusy:
                refused[0] += 1

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert come_in(turn)

"""Turns: one thread at a time is inside, and may come in again from within."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")

from cuts import LineCut
from interrupt_help import SignalCut
from quire.engines import thread_guard as turns
from quire.engines.thread_guard import ThreadGuard, guarded
from quire.errors import CacheBusy, ConfigError


@pytest.fixture
def turn():
    return ThreadGuard()


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


def test_an_error_inside_the_guard_releases_it(turn, elsewhere):
    with pytest.raises(KeyError), turn, turn.lending():
        raise KeyError
    assert elsewhere(lambda: come_in(turn))


def test_a_lent_guard_admits_its_owner_alone(turn, elsewhere):
    with turn, turn.lending():
        with pytest.raises(CacheBusy, match=r"'MainThread' .* or has a session open"):
            elsewhere(lambda: come_in(turn))
        assert come_in(turn)
        with turn, turn.lending():
            assert come_in(turn)
        with pytest.raises(CacheBusy):
            elsewhere(lambda: come_in(turn))
    assert elsewhere(lambda: come_in(turn))


def test_a_lent_guard_may_be_given_back_by_another_thread(turn, elsewhere):
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


def test_if_free_tells_a_thread_that_the_guard_is_taken(turn, elsewhere):
    def free():
        with turn.if_free() as is_ours:
            return is_ours

    with turn:
        assert free()
        assert not elsewhere(free)
    assert elsewhere(free)


def test_a_guard_admits_one_of_many_threads(turn):
    inside, most, refused = [], [0], [0]

    class Thing:
        _guard = turn

        @guarded
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


# -- waiting for a turn ------------------------------------------------------------------------------

LONG_S, SHORT_S = 60.0, 0.02


def waiting(turn, num):
    """Wait until so many threads wait for a turn."""
    while len(turn._queue) < num:
        threading.Event().wait(0.001)


def test_a_thread_waits_for_its_turn_and_comes_in_when_the_other_has_left():
    turn, order = ThreadGuard(wait_s=LONG_S), []

    def come():
        with turn:
            order.append("second")

    other = threading.Thread(target=come)
    with turn:
        other.start()
        waiting(turn, 1)
        order.append("first")
    other.join()
    assert order == ["first", "second"]
    assert not turn._queue


def test_threads_come_in_in_the_order_in_which_they_came():
    turn, order, threads = ThreadGuard(wait_s=LONG_S), [], []

    def come(number):
        with turn:
            order.append(number)

    with turn:
        for number in range(6):
            threads.append(threading.Thread(target=come, args=(number,)))
            threads[-1].start()
            waiting(turn, number + 1)
    for thread in threads:
        thread.join()
    assert order == list(range(6))


def test_a_thread_that_has_waited_in_vain_is_turned_away(elsewhere):
    turn = ThreadGuard(wait_s=SHORT_S)
    with turn, pytest.raises(CacheBusy, match=r"'MainThread' is using .*, also after 0.02 s"):
        elsewhere(lambda: come_in(turn))
    assert not turn._queue
    assert elsewhere(lambda: come_in(turn))


def test_a_thread_that_is_inside_comes_in_again_while_others_wait():
    turn = ThreadGuard(wait_s=LONG_S)
    other = threading.Thread(target=lambda: come_in(turn))
    with turn:
        other.start()
        waiting(turn, 1)
        assert come_in(turn)
        with turn, turn.lending():
            assert come_in(turn)
            assert len(turn._queue) == 1
    other.join()


def test_a_call_that_waits_for_a_thread_that_needs_its_turn_goes_on_after_the_wait(elsewhere):
    turn, asked = ThreadGuard(wait_s=SHORT_S), []

    def within():
        with pytest.raises(CacheBusy):
            elsewhere(lambda: come_in(turn))
        asked.append(1)

    with turn:
        within()
        with turn.lending():
            within()
    assert asked == [1, 1]


def test_if_free_neither_waits_nor_passes_the_queue(elsewhere):
    def free():
        with turn.if_free() as is_ours:
            return is_ours

    turn = ThreadGuard(wait_s=LONG_S)
    with turn:
        assert not elsewhere(free)
    turn._queue.append((threading.Thread(name="came first"), float("inf")))
    assert not elsewhere(free)


def test_ctrl_c_on_any_line_of_the_way_in_leaves_the_turn_to_others(elsewhere):
    leave, inside = threading.Event(), threading.Event()
    cut_at = []
    for at in range(1, 100):
        turn = ThreadGuard(wait_s=SHORT_S)
        leave.clear(), inside.clear()

        def hold(turn=turn):
            with turn:
                inside.set()
                leave.wait()

        holder = threading.Thread(target=hold)
        if at % 2:  # on the way in where it is free, and where it waits in vain
            holder.start()
            inside.wait()
        cut = LineCut((turns.__file__,), (at + 1) // 2)

        entered = []

        def enter(turn=turn, at=at, entered=entered):
            try:
                turn.__enter__()
                entered.append(at)
            except CacheBusy:
                pass

        if cut.run(enter):
            cut_at.append(at)
        elif entered:
            turn.__exit__()
        if at % 2:
            leave.set()
            holder.join()
        assert elsewhere(lambda turn=turn: come_in(turn))
    assert len(cut_at) > 20


class Uses:
    """Every way in and out, in methods that take the turn."""

    def __init__(self, turn):
        self._guard = turn

    @guarded
    def call(self):
        pass

    @guarded
    def call_within(self):
        self.call()

    @guarded
    def lend(self):
        with self._guard.lending():
            pass

    @guarded
    def lend_and_call(self):
        with self._guard.lending():
            self.call()

    @guarded
    def lend_twice(self):
        with self._guard.lending():
            self.lend()

    def look(self):
        with self._guard.if_free():
            pass

    def mend(self):
        with self._guard.mending():
            pass

    @guarded
    def fail(self):
        with self._guard.lending():
            raise CacheBusy("a refusal")


@pytest.mark.cases(10)
@pytest.mark.parametrize("way", [name for name in vars(Uses) if name[0] != "_"])
@pytest.mark.parametrize("is_inside", [False, True])
def test_ctrl_c_wherever_a_signal_may_come_leaves_the_turn_to_others(elsewhere, way, is_inside):
    at = 0
    while True:
        at += 1
        turn = ThreadGuard()
        cut = SignalCut(at, rooms=(turns.__file__,))
        if is_inside:
            with turn:
                was_cut = cut.run(getattr(Uses(turn), way))
                with pytest.raises(CacheBusy):
                    elsewhere(lambda turn=turn: come_in(turn))
        else:
            was_cut = cut.run(getattr(Uses(turn), way))
        turn.cut_off = ""
        assert elsewhere(lambda turn=turn: come_in(turn)), f"cut at {at}"
        assert (turn._depth, turn._lenders) == (0, {}), f"cut at {at}"
        if not was_cut and cut.count < at:
            break
    assert at > 10


def test_ctrl_c_while_what_was_lent_is_waited_for_leaves_the_other_call_inside():
    turn, waits = ThreadGuard(), []
    turn.__enter__()
    lent = turn.lending()
    lent.__enter__()

    def interrupted(is_free, _wait_s=None):
        waits.append(is_free())
        raise KeyboardInterrupt

    turn._inside, turn._depth = threading.Thread(name="in a call"), 1
    turn._changed.wait_for = interrupted
    with pytest.raises(KeyboardInterrupt):
        lent.__exit__(None, None, None)
    turn.__exit__()
    assert (waits, turn._depth, turn._inside.name) == ([False], 1, "in a call")
    assert not turn._lenders


@pytest.mark.parametrize("wait_s", [-1, float("nan"), float("inf"), "1", True, [1]])
def test_a_wait_that_is_no_number_of_seconds_is_refused(wait_s):
    with pytest.raises(ConfigError, match="wait_s is"):
        ThreadGuard(wait_s=wait_s)

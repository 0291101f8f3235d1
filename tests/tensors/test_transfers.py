"""Transfers: what is done when, and what a caller may rely on."""

from contextlib import contextmanager

import pytest

from quire.tensors.transfers import Lane, Transfers, transfers_to


class LoggedLane(Lane):
    def __init__(self):
        self.log = []

    def begin(self):
        self.log.append("begin")

    def run(self, step):
        step()
        self.log.append("mark")
        return len(self.log)

    def wait(self, mark):
        self.log.append(f"wait {mark}")


@pytest.fixture
def lane():
    return LoggedLane()


@pytest.fixture
def transfers(lane):
    return Transfers(lane)


def logged(lane, name):
    return lambda index: lane.log.append(f"{name}{index}")


def test_transfers_without_a_lane_run_at_once():
    done, transfers = [], Transfers()
    transfers.add([3, 5], done.append)
    transfers.add_behind([3, 5], done.append)
    transfers.then(lambda: done.append("then"))
    assert done == [None, None, "then"]
    assert transfers.is_idle
    assert transfers.arrival(3) is None


def test_waiting_for_a_layer_runs_its_transfer_and_sends_the_next(transfers, lane):
    transfers.add([3, 5, 8], logged(lane, "a"))
    assert lane.log == ["begin"], "the side runs behind what was queued when the step was added"
    transfers.wait(3)
    assert lane.log == ["begin", "a0", "mark", "wait 3", "a1", "mark"]
    transfers.wait(5)
    assert lane.log[6:] == ["wait 6", "a2", "mark"], "sent before, waited for now"


def test_what_is_added_for_a_layer_later_runs_behind_what_was_added_before(transfers, lane):
    transfers.add([0, 1], logged(lane, "a"))
    transfers.add_behind([1], logged(lane, "b"))
    assert lane.log == ["begin", "begin"]
    transfers.join()
    assert lane.log[2:] == ["a0", "mark", "wait 4", "a1", "mark", "b0", "mark", "wait 9"]


def test_a_transfer_added_to_an_awaited_layer_is_awaited_anew(transfers, lane):
    transfers.add([0, 1], logged(lane, "a"))
    transfers.wait(0)
    transfers.add([0], logged(lane, "b"))
    lane.log.clear()
    transfers.arrival(0)()
    assert lane.log == ["b0", "mark", "wait 2"]


def test_behind_nothing_a_step_is_done_at_once(transfers, lane):
    transfers.add_behind([0, 1], logged(lane, "a"))
    assert lane.log == ["aNone"]
    assert transfers.is_idle


def test_calls_are_made_when_the_last_layer_was_waited_for(transfers, lane):
    transfers.add([0, 1], logged(lane, "a"))
    transfers.then(lambda: lane.log.append("then"))
    transfers.wait(0)
    assert "then" not in lane.log, "the second layer is sent, but nothing waits for it"
    transfers.wait(1)
    assert lane.log[-1] == "then"
    transfers.join()
    assert lane.log.count("then") == 1


def test_a_step_that_raises_is_tried_again(transfers, lane):
    failures = [MemoryError("full")]

    def step(index):
        if index == 1 and failures:
            raise failures.pop()
        lane.log.append(f"a{index}")

    transfers.add([0, 1], step)
    transfers.then(lambda: lane.log.append("then"))
    with pytest.raises(MemoryError):
        transfers.wait(0)
    assert not transfers.is_idle
    transfers.join()
    assert [each for each in lane.log if each[0] in "at"] == ["a0", "a1", "then"]


def test_give_up_drops_pending_transfers_and_waits_for_sent_ones(transfers, lane):
    transfers.add([0, 1, 2], logged(lane, "a"))
    transfers.then(lambda: lane.log.append("then"))
    transfers.wait(0)
    lane.log.clear()
    transfers.give_up()
    assert lane.log == ["mark", "wait 1", "then"], "a mark behind all that is on the side"
    assert transfers.is_idle


def test_layers_wait_before_anything_touches_their_columns():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from quire.engines.models.layers import WorkingLayer

    one = torch.ones(2, 1, 1, 4)
    touches = {
        "update": lambda layer: layer.update(one, one),
        "extend": lambda layer: layer.extend(one, one),
        "row": lambda layer: layer.row(0, 0, 1),
        "reorder_from": lambda layer: layer.reorder_from(torch.tensor([1, 0]), 0),
        "select": lambda layer: layer.batch_select_indices(torch.tensor([1, 0])),
    }
    for name, touch in touches.items():
        layer, calls = WorkingLayer(), []
        layer.start_with(3, (one, one))
        layer.arriving = lambda calls=calls: calls.append("arrived")
        touch(layer)
        assert calls == ["arrived"], name
        touch(layer)
        assert calls == ["arrived"], f"{name}: once"


def test_on_cuda_a_stream_runs_behind_the_current_one_and_marks_are_events(monkeypatch):
    torch = pytest.importorskip("torch")
    log, current = [], ["main"]

    class Stream:
        def __init__(self, name):
            self.name = name if isinstance(name, str) else "side"

        def wait_stream(self, other):
            log.append(f"{self.name} waits for {other.name}")

        def wait_event(self, event):
            log.append(f"{self.name} waits for {event.behind}")

    class Event:
        def record(self, stream):
            self.behind = f"step {len(log)} of {stream.name}"

    @contextmanager
    def entered(stream):
        current.append(stream.name)
        yield
        current.pop()

    for name, fake in (
        ("Stream", Stream),
        ("Event", Event),
        ("stream", entered),
        ("current_stream", lambda _device: Stream(current[-1])),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    transfers = transfers_to(torch.device("cuda"))
    transfers.add([0, 1], lambda index: log.append(f"layer {index} on {current[-1]}"))
    transfers.wait(0)
    assert log == [
        "side waits for main",
        "layer 0 on side",
        "main waits for step 2 of side",
        "layer 1 on side",
    ]
    transfers.join()
    assert log[4:] == ["main waits for step 4 of side"]
    assert transfers_to(torch.device("cpu")).arrival(0) is None

"""Blocks on their way to a device, layer after layer, while the layers before them compute.

    host     copies the bytes of layer i + 1 into pinned memory, and queues
    side     H2D, blocks, working cache of layer i + 1                      (a stream of its own)
    current  computes layer i, and waits for the event of layer i + 1

A step is asked for when its layer is first touched, and the next layer's with it. So a host copies
one layer while the device computes another, and nothing that is late can be read.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

Step = Callable[[int | None], None]
"""Moves the i-th layer of some, or with None all of them at once; twice is as once."""


class Lane(ABC):
    """An order of its own for what steps queue on a device. A mark is what one step has queued."""

    @abstractmethod
    def begin(self) -> None:
        """Have all later steps run behind the present work of the current stream."""

    @abstractmethod
    def run(self, step: Callable[[], None]) -> object:
        """Do a step behind those before it, and return its mark."""

    @abstractmethod
    def wait(self, mark: object) -> None:
        """Have all that the current stream queues later run behind the step of this mark."""


class CudaLane(Lane):
    """A stream beside the current one of a CUDA device, and events as marks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)

    def begin(self) -> None:
        self._side.wait_stream(torch.cuda.current_stream(self._device))

    def run(self, step: Callable[[], None]) -> object:
        with torch.cuda.stream(self._side):
            step()
            mark = torch.cuda.Event()
            cast("Any", mark).record(self._side)
            return mark

    def wait(self, mark: object) -> None:
        torch.cuda.current_stream(self._device).wait_event(cast("torch.cuda.Event", mark))


@dataclass(slots=True)
class _Layer:
    """The remaining steps of one layer, and the mark of its last one."""

    steps: deque[Callable[[], None]] = field(default_factory=deque[Callable[[], None]])
    mark: object = None


class Transfers:
    """Steps that wait for their layer to be needed; without a lane they are done when added.

    What a step reads and writes is its own until `wait` of its layer, or `join`, has returned.
    A step that raises stays to be done: `join` tries it again. One thread at a time.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane = lane
        self._layers: dict[int, _Layer] = {}
        self._then: list[Callable[[], None]] = []

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to wait for."""
        return not self._layers

    def add(self, layers: Sequence[int], step: Step) -> None:
        """Do a step for each of these layers of a model, behind what was added for them before."""
        if self._lane is None:
            step(None)
            return
        self._lane.begin()
        for index, layer in enumerate(layers):
            self._layers.setdefault(layer, _Layer()).steps.append(partial(step, index))

    def add_behind(self, layers: Sequence[int], step: Step) -> None:
        """Do a step behind what was added before; at once, where that is nothing."""
        if self.is_idle:
            step(None)
        else:
            self.add(layers, step)

    def arrival(self, layer: int) -> Callable[[], None] | None:
        """Return the call to make before a layer is touched; None where nothing is on its way to it."""
        return (lambda: self.wait(layer)) if layer in self._layers else None

    def wait(self, layer: int) -> None:
        """Have the current stream wait for a layer, and send the one behind it on its way."""
        self._await(layer)
        behind = min((each for each in self._layers if each > layer), default=None)
        if behind is not None:
            self._send(self._layers[behind])

    def join(self) -> None:
        """Have the current stream wait for all that was added."""
        for layer in sorted(self._layers):
            self._await(layer)

    def then(self, call: Callable[[], None]) -> None:
        """Call when all that was added is waited for, or given up; now, where that is nothing."""
        self._then.append(call)
        self._settle()

    def give_up(self) -> None:
        """Forget what was not sent yet: what it was to fill holds anything.

        What a step had queued before it raised has no mark: nobody may read behind it, but the
        memory that it writes to is the caller's again.
        """
        try:
            if self._lane is not None and self._layers:
                self._lane.wait(self._lane.run(lambda: None))
        finally:
            self._layers.clear()
            self._settle()

    def _await(self, layer: int) -> None:
        held = self._layers.get(layer)
        if held is None:
            return
        self._send(held)
        if self._lane is not None and held.mark is not None:
            self._lane.wait(held.mark)
        del self._layers[layer]
        self._settle()

    def _send(self, held: _Layer) -> None:
        while self._lane is not None and held.steps:
            held.mark = self._lane.run(held.steps[0])
            held.steps.popleft()

    def _settle(self) -> None:
        if self.is_idle:
            calls, self._then = self._then, []
            for call in calls:
                call()


def transfers_to(device: torch.device) -> Transfers:
    """Return transfers to a device: beside its current stream on CUDA, else done when added."""
    return Transfers(CudaLane(device) if device.type == "cuda" else None)

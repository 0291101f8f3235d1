"""An engine that launches steps before it has seen what those before them computed.

The device does what it was given in order, late; the host commits a step's tokens when the step is done, and by
then the next ones are launched. So a request that has ended, or was preempted, still writes to blocks that others
have got meanwhile. What that asks of an engine stands in docs/decisions/steps.md.
"""

import random
from collections import deque
from types import SimpleNamespace

import pytest
from hybrid_help import make

from quire import groups, ops
from quire.core import FullAttention
from quire.errors import OutOfBlocks
from quire.groups import SlidingWindow
from turns import few

BLOCK, WINDOW, CHUNK = 4, 6, 9
KINDS = (FullAttention(), SlidingWindow(WINDOW))


class Device:
    """Memory by group and block, and a queue of operations that change or read it."""

    def __init__(self, sizes):
        self.memory = [[[None] * BLOCK for _ in range(size)] for size in sizes]
        self.queue = deque()

    def copy(self, copies):
        read = [list(self.memory[copy.group][copy.src]) for copy in copies]
        for copy, cells in zip(copies, read, strict=True):
            self.memory[copy.group][copy.dst][: copy.num_tokens] = cells[: copy.num_tokens]

    def write(self, rows):
        """Write tokens [start, stop) of each request."""
        for request, tables, start, stop in rows:
            for memory, table in zip(self.memory, tables, strict=True):
                for at in range(start, stop):
                    if (block := table[at // BLOCK]) >= 0:
                        memory[block][at % BLOCK] = tuple(request.text[: at + 1])

    def read(self, rows):
        """Read what tokens [start, stop) of each request that still runs attend to."""
        for request, tables, start, stop in rows:
            for kind, memory, table in zip(KINDS, self.memory, tables, strict=True):
                first = max(start - WINDOW + 1, 0) if kind is KINDS[1] else 0
                for at in range(first, stop):
                    seen = memory[table[at // BLOCK]][at % BLOCK] if request.running else None
                    assert not request.running or seen == tuple(request.text[: at + 1])


class EngineAhead:
    """Requests that come, are computed in steps `ahead` of their results, and end when a result says so."""

    def __init__(self, seed, ahead, *, loads_wait=True):
        self.draw = random.Random(seed)
        self.manager = make(("full", 14, KINDS[0]), ("window", 12, KINDS[1]))
        self.device = Device([14, 12])
        self.ahead, self.loads_wait = ahead, loads_wait
        self.running, self.texts, self.finished = [], [[]], 0

    def step(self):
        if len(self.running) < 3:
            self.open()
        rows = [row for request in self.running if (row := self.reserve(request, CHUNK))]
        self.launch(rows)
        if not rows and len(self.device.queue) == 1:  # nobody gets on: preempt the youngest
            self.end(self.running[-1])
        while len(self.device.queue) > self.ahead:
            self.finish_step()
        ops.check(self.manager)

    def open(self):
        text = list(self.draw.choice(self.texts))[: self.draw.randrange(20)]
        text += [self.draw.randrange(3) for _ in range(40 - len(text))]
        prompt_len = self.draw.randint(1, 24)
        seq = self.manager.open(text[:prompt_len])
        request = SimpleNamespace(
            seq=seq, text=text, prompt_len=prompt_len, launched=seq.num_cached, running=True
        )
        request.end = prompt_len + self.draw.randint(1, 10)
        self.running.append(request)
        if self.draw.random() < 0.3:  # the next part of its prompt comes from elsewhere
            row = self.reserve(request, CHUNK)
            if row and self.loads_wait:
                self.launch([row])
            elif row:
                self.device.copy(self.manager.take_copies())
                self.device.write([row])
                self.launch([row], loaded=True)

    def reserve(self, request, num_tokens):
        """Make room for a request's next tokens, of which the host knows those of the prompt only."""
        start = request.launched
        stop = min(start + num_tokens, max(request.prompt_len, start + 1), len(request.text))
        stop = min([end for end in groups.stops(self.manager, request.seq) if end > start] + [stop])
        try:
            self.manager.reserve(request.seq, stop - request.seq.computed)
        except OutOfBlocks:
            return None
        request.launched = stop
        tables = [request.seq.block_ids(group).tolist() for group in range(len(KINDS))]
        return (request, tables, start, stop) if stop > start else None

    def launch(self, rows, *, loaded=False):
        copies = self.manager.take_copies()
        self.device.queue.append((copies, rows, loaded))

    def finish_step(self):
        copies, rows, loaded = self.device.queue.popleft()
        self.device.copy(copies)
        if not loaded:
            self.device.write(rows)
        self.device.read(rows)
        for request, _, start, stop in rows:
            if request.running:
                self.manager.commit(request.seq, request.text[start:stop])
                if stop >= request.end:
                    self.end(request)

    def end(self, request):
        self.texts.append(request.text[: request.seq.computed])
        self.manager.close(request.seq)
        self.running.remove(request)
        request.running = False
        self.finished += 1


def serve(seed, ahead, **options):
    """Run an engine for a while; return how many requests it finished."""
    engine = EngineAhead(seed, ahead, **options)
    for _ in range(60):
        engine.step()
    return engine.finished


@pytest.mark.cases(1)
@pytest.mark.parametrize("seeds", few([4, 15], 4))
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_blocks_may_be_given_out_again_while_a_launched_step_still_writes_to_them(ahead, seeds):
    assert sum(serve(seed, ahead) for seed in range(seeds)) > 7 * seeds


def test_a_load_that_overtakes_the_steps_launched_before_it_is_overwritten_by_them():
    def is_overwritten(seed):
        try:
            return serve(seed, 2, loads_wait=False) < 0
        except AssertionError:
            return True

    assert any(is_overwritten(seed) for seed in range(15))

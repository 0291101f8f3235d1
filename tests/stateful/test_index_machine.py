"""A cluster index beside a dictionary, through streams of events that lose, double and reorder batches."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from running import run_machine

from quire_router.index import ClusterIndex

sys.path.append(str(Path(__file__).parents[1] / "router"))

from index_help import MEDIA, SIZE, Publisher, SmallIndex

from turns import few

SEED = int(os.environ.get("QUIRE_SEED", "20260101"))
EXAMPLES = int(os.environ.get("QUIRE_EXAMPLES", "30"))
REPLICAS = ["a", "b"]
which = st.sampled_from(REPLICAS)
texts = st.lists(st.integers(0, 2), min_size=SIZE, max_size=5 * SIZE).map(tuple)
PROMPTS = [(0,) * 8, (0, 0, 1, 1, 2, 2), (1, 2, 0, 0), (2,) * 6]


class Stream(RuleBasedStateMachine):
    """Two engines publish; what arrives is given to the index and to the dictionary, in that order."""

    @initialize(capacity=st.sampled_from([1 << 10, 6, 1]))
    def begin(self, capacity):
        self.index, self.capacity = ClusterIndex(capacity, SIZE), capacity
        self.engines = {name: Publisher(seed) for seed, name in enumerate(REPLICAS)}
        self.small = {name: SmallIndex() for name in REPLICAS}
        self.arrived = dict.fromkeys(REPLICAS, 0)  # batches that were taken or lost
        self.missed = dict.fromkeys(REPLICAS, False)

    @rule(name=which, text=texts, medium=st.sampled_from(MEDIA))
    def compute(self, name, text, medium):
        self.engines[name].compute(text, medium)

    @precondition(lambda self: any(engine.blocks for engine in self.engines.values()))
    @rule(name=which, at=st.integers(0, 50))
    def drop(self, name, at):
        if self.engines[name].blocks:
            self.engines[name].drop(at)

    @rule(name=which)
    def clear(self, name):
        self.engines[name].clear()

    @rule(name=which)
    def deliver(self, name):
        for number, events in self.engines[name].sent[self.arrived[name] :]:
            self.index.apply(name, events, number)
            self.small[name].apply(events)
            cleared = any(type(event).__name__ == "ClearedEvent" for event in events)
            self.missed[name] &= not cleared
        self.arrived[name] = len(self.engines[name].sent)

    @rule(name=which)
    def lose(self, name):
        if self.arrived[name] + 1 < len(self.engines[name].sent):
            self.arrived[name] += 1
            self.missed[name] = True
            self.deliver_one(name)

    def deliver_one(self, name):
        number, events = self.engines[name].sent[self.arrived[name]]
        self.index.apply(name, events, number)
        self.small[name].apply(events)
        if any(type(event).__name__ == "ClearedEvent" for event in events):
            self.missed[name] = False
        self.arrived[name] += 1

    @rule(name=which, back=st.integers(1, 3))
    def double_or_late(self, name, back):
        at = self.arrived[name] - back
        if at > 0:  # number 0 begins anew
            number, events = self.engines[name].sent[at]
            before = self.index.num_late
            self.index.apply(name, events, number)
            assert self.index.num_late == before + 1

    @rule(name=which)
    def resync(self, name):
        engine = self.engines[name]
        self.index.resync(name, engine.snapshot(), engine.number - 1)
        self.small[name] = SmallIndex()
        self.small[name].apply(engine.snapshot())
        self.arrived[name], self.missed[name] = len(engine.sent), False

    @rule(name=which)
    def restart(self, name):
        self.engines[name] = Publisher(self.engines[name].seed + 2)
        self.engines[name].compute((0,) * 4, "GPU")
        self.small[name], self.arrived[name] = SmallIndex(), 0
        self.deliver(name)
        self.missed[name] = False

    @rule(name=which)
    def forget(self, name):
        if not self.index.replicas.get(name, True):
            self.index.forget(name)
            self.resync(name)

    @invariant()
    def it_says_what_the_dictionary_says(self):
        self.index.check()
        assert self.index.num_blocks <= self.capacity
        for prompt in PROMPTS:
            held = self.index.lookup(np.array(prompt, np.int32)).held
            for name in REPLICAS:
                found, expected = held.get(name, (0, 0, 0)), self.small[name].lookup(prompt)
                if self.capacity > 1000:
                    assert found == expected
                else:  # what had no room is not found
                    assert sum(found) <= sum(expected)
        for name, is_degraded in self.index.replicas.items():
            assert is_degraded == self.missed[name]


@pytest.mark.ci
@pytest.mark.parametrize("examples", few([EXAMPLES, 20 * EXAMPLES], EXAMPLES))
def test_an_index_says_what_a_dictionary_of_the_same_events_says(examples):
    run_machine(Stream, SEED, examples, steps_per_example=30)

"""The pace of an engine, on a machine whose steps take what a formula says: no step takes longer than wanted."""

from random import Random

import numpy as np
import pytest
from hypothesis import strategies as st

from quire import CacheManager
from quire.engines.loop.settings import EngineSettings
from quire.errors import ConfigError
from quire.scheduling import Job, Limits, Scheduler
from quire.scheduling.pace import FIRST, StepPace
from turns import drawn


class PacedSteps:
    """A scheduler at a pace; a step takes `base` seconds, and more by row, prompt token and (token, earlier token) pair."""

    def __init__(self, target_s, costs, random):
        self.pace, self.costs, self.random = StepPace(target_s), costs, random
        self.manager = CacheManager(20_000, 16)
        self.scheduler = Scheduler(self.manager, Limits(64, 4096))
        self.took = []

    def ask(self, length, max_tokens):
        prompt = self.random.choices(range(1000), k=length)
        job = Job(np.array(prompt, np.int32), max_tokens)
        self.scheduler.add(job)
        return job

    def step(self):
        """Do a step; return its prompt tokens."""
        self.pace.before_step(self.scheduler)
        step = self.scheduler.plan()
        if step is None:
            return 0
        self.manager.take_copies()
        self.scheduler.complete(step, np.ones(len(step.samples), np.int32))
        num = step.num_decodes
        starts, lengths = step.starts[num:].astype(float), step.lengths[num:].astype(float)
        pairs = float((lengths * (starts + lengths / 2)).sum())
        features = (1, num, float(lengths.sum()), pairs)
        seconds = float(np.dot(self.costs, features))
        self.took.append(seconds * self.random.uniform(0.95, 1.05))
        self.pace.observe(step, self.took[-1])
        for job in step.sampled:
            if job.num_generated >= job.max_tokens:
                self.scheduler.finish(job)
        return int(lengths.sum())


@drawn(
    25,
    500,
    seed=st.integers(0, 2**32),
    base=st.sampled_from([0.001, 0.02, 0.05]),
    row=st.sampled_from([1e-5, 1e-3]),
    token=st.sampled_from([1e-4, 6e-4, 2e-3]),
    pair=st.sampled_from([0.0, 2e-8, 3e-7]),
    target=st.sampled_from([0.08, 0.25]),
)
def test_steps_take_what_was_wanted_at_most_once_costs_are_known(
    *, seed, base, row, token, pair, target
):
    machine = PacedSteps(target, (base, row, token, pair), Random(seed))
    for _ in range(20):
        machine.ask(machine.random.randint(1, 3000), machine.random.randint(1, 60))
        for _ in range(machine.random.randint(1, 12)):
            machine.step()
    known = machine.took[10:]
    late = [seconds for seconds in known if seconds > 1.5 * target]
    assert len(late) <= 0.02 * len(known)


def test_a_step_is_filled_as_far_as_its_time_goes():
    machine = PacedSteps(0.25, (0.02, 1e-3, 6e-4, 2e-8), Random(1))
    assert machine.ask(20_000, 1).state == "waiting"
    sizes = [machine.step() for _ in range(12)]
    assert sizes[0] == FIRST
    assert all(0.15 < seconds < 0.25 for seconds in machine.took[6:])


def test_prompts_go_on_where_decoding_alone_takes_longer_than_wanted():
    machine = PacedSteps(0.08, (0.2, 0, 1e-3, 0), Random(1))
    machine.ask(5, 400)
    for _ in range(20):
        machine.step()
    machine.ask(1000, 1)
    sizes = [machine.step() for _ in range(10)]
    assert min(sizes[6:]) > 40  # a quarter of 0.2 seconds


@pytest.mark.parametrize("most", [0, -1, "soon", float("nan")])
def test_a_pace_that_cannot_be_kept_is_refused(most):
    with pytest.raises(ConfigError, match="max_inter_token_s"):
        EngineSettings(max_inter_token_s=most)

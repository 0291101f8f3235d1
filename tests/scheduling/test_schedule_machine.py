"""Random arrivals, sizes, budgets, pools, priorities, scopes, scores, forks, drafts, faults: each job gets the tokens of plain generation.

Hypothesis chooses the sizes and a seed; what happens then is drawn from that seed, so that one example is a long and busy life.
"""

import ast
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from scheduling_help import VOCAB, PretendLoop, expected, sample

import quire.scheduling
from quire import Scope, ops
from quire.core import FullAttention, LayerGroup
from quire.errors import DeadlinePassed, OutOfBlocks, PinBudgetExceeded, QueueTimeout
from quire.groups import ChunkedAttention, SlidingWindow
from quire.scheduling import Limits
from turns import drawn, few

SCOPES = [
    None,
    None,
    Scope(salt="1"),
    Scope(salt="2"),
    *(Scope(salt=salt, tenant=tenant) for salt, tenant in (("3", "a"), ("4", "a"), ("5", "b"))),
]
FAMILIES = [np.random.default_rng(seed).integers(0, VOCAB, 40).tolist() for seed in range(3)]

LAYERS = [
    lambda n: [LayerGroup("full", n)],
    lambda n: [LayerGroup("full", n), LayerGroup("sliding", n, SlidingWindow(6))],
    lambda n: [LayerGroup("full", n), LayerGroup("sliding", 9, SlidingWindow(9, sinks=2))],
    lambda n: [LayerGroup("sliding", 9, SlidingWindow(10)), LayerGroup("full", n, FullAttention())],
    lambda n: [LayerGroup("full", n), LayerGroup("chunked", 8, ChunkedAttention(8))],
    lambda n: [LayerGroup("chunked", n, ChunkedAttention(8)), LayerGroup("s", 9, SlidingWindow(5))],
]


WEIGHTS = {
    "add": 30,
    "steps": 40,
    "step_with_drafts": 8,
    "abort": 2,
    "abort_during_a_step": 2,
    "forward_fails": 1,
    "forget_a_step": 2,
    "hold": 2,
    "let_go": 2,
}


class JobLife:
    """`alive` jobs are in the scheduler; `leaders` have twins that are not yet; `outside` are pins that others hold in its pool."""

    def __init__(self, random, loop):
        self.random, self.loop = random, loop
        self.scheduler, self.manager = self.loop.scheduler, self.loop.manager
        self.alive, self.leaders, self.outside, self.now = [], {}, [], 0.0
        self.was_outside = False
        self.begun = set()  # jobs that were computed, as far as a step shows it

    def go(self, times):
        for name in self.random.choices([*WEIGHTS], [*WEIGHTS.values()], k=times):
            getattr(self, name)()
        self.end_well()

    def add(self):
        pick = self.random.choice
        own = [self.random.randrange(VOCAB) for _ in range(pick([0, 1, 3, 8]))]
        prompt = [*pick(FAMILIES)[: pick([0, 5, 8, 12, 20, 33])], *own] or [1]
        turn = pick([None, None, None, 2.0, 9.0])
        wait, stored = pick([None, None, None, None, 20.0]), pick([None, None, None, None, 0, 7])
        options = {
            "priority": pick([-1, 0, 0, 0, 1]),
            "scope": pick(SCOPES),
            "deadline": None if wait is None else self.now + wait,
            "start_by": float("inf") if turn is None else self.now + turn,
            "terms": {} if stored is None else {"store_until": stored},
            "is_scored": pick([False, False, False, True]),
        }
        try:
            job = self.loop.add(prompt, pick([1, 2, 5, 12, 25]), pick([0, 0, 0, 1, 3]), **options)
        except OutOfBlocks:
            self.loop.check()
        else:
            self.alive.append(job)
            self.leaders[job] = job.twins

    def steps(self):
        for _ in range(self.random.randrange(1, 4)):
            self.now += 1.0
            self.loop.step(self.now)
            self.look()

    def step_with_drafts(self):
        for job in self.scheduler.queues.decoding:
            prompt, at = job.tokens[: job.prompt_len], job.num_tokens
            right = self.random.randrange(4)
            drafts = expected(prompt, job.num_generated + right, job.scope)[at:]
            drafts += [VOCAB + 1] * self.random.randrange(2)
            job.drafts = np.array(drafts, np.int32) if self.random.random() < 0.7 else None
        self.steps()

    def abort(self):
        if self.alive:
            self.end(self.random.choice(self.alive))
            self.loop.check()

    def abort_during_a_step(self):
        step = self.plan()
        if step is None:
            return
        states = self.loop.model.forward(step)
        for job in self.random.sample(step.jobs, self.random.randint(1, len(step.jobs))):
            self.end(job)
        self.scheduler.complete(step, sample(step, states))
        self.loop.check()
        for job in step.sampled:
            if job.state in ("running", "waiting") and job.num_generated >= job.max_tokens:
                self.loop.finish(job)
        self.look()

    def forward_fails(self):
        step = self.plan()
        for job in [] if step is None else step.jobs:
            self.end(job)
        self.loop.model.copy()
        self.loop.check()

    def forget_a_step(self):
        self.plan()
        self.loop.model.copy()
        self.loop.check()

    def hold(self):
        prompt = self.random.choice(FAMILIES)[: self.random.randint(4, 40)]
        with suppress(PinBudgetExceeded):  # of a window's few blocks
            self.outside.append(ops.pin(self.manager, np.array(prompt, np.int32)).close)
            self.was_outside = True

    def let_go(self):
        if self.outside:
            self.outside.pop()()

    def plan(self):
        step = self.scheduler.plan(self.now)
        self.loop.check()
        self.look()
        return step

    def end(self, job):
        self.scheduler.finish(job)
        self.alive.remove(job)
        assert job.state == "finished"

    def look(self):
        for job, error in self.scheduler.given_up:
            if isinstance(error, QueueTimeout):
                assert job.start_by <= self.now < job.deadline
                assert job not in self.begun
            else:
                late = job.deadline <= self.now
                assert late if isinstance(error, DeadlinePassed) else self.was_outside, error
            assert job.state == "finished"
        self.scheduler.given_up.clear()
        for job in [job for job in self.leaders if job.state == "finished" or not job.twins]:
            self.alive += [twin for twin in self.leaders.pop(job) if twin.state != "new"]
        self.alive = [job for job in self.alive if job.state != "finished"]
        self.begun |= {job for job in self.alive if job.num_computed or job.num_preempted}
        assert all(self.may_be_here(job) for job in self.alive)
        assert len(self.alive) == len(self.scheduler)
        assert all(0 <= job.patience <= self.scheduler.limits.max_passed for job in self.alive)

    def may_be_here(self, job):
        """Whether a job's time is not over, or it was held back for one that computes its prefix."""
        has_time = job.state == "running" or job.start_by > self.now or job.behind is not None
        return has_time and job.deadline > self.now

    def end_well(self):
        while self.outside:
            self.let_go()
        while self.alive:
            self.now += 1.0
            before = len(self.alive)
            assert self.loop.step(self.now) is not None or len(self.scheduler) < before
            self.look()
        self.loop.check_empty()


@drawn(
    20,
    500,
    within=settings(phases=[Phase.explicit, Phase.reuse, Phase.generate]),
    seed=st.integers(0, 2**32),
    layers=st.sampled_from(LAYERS),
    room=st.integers(3, 120),
    block_size=st.sampled_from([1, 2, 4, 5]),
    max_running=st.integers(1, 8),
    budget=st.integers(1, 30),
    chunk=st.sampled_from([None, None, 1, 3, 7]),
    max_passed=st.integers(1, 5),
    scored=st.integers(1, 12),
)
def test_whatever_happens_each_job_gets_the_tokens_of_plain_generation(
    *, seed, layers, room, block_size, max_running, budget, chunk, max_passed, scored
):
    limits = Limits(max_running, max_running + budget, chunk, 0.05, max_passed)
    loop = PretendLoop(
        limits=limits, groups=layers(max(room // block_size, 1)), block_size=block_size
    )
    loop.scheduler.scored_tokens = scored
    JobLife(Random(seed), loop).go(60)


def lived(seed):
    """The steps of a life."""
    loop = PretendLoop(limits=Limits(4, 14, 5, max_passed=3), groups=LAYERS[1](15))
    life = JobLife(Random(seed), loop)
    life.go(60)
    arrays = ("starts", "lengths", "tokens", "samples")
    return [
        [[job.number for job in step.jobs], *(getattr(step, name).tolist() for name in arrays)]
        for step in loop.steps
    ]


@pytest.mark.parametrize("seed", few(range(3), 0))
def test_the_same_calls_make_the_same_steps(seed):
    assert lived(seed) == lived(seed) != lived(seed + 1)


def test_a_schedule_has_no_clock_and_no_chance():
    for path in Path(quire.scheduling.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = {
                getattr(node, "module", None),
                *(each.name for each in getattr(node, "names", ()) if isinstance(each, ast.alias)),
            }
            assert not imported & {"time", "datetime", "random", "numpy.random"}, path

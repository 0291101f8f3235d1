"""A model that knows what it should see: the KV of a token is a number that only its whole prefix and scope give."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from quire import CacheManager, ops
from quire.core import LayerGroup
from quire.errors import OutOfBlocks
from quire.groups import ChunkedAttention, SlidingWindow
from quire.scheduling import Job, Limits, Scheduler

PRIME = 2**61 - 1
VOCAB = 50


def follow(state, token):
    return (state * 1_000_003 + token + 1) % PRIME


def seed_of(scope):
    return 7 if scope is None else 1000 + int(scope.salt)


def states_of(tokens, scope=None):
    """Return the KV of each token."""
    states, state = [], seed_of(scope)
    for token in tokens:
        state = follow(state, int(token))
        states.append(state)
    return states


def sampled_after(state):
    return (state >> 20) % VOCAB


def expected(prompt, num_new, scope=None):
    """Return what plain generation gives: the prompt and the new tokens."""
    tokens = [int(token) for token in prompt]
    state = states_of(tokens, scope)[-1]
    for _ in range(num_new):
        tokens.append(sampled_after(state))
        state = follow(state, tokens[-1])
    return tokens


class Pretence:
    """Runs steps: writes KV where the block tables say, and reads what every row of it would read."""

    def __init__(self, manager):
        self.manager = manager
        self.memory = [{} for _ in manager.pools]
        self.kinds = [group.kind for group in manager.settings.groups]
        self.computed = Counter()
        self.scores = {}

    def copy(self):
        plan = self.manager.take_copies()
        read = [[self.memory[c.group].get((c.src, i)) for i in range(c.num_tokens)] for c in plan]
        for copy, states in zip(plan, read, strict=True):
            for i, state in enumerate(states):
                self.memory[copy.group][copy.dst, i] = state

    def forward(self, step):
        """Compute a step and return the states that its samples ask for, in their order."""
        self.copy()
        out = []
        size = self.manager.block_size
        tables = [[job.seq.block_ids(g) for job in step.jobs] for g in range(len(self.memory))]
        chunks = chunks_of(step)
        rights = []
        for chunk in chunks:
            job, start = chunk.job, chunk.start
            assert start == job.seq.computed
            assert job.seq.capacity >= start + len(chunk.tokens)
            tokens = [*job.tokens[:start], *chunk.tokens.tolist()]
            right = states_of(tokens, job.scope)
            rights.append(right)
            for position in range(start, len(tokens)):
                self.computed[right[position]] += 1
                for memory, table in zip(self.memory, tables, strict=True):
                    block = table[len(rights) - 1][position // size]
                    assert block >= 0
                    memory[block, position % size] = right[position]
            out += right[start:]
        for i, chunk in enumerate(chunks):
            for g, kind in enumerate(self.kinds):
                for position in range(chunk.start, len(rights[i])):
                    for read in reads(kind, position):
                        block = tables[g][i][read // size]
                        assert self.memory[g][block, read % size] == rights[i][read], (
                            chunk.job,
                            g,
                            position,
                            read,
                        )
        rows = step.logit_rows if step.spread is None else step.logit_rows[step.spread]
        assert sorted(set(step.logit_rows)) == step.logit_rows.tolist()
        for job, of_job in step.scored:
            told = [out[row] for row in step.logit_rows[of_job].tolist()]
            known = self.scores.setdefault(job, [])
            assert len(known) == job.num_scored  # each token once
            known += told
        return [out[row] for row in rows.tolist()]


def reads(kind, position):
    """Return the positions that a token at this position attends to."""
    first = 0
    if isinstance(kind, SlidingWindow):
        first = max(0, position + 1 - kind.window)
        return [*range(min(kind.sinks, first)), *range(first, position + 1)]
    if isinstance(kind, ChunkedAttention):
        first = position // kind.chunk * kind.chunk
    return range(first, position + 1)


class Chunk(NamedTuple):
    """The part of one job that a step computes."""

    job: Job
    start: int
    tokens: np.ndarray


def chunks_of(step):
    runs = np.split(step.tokens, np.cumsum(step.lengths)[:-1])
    return [*map(Chunk, step.jobs, step.starts.tolist(), runs)]


def sample(step, states):
    """Return the results of a step: drafts accepted as far as they are right, and one token more."""
    if step.drafts is None:
        return np.array([sampled_after(state) for state in states], np.int32)
    results, states = [], iter(states)
    for drafts in step.drafts:
        rows = [sampled_after(next(states)) for _ in range(len(drafts) + 1)]
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == rows[accepted]:
            accepted += 1
        results.append(np.array(rows[: accepted + 1], np.int32))
    return results


class PretendLoop:
    """An engine without a model: it checks after every step that nothing is broken."""

    def __init__(self, num_blocks=64, block_size=4, limits=None, groups=None, **options):
        if groups is None:
            groups = [LayerGroup("full", num_blocks)]
        self.manager = CacheManager(groups=groups, block_size=block_size, pin_budget=1.0)
        self.scheduler = Scheduler(self.manager, limits or Limits(8, 32), **options)
        self.model = Pretence(self.manager)
        self.steps = []
        self.finished = []
        self.scored = set()

    def add(self, prompt, max_tokens=4, num_twins=0, start_by=float("inf"), **options):
        is_scored = options.pop("is_scored", False)
        job, *twins = (
            Job(np.array(prompt, np.int32), max_tokens, **options) for _ in range(1 + num_twins)
        )
        for each in (job, *twins):
            each.start_by = start_by
        job.twins = twins
        if is_scored:
            self.scored.add(job)
            job.num_scored = 0
        self.scheduler.add(job)
        return job

    def check(self):
        self.scheduler.check()
        ops.check(self.manager)

    def step(self, now=0.0):
        """Do a step; return it, or None where there was nothing to do."""
        step = self.scheduler.plan(now)
        self.check()
        if step is None:
            return None
        limits = self.scheduler.limits
        assert len(step.tokens) <= limits.max_step_tokens
        assert self.scheduler.queues.num_running <= limits.max_running
        rows = [rows.stop - rows.start for _, rows in step.scored]
        assert sum(rows) <= self.scheduler.scored_tokens
        assert {job for job, _ in step.scored} <= self.scored
        results = sample(step, self.model.forward(step))
        self.scheduler.complete(step, results)
        self.check()
        self.steps.append(step)
        for job in step.sampled:
            if job.num_generated >= job.max_tokens:
                self.finish(job)
        return step

    def finish(self, job):
        assert job.tokens.tolist() == expected(
            job.tokens[: job.prompt_len], job.num_generated, job.scope
        )
        if job in self.scored:
            prompt = job.tokens[: job.prompt_len - 1]
            assert self.model.scores.get(job, []) == states_of(prompt, job.scope)
            assert job.num_found == 0
        self.scheduler.finish(job)
        self.finished.append(job)
        self.check()

    def run(self, most=10_000):
        for _ in range(most):
            if not len(self.scheduler):
                return
            assert self.step() is not None
        raise AssertionError(f"not finished after {most} steps: {self.scheduler}")

    def check_empty(self):
        assert not len(self.scheduler)
        assert not self.manager.sequences
        assert all(pool.num_active == 0 for pool in self.manager.pools)


__all__ = ["OutOfBlocks", "PretendLoop", "expected", "sample", "states_of"]

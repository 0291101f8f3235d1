"""A schedule in virtual time."""

import numpy as np

from quire import CacheManager, Scope
from quire.scheduling import Job, Limits, Scheduler

BLOCK = 4


class Clockwork:
    """A schedule without a model; a step takes one unit of time. Only prompts of one salt share blocks."""

    def __init__(self, slots, tokens, num_blocks, *, block=BLOCK, **limits):
        self.manager = CacheManager(num_blocks, block)
        self.scheduler = Scheduler(self.manager, Limits(slots, tokens, **limits))
        self.now, self.number = 0, 0
        self.arrivals, self.latencies, self.jobs = {}, {}, []

    def ask(self, tenant, length, max_tokens=1, num_twins=0, *, priority=0, salt=None):
        """Queue a request of a tenant; return its job."""
        self.number += 1
        scope = Scope(tenant=tenant, salt=salt or self.number)
        prompt = np.arange(length, dtype=np.int32)
        made = [
            Job(prompt, max_tokens, scope=scope, priority=priority) for _ in range(1 + num_twins)
        ]
        job, *job.twins = made
        self.scheduler.add(job)
        self.arrivals |= dict.fromkeys(made, self.now)
        self.jobs += made
        return job

    def step(self):
        """Compute one step."""
        step = self.scheduler.plan(self.now)
        assert not self.scheduler.given_up
        self.now += 1
        if step is None:
            return
        self.manager.take_copies()
        results = np.ones(len(step.samples), np.int32)
        self.scheduler.complete(step, results if step.drafts is None else [*results[:, None]])
        for job in step.sampled:
            if job.num_generated >= job.max_tokens:
                self.scheduler.finish(job)
                self.latencies[job] = self.now - self.arrivals[job]

    def steps(self, count):
        """Compute so many steps."""
        for _ in range(count):
            self.step()

    def wait_for(self, job):
        """Compute steps until a job ends, and return its latency."""
        while job not in self.latencies:
            self.step()
        return self.latencies[job]

"""Scheduling of requests: queueing, admission, steps, preemption and completion, without tensors.

job        the tokens to generate, and the progress
step       the inputs of one forward, as arrays
admission  whether a job would find room, and whether another one computes its prefix
scheduler  Scheduler: plan a step, complete it
"""

from quire.scheduling.job import Job, Limits
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.step import Step

__all__ = ["Job", "Limits", "Scheduler", "Step"]

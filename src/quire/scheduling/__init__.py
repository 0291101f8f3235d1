"""Scheduling of requests: queueing, admission, steps, preemption and completion, without tensors.

job        the tokens to generate, and the progress; the limits of a schedule
queues     the jobs that are not finished, by tenant: who waits, has a prompt, decodes
room       Room: tokens and blocks for a step, and who is preempted where they are short
admission  whether a job would find room, and whether another one computes its prefix
fairness   parts of a budget by tenant, and the running jobs that yield to one that waits
step       the inputs of one forward, as arrays
scheduler  Scheduler: plan a step, complete it
pace       StepPace: how much of prompts a step may have, by the time that steps took
fit        CostFit: seconds learned from what was measured
"""

from quire.scheduling.job import Job, Limits
from quire.scheduling.pace import StepPace
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.step import Step

__all__ = ["Job", "Limits", "Scheduler", "Step", "StepPace"]

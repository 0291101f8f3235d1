"""Which requests run: jobs wait, are admitted, computed in steps, preempted and finished. No tensors here.

job        what is to be generated, and how far it is
step       what one forward computes, as arrays
admission  whether a job would find room, and whether another one computes what it needs
scheduler  Scheduler: plan a step, complete it
"""

from quire.scheduling.job import Job, Limits
from quire.scheduling.scheduler import Scheduler
from quire.scheduling.step import Step

__all__ = ["Job", "Limits", "Scheduler", "Step"]

"""The queue: who waits, in which order, and behind whom."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Items

from quire.core import CacheManager
from quire.core.tokens import common_prefix
from quire.scheduling.job import BY_RANK, Job


class JobQueue:
    """Jobs that wait, by rank: `jobs` is sorted at every moment.

    A job is passed when one that arrived later is admitted. After `max_passed` times it is urgent: it stands
    before all that are not, and the scheduler admits nobody until it is admitted.
    """

    def __init__(self, max_passed: int) -> None:
        self.jobs: list[Job] = []
        self._max_passed = max_passed

    def __len__(self) -> int:
        return len(self.jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self.jobs)

    def add(self, job: Job) -> None:
        insort(self.jobs, job, key=BY_RANK)

    def remove(self, job: Job) -> None:
        del self.jobs[bisect_left(self.jobs, job.rank, key=BY_RANK)]

    def admit(self, job: Job) -> bool:
        """Remove a job and count whom it passes; return whether one of these has become urgent."""
        self.remove(job)
        passed = [other for other in self.jobs if other.number < job.number]
        for other in passed:
            other.passed += 1
        urgent = [other for other in passed if other.passed == self._max_passed]
        for other in urgent:
            self.remove(other)
            other.is_urgent = True
            self.add(other)
        return bool(urgent)


def has_leader(manager: CacheManager, job: Job, prefilling: Items[Job]) -> bool:
    """Whether a job that is being computed will store blocks that this one would compute again."""
    if job.behind is not None:
        leader, end = job.behind
        if leader in prefilling and leader.num_computed < end:
            return True
        job.behind = None
    prompt = job.known(0, job.num_tokens)
    for leader in prefilling:
        end = _shared_end(leader, job, manager.block_size)
        computes = leader.num_computed < end
        if computes and manager.probe(prompt, job.scope).num_tokens < end:
            job.behind = leader, end
            return True
    return False


def _shared_end(leader: Job, job: Job, block_size: int) -> int:
    """Return up to which token the blocks that a job needs are those that another one, which runs, computes and stores."""
    if leader.scope != job.scope or leader.tokens[:block_size] != job.tokens[:block_size]:
        return 0
    assert leader.seq is not None
    limit = min(leader.num_tokens, job.num_tokens, leader.seq.store_until * block_size)
    ours, theirs = (each.tokens[:limit].tobytes() for each in (leader, job))
    return common_prefix(ours, theirs) // block_size * block_size

"""JobQueues: the jobs of a schedule that are not finished, by tenant."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Generator
from itertools import chain
from typing import Literal, NamedTuple

from quire.errors import InvariantError, SequenceError
from quire.scheduling.job import BY_RANK, Job
from quire.scope import ScopePart


class Tenant:
    """The jobs of one tenant that are not finished; those without a tenant have one together.

    `waiting`        jobs that wait, by rank
    `prefilling`     jobs whose prompts are computed, by rank
    `num_decoding`   its jobs that decode
    `num_prefilled`  tokens of prompts that were computed for it
    `patience`       so many jobs of tenants with no fewer running ones are admitted while it waits; then it is next.
                     Below 0, so many more were, which had their share
    """

    def __init__(self, patience: int, num_prefilled: int) -> None:
        self.waiting: list[Job] = []
        self.prefilling: list[Job] = []
        self.num_decoding, self.num_prefilled, self.patience = 0, num_prefilled, patience

    @property
    def num_running(self) -> int:
        return len(self.prefilling) + self.num_decoding

    def priority(self, job: Job) -> int:
        """Return the priority of a job that waits: of an urgent one, the highest of those that it holds up."""
        return job.urgency if job.patience else max(each.urgency for each in self.waiting)

    def turn(self, at: int) -> tuple[bool, int, int, int]:
        """Return its place among tenants with waiting jobs, lowest first, by that of these which is looked at."""
        priority = self.priority(self.waiting[at])
        return (self.patience > 0, -priority, self.num_running, self.num_prefilled)

    def by_priority(self) -> Generator[tuple[int, Job]]:
        """Yield its prompts, last first, each with its priority or that of one that it holds up."""
        highest: int | None = None
        for job in reversed(self.prefilling):
            highest = job.urgency if highest is None else max(highest, job.urgency)
            yield highest, job


class Turn(NamedTuple):
    """A tenant's place in an admission.

    `turn`    of `Tenant.turn`
    `number`  of the tenants
    `at`      its waiting job that is looked at
    """

    turn: tuple[bool, int, int, int]
    number: int
    at: int
    tenant: Tenant


class JobQueues:
    """All jobs that are not finished: of each tenant those that wait and those with prompts, and all that decode.

    `adapter`   the adapter that has its turn: `decoding` are jobs of it
    `resting`   jobs of other adapters that decode, by adapter; none of these is empty
    `turns`     the adapters of running jobs, the one whose turn was longest ago first

    The scheduler alone changes them.
    """

    def __init__(self, patience: int) -> None:
        self.tenants: dict[ScopePart, Tenant] = {}
        self.decoding: list[Job] = []
        self.adapter: str | None = None
        self.resting: dict[str | None, list[Job]] = {}
        self.turns: dict[str | None, int] = {}  # with their numbers of running jobs
        self.num_waiting = self.num_prefilling = 0
        self._patience = patience

    @property
    def waiting(self) -> list[Job]:
        """Jobs that wait, tenant by tenant, as a new list."""
        return [job for tenant in self.tenants.values() for job in tenant.waiting]

    @property
    def prefilling(self) -> list[Job]:
        """Jobs whose prompts are computed, tenant by tenant, as a new list."""
        return [job for tenant in self.tenants.values() for job in tenant.prefilling]

    @property
    def running(self) -> list[Job]:
        """Jobs that run, as a new list."""
        return [*self.prefilling, *self.decoding, *chain.from_iterable(self.resting.values())]

    @property
    def num_running(self) -> int:
        num_resting = sum(map(len, self.resting.values())) if self.resting else 0
        return self.num_prefilling + len(self.decoding) + num_resting

    def take_turn(self) -> None:
        """Have the adapter of running jobs whose turn was longest ago take its turn, where there are any."""
        if not self.turns:
            return
        adapter = next(iter(self.turns))
        self.turns[adapter] = self.turns.pop(adapter)
        if adapter != self.adapter:
            if self.decoding:
                self.resting[self.adapter] = self.decoding
            self.decoding, self.adapter = self.resting.pop(adapter, []), adapter

    def tenant(self, job: Job) -> Tenant:
        """Return the tenant of a job, a new one where it has no other."""
        if (tenant := self.tenants.get(job.tenant)) is None:
            # No tokens that it had while others were not here come first.
            least = min((each.num_prefilled for each in self.tenants.values()), default=0)
            tenant = self.tenants[job.tenant] = Tenant(self._patience, least)
        return tenant

    def wait(self, job: Job) -> None:
        """Put a job among those that wait."""
        job.state = "waiting"
        insort(self.tenant(job).waiting, job, key=BY_RANK)
        self.num_waiting += 1

    def compute(self, job: Job) -> None:
        """Put a job among those with prompts."""
        job.state = "running"
        insort(self.tenant(job).prefilling, job, key=BY_RANK)
        self.num_prefilling += 1
        self.turns[job.adapter] = self.turns.get(job.adapter, 0) + 1

    def decode(self, job: Job) -> None:
        """Put a job among those that decode."""
        job.state = "running"
        self._decoding_of(job).append(job)
        self.tenant(job).num_decoding += 1
        self.turns[job.adapter] = self.turns.get(job.adapter, 0) + 1

    def place(self, job: Job) -> Literal["waiting", "prefilling", "decoding"]:
        """Return where a job is. Raises `SequenceError` for one that is nowhere."""
        tenant = self.tenants.get(job.tenant)
        if tenant is not None and job in tenant.waiting:
            return "waiting"
        if tenant is not None and job in tenant.prefilling:
            return "prefilling"
        if job in (
            self.decoding if job.adapter == self.adapter else self.resting.get(job.adapter, ())
        ):
            return "decoding"
        raise SequenceError(f"{job!r} is none of the jobs here")

    def take(self, job: Job) -> None:
        """Take a job out of where it is. Raises `SequenceError` for one that is nowhere."""
        place, tenant = self.place(job), self.tenant(job)
        if place == "waiting":
            tenant.waiting.remove(job)
            self.num_waiting -= 1
        elif place == "prefilling":
            tenant.prefilling.remove(job)
            self.num_prefilling -= 1
        else:
            self._decoding_of(job).remove(job)
            tenant.num_decoding -= 1
            if job.adapter in self.resting and not self.resting[job.adapter]:
                del self.resting[job.adapter]
        if place != "waiting":
            self.turns[job.adapter] -= 1
            if not self.turns[job.adapter]:
                del self.turns[job.adapter]

    def _decoding_of(self, job: Job) -> list[Job]:
        """Return the list of decoding jobs that a job belongs to."""
        return (
            self.decoding
            if job.adapter == self.adapter
            else self.resting.setdefault(job.adapter, [])
        )

    def forget(self, job: Job) -> None:
        """Forget the tenant of a finished job if it has no other."""
        tenant = self.tenants.get(job.tenant)
        if tenant is not None and not (tenant.waiting or tenant.num_running):
            del self.tenants[job.tenant]

    def check(self) -> None:
        """Raise `InvariantError` unless every job is in one queue, in order, with its sequence in the right state."""
        resting = [*chain.from_iterable(self.resting.values())]
        decoding = Counter(job.tenant for job in [*self.decoding, *resting])
        for name, jobs in self.resting.items():
            if name == self.adapter or {job.adapter for job in jobs} != {name}:
                raise InvariantError(
                    f"{jobs} rest as jobs of {name!r}; it is {self.adapter!r}'s turn"
                )
        if self.turns != Counter(job.adapter for job in self.running):
            raise InvariantError(f"running jobs by adapter are counted as {self.turns}")
        for name, tenant in self.tenants.items():
            for jobs, state in ((tenant.waiting, "waiting"), (tenant.prefilling, "running")):
                if jobs != sorted(jobs, key=BY_RANK) or any(job.state != state for job in jobs):
                    raise InvariantError(f"jobs out of order, or not {state}: {jobs}")
            if tenant.num_decoding != decoding[name] or not (tenant.waiting or tenant.num_running):
                raise InvariantError(
                    f"{decoding[name]} jobs of {name!r} decode, it counts {vars(tenant)}"
                )
        for job in [*self.decoding, *resting]:
            if job.state != "running" or job.num_left != 1:
                raise InvariantError(f"{job!r} decodes with {job.num_left} tokens to compute")
        for job in self.waiting:
            if job.seq is not None and job.seq.state != "suspended":
                raise InvariantError(f"{job!r} waits with an open sequence")
        if (self.num_waiting, self.num_prefilling) != (len(self.waiting), len(self.prefilling)):
            raise InvariantError(
                f"{self.num_waiting} wait and {self.num_prefilling} prefill by count"
            )

"""Fairness: the parts of a step, and the running jobs that yield to one that waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from quire.scheduling.job import BY_RANK, Job
from quire.scope import ScopePart


def divided(budget: int, spent: Items[int]) -> list[int]:
    """Return parts of a budget, so that what each has spent and its part are as equal as can be.

    What cannot be divided goes to the first ones.
    """
    parts, order = [0] * len(spent), sorted(range(len(spent)), key=spent.__getitem__)
    while order:
        level, rest = divmod(budget + sum(spent[at] for at in order), len(order))
        if spent[order[-1]] <= level:
            for place, at in enumerate(sorted(order)):
                parts[at] = level - spent[at] + (place < rest)
            break
        order.pop()
    return parts


def last_of(running: Items[Job]) -> Job:
    """Return the job that is preempted where blocks are short.

    It is a tenant's last one by rank: of the lowest priority, then one that is not overdue, and then of the tenant that
    holds most tokens.
    """
    held, last = _held(running), {job.tenant: job for job in sorted(running, key=BY_RANK)}
    return max(last.values(), key=lambda job: (-job.urgency, not job.is_overdue, held[job.tenant]))


def yielding(
    job: Job, priority: int, running: Items[Job], lacks: tuple[int, int], size: int
) -> list[Job]:
    """Return running jobs that are preempted for one that waits; none where they would not do.

    `priority`  its own, or that of one that it holds up
    `lacks`     running jobs, and blocks of `size` tokens, that are too many for it

    Jobs of lower priority yield to it. Of equal ones those of another tenant do, as long as that tenant then still has
    as many running ones as the job's; or as long as it holds more tokens than that one then does: twice as many, where
    the job was preempted itself. So none of them takes its place back at once. An urgent one yields to none of its own
    tenant, and an overdue one no blocks to an equal one.
    """
    (slots, blocks), num, held = lacks, Counter(each.tenant for each in running), _held(running)
    left = sorted(running, key=BY_RANK)
    chosen: list[Job] = []

    def yields(other: Job) -> bool:
        if other.urgency != priority or other.tenant == job.tenant:
            is_spared = other.tenant == job.tenant and not other.patience
            return other.urgency < priority and not is_spared
        if slots > 0 or other.is_overdue:
            return slots > 0 and num[other.tenant] > num[job.tenant] + 1
        times = 2 if job.num_preempted else 1
        return held[other.tenant] > times * (held[job.tenant] + job.num_tokens)

    while slots > 0 or blocks > 0:
        last = {each.tenant: each for each in left if yields(each)}
        if not last:
            return []
        most = num if slots > 0 else held
        victim = max(last.values(), key=lambda each: (-each.urgency, most[each.tenant]))
        left.remove(victim)
        chosen.append(victim)
        num[victim.tenant] -= 1
        held[victim.tenant] -= victim.num_tokens
        slots -= 1
        blocks -= -(-max(victim.open_seq.capacity, victim.num_tokens) // size)
    return chosen


def _held(running: Iterable[Job]) -> Counter[ScopePart]:
    """Return the known tokens of running jobs, by tenant."""
    held: Counter[ScopePart] = Counter()
    for job in running:
        held[job.tenant] += job.num_tokens
    return held

"""Admission: whether a job finds room, and whether another job is computing its prefix."""

from __future__ import annotations

from collections.abc import Sequence as Items

from quire.core import CacheManager
from quire.core.room import least
from quire.core.tokens import common_prefix
from quire.groups import stops
from quire.ops import fits
from quire.scheduling.job import BY_RANK, Job


def check_fits(manager: CacheManager, job: Job) -> None:
    """Raise `OutOfBlocks` for a job that no empty pool could hold.

    Where not all that it computes is stored, the window where that ends is held beside the one at its own end.
    """
    num_tokens = job.prompt_len + job.max_tokens - 1
    whole = -(-num_tokens // manager.block_size)
    windows = 1 if job.terms.get("store_until") is None else 2
    for pool, num_blocks in zip(manager.pools, least(manager.kernel, num_tokens), strict=True):
        if (needed := min(whole, windows * num_blocks)) > pool.num_blocks:
            what = f"{job.prompt_len} tokens of prompt and {job.max_tokens} new ones are too many"
            mend = "enlarge the pool, shorten the prompt, or lower max_tokens"
            raise pool.shortage(what, needed, mend)


def lacking(manager: CacheManager, job: Job, prefilling: Items[Job], watermark: float) -> int:
    """Return the blocks that a waiting job's known tokens lack; 0 or less where there is room.

    What prompts that are computed still need is promised to those. Of several groups the one that lacks most counts.
    Of a group with a window no more is asked than a sequence holds at a time.
    """
    kernel = manager.kernel
    taken = [max(1, int(watermark * pool.num_blocks)) for pool in manager.pools]
    for other in prefilling:
        promised = least(kernel, other.num_tokens - other.open_seq.capacity)
        taken = [*map(int.__add__, taken, promised)]
    fit = fits(manager, job.known(0, 1) if job.scores else job.seq or job.known(), None, job.scope)
    most = least(kernel, job.num_tokens)
    needed = most if job.scores else map(min, fit.needed, most)
    return max(n + t - r for n, t, r in zip(needed, taken, fit.room, strict=True))


def granted(manager: CacheManager, job: Job, num_tokens: int) -> int:
    """Return how many of the next `num_tokens` tokens of a running job there is room for, in every group.

    They end where a snapshot of recurrent states is due.
    """
    size, computed = manager.block_size, job.num_computed
    if ends := stops(manager, job.open_seq):
        num_tokens = min(num_tokens, ends[0] - computed)
    while num_tokens > 0 and not (fit := fits(manager, job.open_seq, num_tokens)):
        over = max(map(int.__sub__, fit.needed, fit.room))
        num_tokens = (-(-(computed + num_tokens) // size) - over) * size - computed
    return max(num_tokens, 0)


def has_leader(manager: CacheManager, job: Job, prefilling: list[Job]) -> bool:
    """Whether a job that is being computed will store blocks that this one would compute again.

    That one is as urgent then as this one, and stands in `prefilling` accordingly. A job whose prompt is scored computes
    all of it anyway.
    """
    if job.scores:
        return False
    if is_held_back(job):
        return True
    job.behind = None
    for leader in prefilling:
        end = _shared_end(leader, job, manager.block_size)
        computes = leader.num_computed < end
        if computes and manager.probe(job.known(), job.scope).num_tokens < end:
            job.behind = leader, end
            if leader.urgency < job.urgency:
                leader.urgency = job.urgency
                prefilling.sort(key=BY_RANK)
            return True
    return False


def is_held_back(job: Job) -> bool:
    """Whether the job that computes its prefix, as was found before, still does."""
    if job.behind is None:
        return False
    leader, end = job.behind
    return leader.state == "running" and leader.num_computed < end


def _shared_end(leader: Job, job: Job, block_size: int) -> int:
    """Return up to which token the blocks that a job needs are those that another one, which runs, computes and stores."""
    if leader.scope != job.scope or leader.tokens[:block_size] != job.tokens[:block_size]:
        return 0
    limit = min(leader.num_tokens, job.num_tokens, leader.open_seq.store_until * block_size)
    ours, theirs = (each.tokens[:limit].tobytes() for each in (leader, job))
    return common_prefix(ours, theirs) // block_size * block_size

"""Room: which blocks a job would get, asked before any are taken."""

from __future__ import annotations

from collections.abc import Sequence as Items

from quire.core import CacheManager
from quire.core.room import least
from quire.ops import Fit, fits
from quire.scheduling.job import Job


def check_fits(manager: CacheManager, job: Job) -> None:
    """Raise `OutOfBlocks` for a job that no empty pool could hold."""
    for pool, needed in zip(manager.pools, _most(manager, job), strict=True):
        if needed > pool.num_blocks:
            what = f"{job.prompt_len} tokens of prompt and {job.max_tokens} new ones are too many"
            mend = "enlarge the pool, shorten the prompt, or lower max_tokens"
            raise pool.shortage(what, needed, mend)


def fit_of(manager: CacheManager, job: Job, num_new: int | None) -> Fit:
    """Return what `ops.fits` says of the next tokens of a job, None for all that are known."""
    if job.seq is not None:
        return fits(manager, job.seq, num_new)
    return fits(manager, job.known(0, job.num_tokens), num_new, job.scope)


def has_room(manager: CacheManager, job: Job, prefilling: Items[Job], watermark: float) -> bool:
    """Whether all known tokens of a waiting job find room beside what those that are computed still need.

    Of a group with a window no more is asked than a sequence holds at a time.
    """
    kernel = manager.kernel
    taken = [max(1, int(watermark * pool.num_blocks)) for pool in manager.pools]
    for other in prefilling:
        assert other.seq is not None
        promised = least(kernel, other.num_tokens - other.seq.capacity)
        taken = [*map(int.__add__, taken, promised)]
    fit = fit_of(manager, job, None)
    needed = map(min, fit.needed, least(kernel, job.num_tokens))
    return all(n + t <= r for n, t, r in zip(needed, taken, fit.room, strict=True))


def granted(manager: CacheManager, job: Job, num_tokens: int) -> int:
    """Return how many of the next `num_tokens` tokens of a running job there is room for, in every group."""
    size, computed = manager.block_size, job.num_computed
    while num_tokens > 0:
        fit = fit_of(manager, job, num_tokens)
        if fit:
            break
        over = max(map(int.__sub__, fit.needed, fit.room))
        num_tokens = (-(-(computed + num_tokens) // size) - over) * size - computed
    return max(num_tokens, 0)


def _most(manager: CacheManager, job: Job) -> Items[int]:
    """Return how many blocks of each group a job must be able to hold at a time.

    Where not all that it computes is stored, the window where that ends is held beside the one at its own end.
    """
    num_tokens = job.prompt_len + job.max_tokens - 1
    most = least(manager.kernel, num_tokens)
    if job.terms.get("store_until") is None:
        return most
    whole = -(-num_tokens // manager.block_size)
    return [min(whole, 2 * num_blocks) for num_blocks in most]

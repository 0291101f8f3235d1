"""The blocks that `open` and `reserve` would ask of each group, and those that each could give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items

import msgspec

from quire.config import check_count
from quire.core.kernel import Kernel
from quire.core.manager import CacheManager
from quire.core.node import Match, Node
from quire.core.room import least, room_left
from quire.core.sequence import Sequence
from quire.core.take import needs, stale_slots
from quire.core.tokens import TOKEN_BYTES, Key, TokenIds
from quire.media import MediaItem
from quire.scope import Scope


class Fit(msgspec.Struct, frozen=True):
    """Whether a request would get its blocks now; true if it would.

    `num_cached`  tokens of it that would be found
    `needed`      per layer group, the blocks that it would take beside what it finds
    `room`        per layer group, the blocks that it could get: free ones, and cached ones that it
                  does not find; of a prompt that no empty pool could hold, all there are
    """

    num_cached: int
    needed: tuple[int, ...]
    room: tuple[int, ...]

    def __bool__(self) -> bool:
        return all(map(int.__le__, self.needed, self.room))


def fits(
    manager: CacheManager,
    request: TokenIds | Sequence,
    num_new: int | None = None,
    scope: Scope | None = None,
    *,
    media: Items[MediaItem] = (),
) -> Fit:
    """Return whether a request would get its blocks now; true if so. Changes nothing, counts nothing.

    Of a prompt: whether `open` and then `reserve` of `num_new` tokens would find room; of a sequence, whether
    `reserve` would, after `resume` where it is suspended. None: all tokens that are known and not computed.
    What is cached counts, what can be evicted, and what pins and running sequences hold. Raises
    `SequenceError`, `ConfigError` and what `probe` raises.
    """
    if num_new is not None:
        num_new = check_count("num_new", num_new)
    if isinstance(request, Sequence):
        manager.check_known(request)
        return _fit_sequence(manager.kernel, request, num_new)
    root, key = manager.read_whole(request, scope, media)
    return _fit_prompt(manager.kernel, root, key, num_new)


def _fit_prompt(kernel: Kernel, root: Node, key: Key, num_new: int | None) -> Fit:
    """Say whether `open` of this prompt and `reserve` of `num_new` tokens would find room."""
    num_tokens = len(key) // TOKEN_BYTES
    smallest = least(kernel, num_tokens)
    sizes = tuple(pool.num_blocks for pool in kernel.pools)
    if not Fit(0, smallest, sizes):
        return Fit(0, smallest, sizes)
    return _fit_found(kernel, root, (key, num_tokens - 1), num_new)


def _fit_sequence(kernel: Kernel, seq: Sequence, num_new: int | None) -> Fit:
    """Say whether `reserve` of `num_new` tokens would find room, after `resume` where it is suspended."""
    if seq.state == "suspended":
        num_tokens = len(seq.script.key) // TOKEN_BYTES
        limit = num_tokens if num_tokens == seq.num_cached else num_tokens - 1
        return _fit_found(kernel, seq.root, (memoryview(seq.script.key), limit), num_new)
    if num_new is None:
        num_new = seq.known_end - seq.computed
    wanted, size = max(seq.computed + num_new, seq.capacity), kernel.rows.block_size
    stale = stale_slots(kernel, seq) if wanted > seq.capacity else []
    needed = needs(kernel, -(-wanted // size) - seq.num_blocks, stale)
    source = seq.pending.source if seq.pending is not None else None
    return _fit(kernel, seq.computed, needed, None, source)


def _fit_found(kernel: Kernel, root: Node, prompt: tuple[Key, int], num_new: int | None) -> Fit:
    """Say whether the rest of a prompt would find room, of which no more than a limit can be found."""
    rows, size = kernel.rows, kernel.rows.block_size
    key, limit = prompt
    found = kernel.lookup.find(root, key, limit)
    end = found.num_blocks * size + found.partial_tokens
    if num_new is None:
        num_new = len(key) // TOKEN_BYTES - end
    states = [(state.index, 0) for state in rows.states if num_new > 0]
    needed = needs(kernel, -(-(end + num_new) // size) - found.num_blocks, states)
    return _fit(kernel, end, needed, found)


def _fit(
    kernel: Kernel,
    num_cached: int,
    needed: list[int],
    match: Match | None,
    source: Node | None = None,
) -> Fit:
    """Compare; pins whose time is over are let go first, as `reserve` does."""
    gone = Counter(hold.node for hold in kernel.holds.expired())
    return Fit(num_cached, tuple(needed), tuple(room_left(kernel, match, gone, source)))

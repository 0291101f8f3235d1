"""Would it fit: what `open` and `reserve` would ask of each group, and what each could give, without doing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from quire0.core.node import Match, Node
from quire0.core.sequence import Sequence
from quire0.core.sparse import Standing
from quire0.core.tokens import TOKEN_BYTES, Key

if TYPE_CHECKING:
    from quire0.core.requests import Requests


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


def fit_prompt(requests: Requests, root: Node, key: Key, num_new: int | None) -> Fit:
    """Say whether `open` of this prompt and `reserve` of `num_new` tokens would find room."""
    num_tokens = len(key) // TOKEN_BYTES
    least = requests.least(num_tokens)
    sizes = tuple(pool.num_blocks for pool in requests.groups)
    if not Fit(0, least, sizes):
        return Fit(0, least, sizes)
    return _fit_found(requests, root, (key, num_tokens - 1), num_new)


def fit_sequence(requests: Requests, seq: Sequence, num_new: int | None) -> Fit:
    """Say whether `reserve` of `num_new` tokens would find room, after `resume` where it is suspended."""
    if seq.state == "suspended":
        num_tokens = len(seq.resume_key) // TOKEN_BYTES
        limit = num_tokens if num_tokens == seq.num_cached else num_tokens - 1
        return _fit_found(requests, seq.root, (memoryview(seq.resume_key), limit), num_new)
    rows = requests.rows
    if num_new is None:
        num_new = seq.known_end - seq.computed
    wanted, size = max(seq.computed + num_new, seq.capacity), rows.block_size
    needed = [0] * len(requests.groups)
    for group in rows.token_groups:
        needed[group] = -(-wanted // size) - seq.num_blocks
    if wanted > seq.capacity == seq.computed:
        for group, _ in requests.stale_slots(seq):
            needed[group] += 1
    return _fit(requests, seq.computed, needed, None)


def _fit_found(requests: Requests, root: Node, prompt: tuple[Key, int], num_new: int | None) -> Fit:
    """Say whether the rest of a prompt would find room, of which no more than a limit can be found."""
    rows, size = requests.rows, requests.block_size
    key, limit = prompt
    found = requests.lookup.find(root, key, limit)
    end = found.match.num_bytes // TOKEN_BYTES
    room = _room(requests, found.match, {})
    if all(room[group] > 0 for group in rows.token_groups):
        end += found.partial_tokens
    if num_new is None:
        num_new = len(key) // TOKEN_BYTES - end
    needed = [0] * len(room)
    for group in rows.token_groups:
        needed[group] = (
            -(-(end + num_new) // size) - found.match.num_bytes // requests.tree.block_bytes
        )
    for state in rows.states:
        needed[state.index] = int(num_new > 0)
    return _fit(requests, end, needed, found.match)


def _fit(requests: Requests, num_cached: int, needed: list[int], match: Match | None) -> Fit:
    """Compare; pins whose time ran out give way only where blocks are short, as in `Room.make`."""
    fit = Fit(num_cached, tuple(needed), tuple(_room(requests, match, {})))
    if not fit and (expired := requests.pins.expired()):
        gone = Counter(pin.node for pin in expired)
        return Fit(num_cached, fit.needed, tuple(_room(requests, match, gone)))
    return fit


def _room(requests: Requests, match: Match | None, gone: Mapping[Node, int]) -> list[int]:
    """Return what each group can give once a match is referenced, and pins at some nodes are gone."""
    tree = requests.tree
    room = [pool.num_available for pool in requests.groups]
    found: dict[Node, int] = {}
    if match is not None:
        found = {node: node.num_blocks for node in match.node.path()}
        if match.edge is not None and match.into:
            found[match.edge] = match.into // tree.block_bytes
    unlocked: Counter[Node] = Counter()
    for node, count in gone.items():
        unlocked.update(dict.fromkeys(node.path(), count))
    taken = sum(num_blocks for node, num_blocks in found.items() if not node.locks)
    for node, count in unlocked.items():
        if node.locks == count:
            taken -= node.num_blocks - found.get(node, 0)
    for group, _ in tree.full:
        room[group] -= taken
    standing = Standing(gone, unlocked)
    if match is not None and found:
        standing = Standing(gone, unlocked, list(found)[-1], match.num_bytes // tree.block_bytes)
    for sparse in tree.sparse:
        room[sparse.index] -= sparse.would_guard(standing)
    return room

"""Taking: the blocks of a sequence when it starts, grows or forks."""

from __future__ import annotations

from collections.abc import Sequence as Items

import msgspec

from quire.core.blocks import GAP, BlockCopy
from quire.core.joining import join_path
from quire.core.kernel import Kernel
from quire.core.node import Match
from quire.core.room import evict_for, is_short, make_room
from quire.core.sequence import Pending, Script, Sequence
from quire.core.stats import Missed
from quire.core.terms import ORDINARY, Terms
from quire.core.tokens import TOKEN_BYTES, Key, check_sign
from quire.core.waiting import give_source, wait_at, wait_no_more
from quire.errors import InvariantError
from quire.media import MediaItem
from quire.scope import Scope


def open_sequence(
    kernel: Kernel,
    scope: Scope,
    prompt: tuple[Key, Items[MediaItem]],
    found: Match,
    terms: Terms,
) -> Sequence:
    """Start a request whose prompt, a key and its media, was looked up; see `CacheManager.open`."""
    tree = kernel.tree
    key, items = prompt
    script = Script(len(key) // TOKEN_BYTES)
    if items:
        script.raw, key = key.tobytes(), tree.media.encode(key, items)
        script.media = dict.fromkeys(tree.media.counts(key), 1)
        tree.media.use(script.media)
    else:
        check_sign(key[found.num_blocks * tree.block_bytes :])
    missed = kernel.lookup.why(key, found)
    root = tree.root(scope)
    if found.node.parent is None:
        found.node = root
    seq = Sequence(kernel.rows, kernel.rows.take(), root, root, scope, script, terms)
    if terms.store_until is not None:
        seq.store_until = terms.store_until // kernel.rows.block_size
    attach(kernel, seq, key, found, missed)
    root.locks += 1
    kernel.sequences[id(seq)] = seq
    return seq


def attach(kernel: Kernel, seq: Sequence, key: Key, found: Match, missed: Missed) -> None:
    """Reference the found blocks, fill the row, and leave the rest as the prompt to compute.

    What is found keeps its place in the order of eviction until `settle`, and the block whose head is shared is the tree's.
    """
    tree, rows, row, source = kernel.tree, kernel.rows, seq.row, found.source
    num_cached = found.num_blocks * rows.block_size + found.partial_tokens
    rows.place(row, 0, len(key) // tree.block_bytes + 1)  # for all of it: it moves no more
    base = rows.offset[row]
    node = seq.node = wait_at(tree, found.last, found.num_blocks)
    if source is not None:
        source = node = wait_at(tree, source, found.num_blocks + 1)
        rows.write_tail(row, 0, key[found.num_blocks * tree.block_bytes : num_cached * TOKEN_BYTES])
        for window in tree.windows:
            window.lend(source, 1)
        for group in rows.token_groups:
            tree.pools[group].share(source.blocks[group][0])
    parent, lent = node.parent, tree.order.lent
    while parent is not None:
        tree.lock(node)
        lent[id(node)] = lent.get(id(node), 0) + 1
        start, end = parent.end, node.end
        for group in rows.token_groups:
            rows.flat[group][base + start : base + end] = memoryview(node.blocks[group])
        node, parent = parent, parent.parent
    tree.stand(seq.node, tree.sparse)
    rows.computed[row] = rows.capacity[row] = num_cached
    script, seq.num_cached, seq.pending = seq.script, num_cached, Pending(missed, source)
    script.start, script.key = num_cached, key[num_cached * TOKEN_BYTES :].tobytes()
    script.branch = num_cached + found.refused * rows.block_size


def resume(kernel: Kernel, seq: Sequence) -> int:
    """Reference the remaining blocks of a suspended sequence; see `CacheManager.resume`."""
    key = memoryview(seq.script.key)
    num_tokens, had = len(key) // TOKEN_BYTES, seq.num_cached
    limit = num_tokens if num_tokens == had else num_tokens - 1
    found = kernel.lookup.find(seq.root, key, limit)
    missed = kernel.lookup.why(key, found)
    to_compute = max(had - found.num_blocks * kernel.rows.block_size - found.partial_tokens, 0)
    seq.state = "open"
    seq.row = kernel.rows.take()
    attach(kernel, seq, key, found, Missed("suspended", to_compute) if seq.number else missed)
    return to_compute


def settle(kernel: Kernel, seq: Sequence, pending: Pending) -> None:
    """A request has room: what it found counts as used, the request as admitted; watchers are told."""
    tree, order, number, missed = kernel.tree, kernel.tree.order, seq.number, pending.missed
    seq.pending = None
    wait_no_more(tree, seq.node, stays=True)
    if seq.terms is not ORDINARY and not number:
        owner = kernel.owners.begin(seq.scope, seq.terms.hint)
        seq.terms = msgspec.structs.replace(seq.terms, owner=owner)
    node, divided, terms = seq.node, False, seq.terms
    while (parent := node.parent) is not None:
        order.take_back(node)
        order.touched(node)
        if node.mark is not None or terms.priority > 0:
            order.used(node, terms)
        for group in tree.sparse:
            group.touched(node)
        divided |= parent.parent is not None and len(parent.children) == 1
        node = parent
    if divided:
        join_path(tree, seq.node)
    if number:
        kernel.counters.recomputed_tokens += missed.num_tokens
        return
    kernel.counters.opened(seq.prompt_len, seq.num_cached, missed)
    seq.number = kernel.counters.num_requests
    key = seq.token_bytes() + seq.script.key if kernel.watchers.opened else b""
    for tell in kernel.watchers.opened:
        tell(seq, memoryview(key), missed)


def reserve(kernel: Kernel, seq: Sequence, num_tokens: int, *, admits: bool = True) -> None:
    """Room for `num_tokens` more than computed, in every group; see `CacheManager.reserve`.

    A waiting request also gets the block that it goes on with a copy of, and is admitted unless `admits` is False.
    """
    rows, row, size = kernel.rows, seq.row, kernel.rows.block_size
    capacity = rows.capacity[row]
    wanted = rows.computed[row] + num_tokens
    pending = seq.pending
    if wanted <= capacity and pending is None:
        return
    held = -(-capacity // size)
    num_new = -(-wanted // size) - held
    source = pending and pending.source
    stale = stale_slots(kernel, seq) if num_tokens or source else ()
    needed = needs(kernel, num_new, stale)
    short = is_short(kernel, needed, source)
    if pending is not None:
        give_source(kernel, seq, pending)
        if admits:
            settle(kernel, seq, pending)
    if short:
        evict_for(kernel, needed)
    rows.widen(row, held + num_new)
    for group, slot in stale:
        _renew(kernel, seq, group, slot, source)
    if num_new:
        at = rows.offset[row] + held
        for group in rows.token_groups:
            rows.flat[group][at : at + num_new] = kernel.pools[group].take(num_new)
    rows.capacity[row] = wanted
    rows.version += 1


def needs(kernel: Kernel, num_new: int, stale: Items[tuple[int, int]]) -> list[int]:
    """Return the blocks that each group must give for `num_new` new ones and copies of `stale` ones."""
    needed = [num_new * (g in kernel.rows.token_groups) for g in range(len(kernel.pools))]
    for group, _ in stale:
        needed[group] += 1
    return needed


def stale_slots(kernel: Kernel, seq: Sequence) -> list[tuple[int, int]]:
    """Return (group, index in its table) of blocks to replace before the next write.

    That is a partly filled last block or a state that others read too, and a state that
    the sequence does not have yet. Nothing is, where room was reserved already.
    """
    rows = kernel.rows
    tail, in_tail = divmod(rows.computed[seq.row], rows.block_size)
    stale: list[tuple[int, int]] = []
    if in_tail:
        for group in rows.token_groups:
            shared = kernel.tree.pools[group].shared
            if shared and rows.slots(group, seq.row, tail, tail + 1)[0] in shared:
                stale.append((group, tail))
    for state in rows.states:
        block = rows.flat[state.index][seq.row]
        if block < 0 or block in state.pool.shared:
            stale.append((state.index, 0))
    return stale


def fork(kernel: Kernel, seq: Sequence) -> Sequence:
    """Return a sequence at the same tokens that shares all blocks; see `CacheManager.fork`."""
    tree, rows, size = kernel.tree, kernel.rows, kernel.rows.block_size
    computed, capacity = rows.computed[seq.row], rows.capacity[seq.row]
    tail, in_tail = divmod(computed, size)
    writing = capacity > computed
    if writing:
        states = [(state.index, 0) for state in rows.states]
        make_room(kernel, needs(kernel, int(in_tail > 0), states))
    if seq.pending is not None:
        reserve(kernel, seq, 0)
    row, first = rows.take(), seq.node.end
    script = msgspec.structs.replace(seq.script)
    twin = msgspec.structs.replace(seq, row=row, script=script, unfilled=first)
    rows.computed[row] = rows.capacity[row] = computed
    num_shared = tail + (in_tail > 0)
    rows.place(row, first, num_shared)
    for group, pool in enumerate(tree.pools):
        start, stop = (first, num_shared) if group in rows.token_groups else (0, 1)
        shared = rows.slots(group, seq.row, start, stop)
        rows.slots(group, row, start, stop)[:] = shared
        for block in shared:
            if block != GAP:
                pool.share(block)
    for group, slot in stale_slots(kernel, twin) if writing else ():
        _renew(kernel, twin, group, slot)
    if in_tail:
        rows.write_tail(row, 0, rows.tail(seq.row, in_tail))
    tree.hold(twin.node, rows.standing(row))
    twin.root.locks += 1
    kernel.sequences[id(twin)] = twin
    if twin.script.media:
        tree.media.use(twin.script.media)
    if twin.terms.owner is not None:
        twin.terms.owner.num_open += 1
    rows.version += 1
    return twin


def _renew(kernel: Kernel, seq: Sequence, group: int, slot: int, waited: object = None) -> None:
    """Replace a block of the table that others read too, or a missing state, by a copy.

    `waited`  the source that it has released already, if it had one
    """
    rows, pool = kernel.rows, kernel.tree.pools[group]
    entry = rows.slots(group, seq.row, slot, slot + 1)
    source, entry[0] = entry[0], pool.take(1)[0]
    num_tokens = rows.computed[seq.row] % rows.block_size if group in rows.token_groups else 1
    if source != GAP:
        if waited is None:
            pool.unshare(source)
    elif rows.computed[seq.row]:
        state = next(each for each in rows.states if each.index == group)
        source = state.block_at(seq.node, seq.node.end - 1)
        if source == GAP:
            raise InvariantError(f"{seq!r} stands where group {group} has no snapshot")
        state.unguard(seq.node)
    else:
        return
    kernel.copies.plan(BlockCopy(group, source, entry[0], num_tokens))

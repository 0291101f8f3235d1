"""Publishing: computed blocks enter the prefix tree, or give way to the same ones there; states are kept."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items

from quire.core.blocks import GAP, BlockCopy
from quire.core.kernel import Kernel
from quire.core.node import Node
from quire.core.policy import ENDLESS
from quire.core.room import evict_in
from quire.core.sequence import Sequence
from quire.core.tokens import TOKEN_BYTES, Key, array_of, check_sign, common_prefix
from quire.errors import CommitError

NO_IDS = memoryview(array("i"))


def checked(kernel: Kernel, seq: Sequence, key: Key) -> Key:
    """Return the key to store for tokens to commit; raise and change nothing if refused."""
    computed = kernel.rows.computed[seq.row]
    room = kernel.rows.capacity[seq.row] - computed
    if len(key) > room * TOKEN_BYTES:
        msg = (
            f"commit of {len(key) // TOKEN_BYTES} tokens, but only {room} are reserved beyond "
            f"the {computed} computed; reserve first"
        )
        raise CommitError(msg)
    if kernel.copies:
        check_copies(kernel, seq)
    if not seq.script.key:
        check_sign(key)
        return key
    start = (computed - seq.script.start) * TOKEN_BYTES
    if not seq.script.raw and seq.script.key.startswith(key, start):
        return key
    expected = seq.script.key[start : start + len(key)]
    split = len(expected)
    check_sign(key[split:])
    raw = seq.without_media(expected, computed)
    if not raw.startswith(key[:split]):
        at = common_prefix(raw, key)
        wanted, given = array_of(raw)[at], array_of(key)[at]
        msg = (
            f"token {given} committed at position {computed + at}, where the prompt (or what was "
            f"computed before a suspend) has {wanted}; commit these tokens, or open another prompt"
        )
        raise CommitError(msg)
    return memoryview(expected + key[split:].tobytes()) if seq.script.raw else key


def commit(kernel: Kernel, seq: Sequence, key: Key) -> None:
    """Add checked tokens: full blocks are published, the rest waits in the tail."""
    rows, row, size = kernel.rows, seq.row, kernel.rows.block_size
    computed = rows.computed[row]
    in_tail = computed % size
    num_tokens = len(key) // TOKEN_BYTES
    num_blocks = (in_tail + num_tokens) // size
    rows.computed[row] = computed = computed + num_tokens
    if seq.script.key and computed >= seq.known_end:
        seq.script.key = b""
        seq.script.start = computed
    kernel.counters.computed_tokens += num_tokens
    if num_blocks:
        used = (num_blocks * size - in_tail) * TOKEN_BYTES
        full = key[:used]
        if in_tail:
            full = memoryview(rows.tail(row, in_tail) + full)
        publish(kernel, seq, full, num_blocks)
        key = key[used:]
        in_tail = 0
    if len(key):
        rows.write_tail(row, in_tail, key)
    if rows.states:
        _keep_if_due(kernel, seq)
    if seq.private_key:
        _release_behind(kernel, seq)


def publish(kernel: Kernel, seq: Sequence, key: Key, num_blocks: int) -> None:
    """Enter the sequence's next `num_blocks` blocks into the tree, as far as it stores them."""
    num_stored = 0 if seq.private_key else seq.store_until - seq.node.end
    if num_stored < num_blocks:
        at = max(num_stored, 0) * kernel.tree.block_bytes
        seq.private_key += key[at:]
        key, num_blocks = key[:at], num_stored
    if num_blocks > 0:
        num_new = enter(kernel, seq, key, num_blocks)
        kernel.counters.published_blocks += num_new
        kernel.counters.deduplicated_blocks += num_blocks - num_new


def enter(kernel: Kernel, seq: Sequence, key: Key, num_blocks: int) -> int:
    """Enter the sequence's next blocks into the tree; return how many of them were not there."""
    tree, rows, row, size = kernel.tree, kernel.rows, seq.row, kernel.tree.block_bytes
    node = seq.node
    if node.children and key[:size].tobytes() in node.children:
        found = tree.match(node, key, len(key))
        _rebase(kernel, seq, tree.cut(found.last, node.end + found.num_blocks))
        node, num_blocks = seq.node, num_blocks - found.num_blocks
        key = key[found.num_blocks * size :]
        if not num_blocks:
            return 0
    start = node.end
    at = rows.offset[row] + start
    ids = [table[at : at + num_blocks] for table in rows.flat]
    for state in rows.states:
        ids[state.index] = NO_IDS
    if (
        seq.number  # what a restore brings is a node of its own: windows are kept at its end
        and node.locks == 1
        and not node.children
        and node.parent is not None
        and tree.order.alike(node, seq.terms)
    ):
        tree.extend(node, key, ids)
    else:
        blocks = tuple(array("i", each.tobytes()) for each in ids)
        new = seq.node = tree.add(node, key, blocks, seq.terms)
        tree.stand(new, rows.windows)
        tree.leave(node, rows.windows)
        node = new
    if seq.script.media:
        tree.media.use(tree.media.counts(key))
    node.writer = row if seq.store_until == ENDLESS and not seq.script.media else None
    for tell in kernel.watchers.stored:
        tell(seq, node, num_blocks)
    return num_blocks


def _rebase(kernel: Kernel, seq: Sequence, node: Node) -> None:
    """Use the tree's blocks down to `node` in place of the sequence's own, and free those."""
    tree, rows, row = kernel.tree, kernel.rows, seq.row
    each = node
    while each is not seq.node:
        assert each.parent is not None
        tree.lock(each)
        tree.order.used(each, seq.terms)
        for g, pool in tree.full:
            slots = rows.slots(g, row, each.start, each.end)
            pool.drop_hold(slots)
            slots[:] = memoryview(each.blocks[g])
        for window in rows.windows:
            window.merge(each, rows.slots(window.index, row, each.start, each.end))
        for group in tree.sparse:
            group.touched(each)
        each = each.parent
    tree.stand(node, rows.windows)
    tree.leave(seq.node, rows.windows)
    seq.node = node


def publish_last_blocks(kernel: Kernel, seqs: Items[Sequence]) -> None:
    """Publish the block that each of these sequences has just filled."""
    rows, tails, size = kernel.rows, kernel.rows.tail_bytes, kernel.tree.block_bytes
    offset, windows, states = rows.offset, rows.windows, rows.states
    first, *others = rows.token_groups or (0,)
    table = rows.flat[first]
    beside = bool(others or windows or states)
    in_place, stored = bool(rows.token_groups), kernel.watchers.stored
    apart = 0
    for seq in seqs:
        node, row = seq.node, seq.row
        key = tails[row * size : row * size + size]
        if not in_place or node.writer != row:
            apart += 1
            publish(kernel, seq, key, 1)
            if seq.private_key:
                _release_behind(kernel, seq)
            continue
        node_key, blocks, end = node.key, node.blocks, node.end
        node_key += key  # from here: `PrefixTree.extend` by one block, unrolled
        at = offset[row] + end
        blocks[first].append(table[at])
        node.end = end + 1
        if beside:
            for group in others:
                blocks[group].append(rows.flat[group][at])
            for window in windows:
                window.extended_by_one(node)
            for state in states:
                state.extended(node, 1)
        for tell in stored:
            tell(seq, node, 1)
    kernel.counters.published_blocks += len(seqs) - apart
    if states:
        for seq in seqs:
            _keep_if_due(kernel, seq)


def _keep_if_due(kernel: Kernel, seq: Sequence) -> None:
    """Keep a snapshot if the sequence has come to one of its stops."""
    computed, size = seq.computed, kernel.rows.block_size
    if computed % size or not computed or seq.private_key:
        return
    regular = (computed in state.due(computed, computed + size) for state in kernel.rows.states)
    if computed in natural_ends(seq) or any(regular):
        keep_states(kernel, seq, passing=False)


def keep_states(kernel: Kernel, seq: Sequence, *, passing: bool) -> bool:
    """Keep a snapshot where the sequence stands in every recurrent group, or in none; return whether it is there.

    `passing`: one that matters only while its node ends there.
    """
    rows = kernel.rows
    last = seq.node.end - 1
    missing = [state for state in rows.states if state.block_at(seq.node, last) == GAP]
    if any(state.pool.num_available < 1 for state in missing):
        return False
    for state in missing:
        if not state.pool.num_free:
            evict_in(kernel, state, 1)
        block = state.pool.take(1)[0]
        state.keep(seq.node, block, passing=passing)
        working = rows.flat[state.index][seq.row]
        kernel.copies.plan(BlockCopy(state.index, working, block, 1))
    return True


def natural_ends(seq: Sequence) -> tuple[int, int]:
    """Return where a prompt like this can still start: at its end, and at its branch point."""
    size = seq.rows.block_size
    return (seq.prompt_len - 1) // size * size, seq.script.branch // size * size


def _release_behind(kernel: Kernel, seq: Sequence) -> None:
    """Free unpublished blocks that lie behind the windows of a sequence."""
    whole = seq.computed - seq.computed % kernel.rows.block_size
    for window in kernel.rows.windows:
        start = max(seq.node.end, window.num_sinks)
        stop = max(window.first_read(whole), start)
        slots = kernel.rows.slots(window.index, seq.row, start, stop)
        window.pool.drop_hold(memoryview(array("i", reversed(slots))))
        slots[:] = memoryview(array("i", [GAP]) * len(slots))


def check_copies(kernel: Kernel, seq: Sequence) -> None:
    """Raise `CopyError` if the next token's block waits for a planned copy."""
    rows, row = kernel.rows, seq.row
    tail, in_tail = divmod(rows.computed[row], rows.block_size)
    for state in rows.states:
        kernel.copies.check_done(state.index, rows.flat[state.index][row])
    for group in rows.token_groups if in_tail else ():
        kernel.copies.check_done(group, rows.flat[group][rows.offset[row] + tail])

"""Publishing: computed blocks enter the prefix tree, or give way to the same ones there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import NoReturn

from quire0.core.blocks import GAP, without_gaps
from quire0.core.checkpoints import Checkpoints
from quire0.core.events import EventLog
from quire0.core.node import NO_CHILDREN, Node
from quire0.core.radix import PrefixTree
from quire0.core.rows import Rows
from quire0.core.sequence import Sequence
from quire0.core.stats import Counters
from quire0.core.tokens import TOKEN_BYTES, Key, array_of, check_sign, common_prefix
from quire.errors import CommitError, CopyError

NO_IDS = memoryview(array("i"))


class Publisher:
    """Turns committed tokens into published blocks."""

    def __init__(
        self,
        tree: PrefixTree,
        rows: Rows,
        counters: Counters,
        events: EventLog | None,
        checkpoints: Checkpoints,
    ) -> None:
        self._tree = tree
        self._rows = rows
        self.copies = checkpoints.copies
        self.counters = counters
        self._events = events
        self._checkpoints = checkpoints

    def checked(self, seq: Sequence, key: Key) -> Key:
        """Return the key to store for tokens to commit; raise and change nothing if refused."""
        computed = self._rows.computed[seq.row]
        room = self._rows.capacity[seq.row] - computed
        if len(key) > room * TOKEN_BYTES:
            msg = (
                f"commit of {len(key) // TOKEN_BYTES} tokens, but only {room} are reserved beyond "
                f"the {computed} computed; reserve first"
            )
            raise CommitError(msg)
        if self.copies:
            self.check_copies(seq)
        if not seq.known:
            check_sign(key)
            return key
        start = (computed - seq.known_start) * TOKEN_BYTES
        if not seq.raw_prompt and seq.known.startswith(key, start):
            return key
        expected = seq.known[start : start + len(key)]
        split = len(expected)
        check_sign(key[split:])
        raw = seq.without_media(expected, computed)
        if not raw.startswith(key[:split]):
            self._refuse(raw, key[:split], computed)
        return memoryview(expected + key[split:].tobytes()) if seq.raw_prompt else key

    def commit(self, seq: Sequence, key: Key) -> None:
        """Add checked tokens: full blocks are published, the rest waits in the tail."""
        rows, row, size = self._rows, seq.row, self._rows.block_size
        computed = rows.computed[row]
        in_tail = computed % size
        num_tokens = len(key) // TOKEN_BYTES
        num_blocks = (in_tail + num_tokens) // size
        rows.computed[row] = computed = computed + num_tokens
        if seq.known and computed >= seq.known_end:
            seq.known = b""
            seq.known_start = computed
        self.counters.computed_tokens += num_tokens
        if num_blocks:
            used = (num_blocks * size - in_tail) * TOKEN_BYTES
            full = key[:used]
            if in_tail:
                full = memoryview(rows.tail(row, in_tail) + full)
            self.publish(seq, full, num_blocks)
            key = key[used:]
            in_tail = 0
        if len(key):
            rows.write_tail(row, in_tail, key)
        if rows.states:
            self._checkpoints.keep_if_due(seq)
        if seq.private_key:
            self._release_behind(seq)

    def publish(self, seq: Sequence, key: Key, num_blocks: int) -> None:
        """Enter the sequence's next `num_blocks` blocks into the tree, as its terms say."""
        terms, size = seq.terms, self._tree.block_bytes
        while terms is not None and num_blocks:
            end = seq.node.end
            if end >= terms.limit or seq.private_key:
                seq.private_key += key
                return
            step = min(num_blocks, terms.next_step(end) - end)
            if step == num_blocks:
                break
            self._publish_run(seq, key[: step * size], step)
            key = key[step * size :]
            num_blocks -= step
        self._publish_run(seq, key, num_blocks)

    def restore(self, seq: Sequence, key: Key, num_blocks: int) -> None:
        """Enter blocks that were not computed here; what the table leaves out becomes a gap."""
        rows, row = self._rows, seq.row
        start = seq.node.end
        first, key, left = self._follow(seq, key, num_blocks)
        rows.computed[row] = (start + num_blocks) * rows.block_size
        seq.known = b""
        seq.known_start = rows.computed[row]
        self.counters.restored_blocks += left
        if not left:
            return
        parent = seq.node
        start = parent.end
        ids = [rows.slots(g, row, start, start + left) for g in range(len(rows.flat))]
        for state in rows.states:
            ids[state.index] = NO_IDS
        blocks = tuple(array("i", each.tobytes()) for each in ids)
        lost = self._tree.lost.take(parent, first)
        node = seq.node = self._tree.add(parent, first, key, blocks, seq.priority)
        node.used = lost.used if lost is not None else 0
        node.session = parent.session
        self._tree.stand(node, rows.windows)
        self._tree.leave(parent, rows.windows)
        for window in rows.windows:
            window.find_gaps(node)
        if seq.media:
            self._tree.count_media(node, key)
        if self._events is not None:
            self._events.stored(node, seq.scope, left)
        if lost is not None:
            self._tree.lost.put_back(node, start, lost)

    def _publish_run(self, seq: Sequence, key: Key, num_blocks: int) -> None:
        tree, rows, row = self._tree, self._rows, seq.row
        node = seq.node
        first = b""
        if node.children is not NO_CHILDREN or node.lost:
            first, key, left = self._follow(seq, key, num_blocks)
            self.counters.deduplicated_blocks += num_blocks - left
            node, num_blocks = seq.node, left
            if not left:
                return
        start, stop = node.end, node.end + num_blocks
        at = rows.offset[row] + start
        ids = [table[at : at + num_blocks] for table in rows.flat]
        for state in rows.states:
            ids[state.index] = NO_IDS
        priority, keep_for, goes_on = seq.priority, seq.keep_for, True
        if seq.terms is not None:
            priority, keep_for = seq.priority_at(start), seq.keep_for_at(start)
            goes_on = seq.terms.at(start).start != start
        lost = tree.lost.take(node, first) if node.lost else None
        if (
            node.locks == 1
            and not node.children
            and node.parent is not None
            and goes_on
            and node.session is seq.session
            and node.spent_from == seq.outlook
            and tree.evictor.extendable(node, priority, keep_for)
        ):
            tree.extend(node, key, ids)
        else:
            blocks = tuple(array("i", each.tobytes()) for each in ids)
            first = first or key[: tree.block_bytes].tobytes()
            new = seq.node = tree.add(node, first, key, blocks, priority)
            new.used = seq.number
            new.session, new.spent_from = seq.session, seq.outlook
            tree.stand(new, rows.windows)
            tree.leave(node, rows.windows)
            node = new
        if seq.media:
            tree.count_media(node, key)
        node.writer = seq if seq.terms is None and not seq.media else None
        self.counters.published_blocks += num_blocks
        if self._events is not None:
            self._events.stored(node, seq.scope, num_blocks)
        if lost is not None:
            left = tree.lost.put_back(node, start, lost)
            at = (stop * rows.block_size - seq.known_start) * TOKEN_BYTES
            if left is not None and 0 <= at <= len(seq.known) - tree.block_bytes:
                first = seq.known[at : at + tree.block_bytes]
                tree.lost.hang(left, first, node, is_end=True)

    def _follow(self, seq: Sequence, key: Key, num_blocks: int) -> tuple[bytes, Key, int]:
        """Take over the tree's blocks as far as it has these tokens.

        Returns what is left of them: the first block, all bytes, and the number of blocks.
        """
        tree, first = self._tree, b""
        while num_blocks:
            first = key[: tree.block_bytes].tobytes()
            if first not in seq.node.children:
                break
            found = tree.match(seq.node, key, len(key))
            key = key[found.num_bytes :]
            self._rebase(seq, tree.cut(found))
            num_blocks -= found.num_bytes // tree.block_bytes
        return first, key, num_blocks

    def _rebase(self, seq: Sequence, node: Node) -> None:
        """Use the tree's blocks down to `node` in place of the sequence's own, and free those."""
        tree, rows, row = self._tree, self._rows, seq.row
        each = node
        while each is not seq.node:
            assert each.parent is not None
            tree.lock(each)
            if each.session is not seq.session:
                each.session = None
            each.used = max(each.used, seq.number)
            each.priority = max(each.priority, seq.priority_at(each.start))
            for g, pool in tree.full:
                slots = rows.slots(g, row, each.start, each.end)
                pool.free(without_gaps(slots))
                slots[:] = memoryview(each.blocks[g])
            for window in rows.windows:
                window.merge(each, rows.slots(window.index, row, each.start, each.end))
            for group in tree.sparse:
                group.touched(each)
            each = each.parent
        tree.stand(node, rows.windows)
        tree.leave(seq.node, rows.windows)
        seq.node = node

    def publish_last_blocks(self, seqs: Items[Sequence]) -> None:
        """Publish the block that each of these sequences has just filled."""
        rows, tails, size = self._rows, self._rows.tail_bytes, self._tree.block_bytes
        offset, windows, states = rows.offset, rows.windows, rows.states
        first, *others = rows.token_groups or (0,)
        table = rows.flat[first]
        beside = bool(others or windows or states)
        in_place = bool(rows.token_groups)
        extended = 0
        for seq in seqs:
            node, row = seq.node, seq.row
            key = tails[row * size : row * size + size]
            if not in_place or node.writer is not seq:
                self.publish(seq, key, 1)
                if seq.private_key:
                    self._release_behind(seq)
                continue
            node_key, blocks, end = node.key, node.blocks, node.end
            node_key += key  # from here: `PrefixTree.extend` by one block, unrolled
            at = offset[row] + end
            blocks[first].append(table[at])
            node.end = end + 1
            extended += 1
            if beside:
                for group in others:
                    blocks[group].append(rows.flat[group][at])
                for window in windows:
                    window.extended_by_one(node)
                for state in states:
                    state.extended(node, 1)
            if self._events is not None:
                self._events.stored(node, seq.scope, 1)
        self.counters.published_blocks += extended
        if states:
            for seq in seqs:
                self._checkpoints.keep_if_due(seq)

    def _release_behind(self, seq: Sequence) -> None:
        """Free unpublished blocks that lie behind the windows of a sequence."""
        rows = self._rows
        for window in rows.windows:
            start = max(seq.node.end, window.num_sinks)
            slots = rows.slots(
                window.index,
                seq.row,
                start,
                max(window.first(seq.computed // rows.block_size), start),
            )
            for at, block in enumerate(slots):
                if block == GAP:
                    continue
                if block in window.pool.shared:
                    window.pool.unshare(block)
                else:
                    window.pool.free(slots[at : at + 1])
                slots[at] = GAP

    def check_copies(self, seq: Sequence) -> None:
        """Raise `CopyError` if the next token's block waits for a planned copy."""
        computed = self._rows.computed[seq.row]
        tail, in_tail = divmod(computed, self._rows.block_size)
        for state in self._rows.states:
            self._refuse_pending(state.index, self._rows.flat[state.index][seq.row])
        for group in self._rows.token_groups:
            if in_tail:
                self._refuse_pending(group, self._rows.slots(group, seq.row, tail, tail + 1)[0])

    def _refuse_pending(self, group: int, block: int) -> None:
        if self.copies.touches(group, block):
            msg = (
                f"block {block} of group {group} waits for a planned copy; call take_copies() "
                "and do them before the forward whose tokens are committed"
            )
            raise CopyError(msg)

    def _refuse(self, expected: bytes, key: Key, computed: int) -> NoReturn:
        at = common_prefix(expected, key)
        wanted, given = array_of(expected)[at], array_of(key)[at]
        msg = (
            f"token {given} committed at position {computed + at}, where the prompt (or what was "
            f"computed before a suspend) has {wanted}; commit these tokens, or open another prompt"
        )
        raise CommitError(msg)

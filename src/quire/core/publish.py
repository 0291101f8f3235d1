"""Publishing: computed blocks enter the prefix tree, or give way to the same ones there."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from typing import NoReturn

from quire.core.copies import CopyPlan
from quire.core.events import EventLog
from quire.core.radix import NO_CHILDREN, Node, PrefixTree
from quire.core.sequence import Rows, Sequence
from quire.core.stats import Counters
from quire.core.tokens import TOKEN_BYTES, Key, array_of, check_sign, common_prefix
from quire.errors import CommitError, CopyError


class Publisher:
    """Turns committed tokens into published blocks."""

    def __init__(
        self,
        tree: PrefixTree,
        rows: Rows,
        copies: CopyPlan,
        counters: Counters,
        events: EventLog | None,
    ) -> None:
        self._tree = tree
        self._rows = rows
        self.copies = copies
        self.counters = counters
        self._events = events

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
        if self.copies.sources:
            self.check_copies(seq)
        if not seq.known:
            check_sign(key)
            return key
        start = (computed - seq.known_start) * TOKEN_BYTES
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
        in_tail = computed - seq.node.end * size
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

    def publish(self, seq: Sequence, key: Key, num_blocks: int) -> None:
        """Enter the sequence's next `num_blocks` blocks into the tree."""
        tree, rows, row = self._tree, self._rows, seq.row
        node = seq.node
        while node.children is not NO_CHILDREN:
            edge = node.children.get(key[: tree.block_bytes].tobytes())
            if edge is None:
                break
            found = tree.match(node, key, len(key))
            key = key[found.num_bytes :]
            self._rebase(seq, tree.cut(found))
            num_blocks -= found.num_bytes // tree.block_bytes
            node = seq.node
            if not num_blocks:
                return
        start, stop = node.end, node.end + num_blocks
        ids = tuple(rows.slots(g, row, start, stop) for g in range(len(rows.flat)))
        if (
            node.locks == 1
            and not node.children
            and node.parent is not None
            and tree.evictor.extendable(node, seq.priority, seq.keep_for)
        ):
            tree.extend(node, key, ids)
        else:
            blocks = tuple(array("i", each.tobytes()) for each in ids)
            node = seq.node = tree.add(node, key, blocks, seq.priority)
        node.writer = seq
        self.counters.published_blocks += num_blocks
        if self._events is not None:
            self._events.stored(node, seq.scope, num_blocks)

    def _rebase(self, seq: Sequence, node: Node) -> None:
        """Use the tree's blocks down to `node` in place of the sequence's own, and free those."""
        tree, rows, row = self._tree, self._rows, seq.row
        start = seq.node.end
        each = node
        while each is not seq.node:
            assert each.parent is not None
            tree.lock(each)
            each.priority = max(each.priority, seq.priority)
            for g, pool in enumerate(tree.pools):
                slots = rows.slots(g, row, each.start, each.end)
                pool.free(slots)
                slots[:] = memoryview(each.blocks[g])
            each = each.parent
        seq.node = node
        self.counters.deduplicated_blocks += node.end - start

    def publish_last_blocks(self, seqs: Items[Sequence]) -> None:
        """Publish the block that each of these sequences has just filled."""
        rows, tails, size = self._rows, self._rows.tail_bytes, self._tree.block_bytes
        width, first, others = rows.width, rows.flat[0], rows.flat[1:]
        in_place = self._events is None
        extended = 0
        for seq in seqs:
            node, row = seq.node, seq.row
            key = tails[row * size : row * size + size]
            if not in_place or node.writer is not seq:
                self.publish(seq, key, 1)
                continue
            node_key, blocks, end = node.key, node.blocks, node.end
            node_key += key  # from here: `PrefixTree.extend` by one block, unrolled
            at = row * width + end
            blocks[0].append(first[at])
            if others:
                for group, table in enumerate(others, 1):
                    blocks[group].append(table[at])
            node.end = end + 1
            extended += 1
        self.counters.published_blocks += extended

    def check_copies(self, seq: Sequence) -> None:
        """Raise `CopyError` if the next token's block waits for a planned copy."""
        computed = self._rows.computed[seq.row]
        tail = computed // self._rows.block_size
        if computed % self._rows.block_size == 0:
            return
        for group in range(len(self._rows.flat)):
            block = self._rows.slots(group, seq.row, tail, tail + 1)[0]
            if self.copies.pending(group, block):
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

"""Publishing: computed blocks enter the prefix tree, or give way to the same ones there."""

from __future__ import annotations

from array import array

import numpy as np

from quire.core.copies import CopyPlan
from quire.core.events import EventLog
from quire.core.radix import NO_CHILDREN, Node, PrefixTree
from quire.core.sequence import Rows, Sequence
from quire.core.stats import Counters
from quire.core.tokens import INT32, TOKEN_BYTES, Key, check_sign
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
        self._copies = copies
        self._counters = counters
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
        if len(self._copies):
            self.check_copies(seq)
        if computed >= seq.prompt_len:
            check_sign(key)
            return key
        start = (computed - seq.prompt_start) * TOKEN_BYTES
        end = min(len(key), len(seq.prompt) - start)
        check_sign(key[end:])
        if seq.prompt.startswith(key[:end], start):
            return key
        return self._with_media(seq, key, start, end)

    def commit(self, seq: Sequence, key: Key) -> None:
        """Add checked tokens: full blocks are published, the rest waits in the tail."""
        rows, row, size = self._rows, seq.row, self._rows.block_size
        computed = rows.computed[row]
        in_tail = computed - seq.node.end * size
        num_tokens = len(key) // TOKEN_BYTES
        num_blocks = (in_tail + num_tokens) // size
        rows.computed[row] = computed + num_tokens
        self.count(num_tokens)
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
        if node.locks == 1 and not node.children and node.parent is not None:
            tree.extend(node, key, ids)
        else:
            blocks = tuple(array("i", each.tobytes()) for each in ids)
            node = seq.node = tree.add(node, key, blocks, seq.priority)
        self._counters.published_blocks += num_blocks
        if self._events is not None:
            self._events.stored(node, seq.scope, num_blocks)

    def count(self, num_tokens: int) -> None:
        """Count tokens whose KV was computed."""
        self._counters.computed_tokens += num_tokens

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
        self._counters.deduplicated_blocks += node.end - start

    @property
    def copies_waiting(self) -> bool:
        """Whether any planned copy was not taken yet."""
        return len(self._copies) > 0

    def check_copies(self, seq: Sequence) -> None:
        """Raise `CopyError` if the next token's block waits for a planned copy."""
        computed = self._rows.computed[seq.row]
        tail = computed // self._rows.block_size
        if computed % self._rows.block_size == 0:
            return
        for group in range(len(self._rows.flat)):
            block = self._rows.slots(group, seq.row, tail, tail + 1)[0]
            if self._copies.pending(group, block):
                msg = (
                    f"block {block} of group {group} waits for a planned copy; call take_copies() "
                    "and do them before the forward whose tokens are committed"
                )
                raise CopyError(msg)

    def _with_media(self, seq: Sequence, key: Key, start: int, end: int) -> Key:
        """Put the prompt's media numbers into the key; text tokens must be the prompt's."""
        prompt = np.frombuffer(seq.prompt, INT32)[start // TOKEN_BYTES :][: end // TOKEN_BYTES]
        given = np.frombuffer(key[:end], INT32)
        wrong = np.flatnonzero((given != prompt) & (prompt >= 0))
        if len(wrong):
            at = int(wrong[0])
            position = seq.prompt_start + start // TOKEN_BYTES + at
            msg = (
                f"token {given[at]} committed at position {position}, where the prompt given at "
                f"open has {prompt[at]}; commit the prompt's own tokens, or truncate and open anew"
            )
            raise CommitError(msg)
        return memoryview(prompt.tobytes() + key[end:].tobytes())

"""Prompts as chains of texts: which blocks two of them share, without any token.

A text is its length and where it stands: after which other texts. A block belongs to the
text that its last token is in, so two prompts share the blocks that end within the
texts that they begin with in common. That is what a cache of real tokens would find, if
different texts differ from their first block on.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec
import numpy as np

from quire_sim.trace.rows import Runs, add_run


class Text(msgspec.Struct, eq=False):
    """A text after others: `end` tokens from the begin of the prompt, `before` it another one.

    `num_blocks`  blocks that end in it
    `first_id`    the id of the first of them, from its first request on
    `shared`      texts that others may follow too, by what they are
    """

    end: int
    num_blocks: int
    before: Text | None = None
    first_id: int | None = None
    shared: dict[Hashable, Text] | None = None


class Library:
    """All texts of a workload. Memory grows with those that are shared; others go unreferenced."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[Hashable, Text] = {}
        self._num_ids = 0

    def add(self, length: int, before: Text | None = None) -> Text:
        """Return a new, unique text behind another."""
        start = before.end if before is not None else 0
        end = start + length
        return Text(end, end // self._block_size - start // self._block_size, before)

    def share(self, what: Hashable, length: int, before: Text | None = None) -> Text:
        """Return the text that is `what` behind another, the same one every time."""
        if before is None:
            texts = self._roots
        else:
            texts = before.shared = before.shared if before.shared is not None else {}
        text = texts.get(what)
        if text is None:
            text = texts[what] = self.add(length, before)
        return text

    def runs(self, last: Text) -> Runs:
        """Return the ids of the prompt that ends with a text, numbering those that are new."""
        path: list[Text] = []
        text: Text | None = last
        while text is not None:
            path.append(text)
            text = text.before
        runs: list[tuple[int, int]] = []
        for text in reversed(path):
            if text.first_id is None:
                text.first_id = self._num_ids
                self._num_ids += text.num_blocks
            if text.num_blocks:
                add_run(runs, text.first_id, text.num_blocks)
        return np.array(runs, np.int32).reshape(-1, 2)

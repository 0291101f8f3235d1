"""One call: its sequences, the working cache they share, and what is kept of it."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from quire.core import Scope, Sequence
from quire.engines.hf.inputs import Prompts
from quire.engines.hf.media import Media
from quire.engines.hf.store import BlockStore, Tokens, media_before
from quire.engines.hf.working import WorkingCache, empty_cache
from quire.tensors.copy import KV


@dataclass(frozen=True, slots=True)
class Terms:
    """Who may share a request's prefix, and how long it is worth keeping."""

    scope: Scope
    priority: int = 0
    retain_s: float | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A text that a row of the working cache holds: `tokens[:n]` are the row's first n tokens."""

    row: int
    tokens: Tokens


class Request:
    """The sequences of the rows of one call, from lookup to close.

    The rows of a batch advance together, so what is reused ends at the same column for all:
    `num_columns` is the least column up to which every row is cached or padding, and which ends
    inside no media item. Columns and tokens of row r: column = pads[r] + token position.
    """

    def __init__(self, store: BlockStore, prompts: Prompts, media: Media, terms: Terms) -> None:
        self.prompts = prompts
        self._media = media
        self._store = store
        self._terms = terms
        self._sequences: list[Sequence] = []
        try:
            for tokens, items in zip(prompts.tokens, media.spans, strict=True):
                self._sequences.append(
                    store.open(tokens, terms.scope, terms.priority, terms.retain_s, items)
                )
        except BaseException:
            self.close()
            raise

    @property
    def num_columns(self) -> int:
        """Columns that need no compute."""
        return self._media.cut(
            min(
                int(pad) + seq.num_cached
                for pad, seq in zip(self.prompts.pads, self._sequences, strict=True)
            )
        )

    def working_cache(self, num_columns: int, *, room: int = 0, dtype: torch.dtype) -> WorkingCache:
        """Make a working cache that holds the first `num_columns` columns of all prompts.

        `room`: columns to allocate from the start; `dtype`: what the model computes in.
        """
        prompts, pool = self.prompts, self._store.pool
        cache = empty_cache(
            pool.layout.num_layers,
            prompts.ids[:, :0].to(pool.device),  # beside the states: no transfer per token
            prompts.pads,
            room=max(room, num_columns),
            debug_nan=pool.debug_nan,
        )
        if num_columns == 0:
            return cache
        shape = (len(prompts.tokens), pool.layout.kv_heads, num_columns)
        like_k = pool.k.new_empty((), dtype=dtype).expand(*shape, pool.layout.k_width)
        like_v = pool.v.new_empty((), dtype=dtype).expand(*shape, pool.layout.v_width)
        columns = [layer.extend(like_k, like_v) for layer in cache.working_layers]
        for row, (pad, seq) in enumerate(zip(prompts.pads, self._sequences, strict=True)):
            num_tokens = max(num_columns - int(pad), 0)
            num_padding = num_columns - num_tokens
            out: list[KV] = []
            for k, v in columns:
                # Padding is masked, but 0 * NaN is NaN: what is masked must be finite.
                k[row, :, :num_padding] = 0
                v[row, :, :num_padding] = 0
                out.append((k[row, :, num_padding:], v[row, :, num_padding:]))
            if num_tokens:
                self._store.load(seq, num_tokens, out)
        cache.ledger.append(prompts.ids[:, :num_columns])
        return cache

    def num_reused(self, num_columns: int) -> int:
        """Return the tokens of all rows that `num_columns` reused columns stand for."""
        return int(np.maximum(num_columns - self.prompts.pads, 0).sum())

    def keep(self, cache: WorkingCache, texts: Iterable[Kept]) -> int:
        """Store the whole blocks of `texts`, prompts first; return how many tokens were new."""
        by_origin: dict[int, list[Kept]] = {}
        for text in texts:
            by_origin.setdefault(int(cache.ledger.origins[text.row]), []).append(text)
        return sum(
            self._keep_row(cache, origin, rows) for origin, rows in sorted(by_origin.items())
        )

    def close(self) -> None:
        """Close all sequences; what was kept stays cached."""
        while self._sequences:
            self._store.manager.close(self._sequences.pop())

    def _keep_row(self, cache: WorkingCache, origin: int, texts: list[Kept]) -> int:
        prompt, seq = self.prompts.tokens[origin], self._sequences[origin]
        kept = 0
        ours = [text for text in texts if _agree(text.tokens, prompt)]
        if ours:
            kept += self._save(cache, seq, Kept(ours[0].row, ours[0].tokens[: prompt.size]))
            for text in ours[1:]:
                kept += self._keep_fork(cache, seq, text)
            kept += self._save(cache, seq, ours[0])
        for text in texts:
            if not _agree(text.tokens, prompt) and text.tokens.size:
                kept += self._keep_other(cache, text, origin)
        return kept

    def _keep_fork(self, cache: WorkingCache, seq: Sequence, text: Kept) -> int:
        if text.tokens.size - seq.computed < self._store.manager.block_size:
            return 0
        twin = self._store.manager.fork(seq)
        try:
            return self._save(cache, twin, text)
        finally:
            self._store.manager.close(twin)

    def _keep_other(self, cache: WorkingCache, text: Kept, origin: int) -> int:
        """Keep a text that is not the opened prompt's: the caller fed something else."""
        terms, prompt = self._terms, self.prompts.tokens[origin]
        media = media_before(self._media.spans[origin], _num_shared(text.tokens, prompt))
        seq = self._store.open(text.tokens, terms.scope, terms.priority, terms.retain_s, media)
        try:
            return self._save(cache, seq, text)
        finally:
            self._store.manager.close(seq)

    def _save(self, cache: WorkingCache, seq: Sequence, text: Kept) -> int:
        def read(start: int, stop: int) -> list[KV]:
            return cache.row_kv(text.row, start, stop)

        return self._store.save(seq, text.tokens, read)


def _agree(text: Tokens, prompt: Tokens) -> bool:
    return _num_shared(text, prompt) == min(text.size, prompt.size)


def _num_shared(one: Tokens, two: Tokens) -> int:
    length = min(one.size, two.size)
    differ = np.flatnonzero(one[:length] != two[:length])
    return int(differ[0]) if differ.size else length

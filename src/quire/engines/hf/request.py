"""One call: its sequences, their working cache, and the blocks kept at its end."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Unpack

import numpy as np
import torch

from quire import ops
from quire.core import Scope, Sequence
from quire.core.terms import RequestTerms
from quire.engines.hf.inputs import Plan, Prompts
from quire.engines.hf.media import Media
from quire.engines.hf.pools import HfStore, Tokens, first_token, media_before
from quire.engines.models.cache_factory import CacheFactory, stacked
from quire.engines.models.working_cache import WorkingCache
from quire.engines.tiered.store import Onboarded
from quire.groups import stops
from quire.tensors.copy import KV

Feed = Callable[[Prompts, Media, WorkingCache, int], None]
"""Computes the tokens of a prompt of one row, with its media, that a working cache lacks, up to a length."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A text that a row of the working cache holds: `tokens[:n]` are the row's first n tokens."""

    row: int
    tokens: Tokens


class Request:
    """The sequences of the rows of one call, from lookup to close.

    Columns and tokens of row r: column = pads[r] + token position. The rows of a batch advance
    together, so all start at the same column. `num_reused` tokens of all rows came from the cache.

    has_stayed  tells whether the model has been all along what the scope is bound to
    """

    has_stayed: Callable[[], bool]

    def __init__(
        self,
        store: HfStore,
        prompts: Prompts,
        media: Media,
        scope: Scope,
        **terms: Unpack[RequestTerms],
    ) -> None:
        self.prompts = prompts
        self.media = media
        self.scope = scope
        self._store = store
        self._terms = terms
        self._sequences: list[Sequence] = []
        self.num_reused = 0
        self.onboarded: list[Onboarded] = []
        store.transfers.join()
        try:
            for tokens, items in zip(prompts.tokens, media.spans, strict=True):
                self.onboarded.append(store.onboard(tokens, scope, items))
                self._sequences.append(store.open(tokens, scope, items, **terms))
        except BaseException:
            self.close()
            raise

    def start(self, factory: CacheFactory, feed: Feed) -> WorkingCache:
        """Return a working cache of all rows that ends at the same column in each.

        Full attention can start anywhere in what is cached, but inside no item of media. A window or
        a state is valid at the end of a row's cached tokens only, so that rows which end at different
        columns are brought to one by computing them alone, with `feed`; recurrent rows so that their
        states are kept at each of the manager's stops as well. A row whose padding reaches to that
        column or beyond it has nothing to compute yet. That column lies inside no item either.
        """
        pads, rows = self.prompts.pads, range(len(self._sequences))
        ends = [int(pad) + seq.num_cached for pad, seq in zip(pads, self._sequences, strict=True)]
        if self._store.layout.is_full_attention:
            return self._loaded(rows, self.media.cut(min(ends)), factory)
        last, is_recurrent = self.prompts.ids.shape[1] - 1, self._store.layout.is_recurrent
        upto = self.media.cut(last)
        if not is_recurrent:
            upto = self.media.beyond(self._column([seq.num_cached for seq in self._sequences]))
            if upto > last:
                return self.start_empty(
                    factory
                )  # the prompt ends in an item that others go on from
            if upto == 0 or set(ends) == {upto}:
                return self._loaded(rows, upto, factory)
        caches: list[WorkingCache] = []
        for row, seq in enumerate(self._sequences):
            prompt, media = self.prompts.row(row), self.media.row(row)
            cache = self._row_loaded(row, factory)
            for stop in stops(self._store.manager, seq) if is_recurrent else ():
                if media.cut(stop) == stop:
                    feed(prompt, media, cache, stop)
                    self._keep_text(cache, seq, Kept(0, prompt.tokens[0][:stop]))
            if len(rows) > 1:
                feed(prompt, media, cache, max(upto - int(pads[row]), 0))
            caches.append(cache)
        if len(rows) == 1 and pads[0] == 0:
            return caches[0]
        column = self._column([cache.ledger.length for cache in caches])
        return stacked(caches, self.prompts.ids, self.prompts.pads, column, factory)

    def start_empty(self, factory: CacheFactory) -> WorkingCache:
        """Return a working cache of all rows without columns: everything is computed."""
        self.num_reused = 0
        return factory.cache(self.prompts.ids, self.prompts.pads)

    def _column(self, lengths: Items[int]) -> int:
        """Return the last column at which a row of `lengths[r]` tokens ends; 0 where none has any."""
        pads = self.prompts.pads
        return max((int(p) + n for p, n in zip(pads, lengths, strict=True) if n), default=0)

    def _row_loaded(self, row: int, factory: CacheFactory) -> WorkingCache:
        """Return a working cache of one row, without its padding, up to its cached end."""
        seq, prompt = self._sequences[row], self.prompts.row(row)
        states = None
        if self._store.layout.is_recurrent and seq.num_cached:
            states = self._store.load_states(seq)
            if states is None:
                return factory.cache(prompt.ids, prompt.pads)
        cache = self._loaded([row], seq.num_cached, factory, prompt)
        if states is not None:
            cache.fill_states([states], factory.state_names)
        return cache

    def _loaded(
        self, rows: Items[int], column: int, factory: CacheFactory, prompts: Prompts | None = None
    ) -> WorkingCache:
        """Return a working cache of `rows` with their cached tokens up to a column."""
        prompts = prompts or self.prompts
        cache = factory.cache(prompts.ids, prompts.pads, column)
        self.num_reused += int(np.maximum(column - prompts.pads, 0).sum())
        if column == 0:
            return cache
        groups = factory.token_groups
        views = [
            [
                cache.kv_layers[layer].start_with(column, factory.like(memory, len(rows)))
                for layer in group.layers
            ]
            for group, memory in groups
        ]
        for index, (row, pad) in enumerate(zip(rows, prompts.pads, strict=True)):
            num_tokens = column - int(pad)
            out: list[list[KV]] = []
            for (group, _), layers in zip(groups, views, strict=True):
                first = int(pad) + first_token(group.kind, max(num_tokens, 0))
                out.append([_behind(k[index], v[index], column - first) for k, v in layers])
            if num_tokens > 0:
                self._store.load(self._sequences[row], num_tokens, out)
        for layer, held in cache.kv_layers.items():
            held.arriving = self._store.transfers.arrival(layer)
        cache.ledger.append(prompts.ids[:, :column])
        return cache

    def keep(self, cache: WorkingCache, texts: Iterable[Kept]) -> int:
        """Store the whole blocks of `texts`, prompts first; return how many tokens were new."""
        by_origin: dict[int, list[Kept]] = {}
        for text in texts:
            by_origin.setdefault(int(cache.ledger.origins[text.row]), []).append(text)
        return sum(
            self._keep_row(cache, origin, rows) for origin, rows in sorted(by_origin.items())
        )

    def close(self) -> None:
        """Close all sequences; published blocks stay cached.

        Where blocks could not be filled that were to come from tiers, all that is cached goes.
        """
        try:
            self._store.transfers.join()
        except BaseException:
            try:
                self._store.transfers.give_up()
            finally:
                self._close_sequences()
                self._store.settle()
                if not self._store.manager.interrupted:
                    ops.clear(self._store.manager)
            raise
        self._close_sequences()

    def _close_sequences(self) -> None:
        try:
            while self._sequences:
                self._store.close(self._sequences.pop())
        except BaseException as error:
            self._store.manager.cut_off("the end of a request", error)  # it may hold blocks still
            raise

    def _keep_row(self, cache: WorkingCache, origin: int, texts: list[Kept]) -> int:
        prompt, seq = self.prompts.tokens[origin], self._sequences[origin]
        kept = 0
        ours = [text for text in texts if _agree(text.tokens, prompt)]
        if ours:
            kept += self._keep_text(cache, seq, Kept(ours[0].row, ours[0].tokens[: prompt.size]))
            for text in ours[1:]:
                kept += self._keep_fork(cache, seq, text)
            kept += self._keep_text(cache, seq, ours[0])
        for text in texts:
            if not _agree(text.tokens, prompt) and text.tokens.size:
                kept += self._keep_other(cache, text, origin)
        return kept

    def _keep_fork(self, cache: WorkingCache, seq: Sequence, text: Kept) -> int:
        if text.tokens.size - seq.computed < self._store.manager.block_size:
            return 0
        snapshot = cache.snapshots[text.row]
        if self._store.layout.is_recurrent and (not snapshot or snapshot.length <= seq.computed):
            return 0
        twin = self._store.fork(seq)
        if twin is None:
            return 0
        try:
            return self._keep_text(cache, twin, text)
        finally:
            self._store.close(twin)

    def _keep_other(self, cache: WorkingCache, text: Kept, origin: int) -> int:
        """Keep a text that is not the opened prompt's: the caller fed something else."""
        prompt = self.prompts.tokens[origin]
        media = media_before(self.media.spans[origin], _num_shared(text.tokens, prompt))
        seq = self._store.open(text.tokens, self.scope, media, **self._terms)
        try:
            return self._keep_text(cache, seq, text)
        finally:
            self._store.close(seq)

    def _keep_text(self, cache: WorkingCache, seq: Sequence, text: Kept) -> int:
        def read(layers: Items[int], start: int, stop: int) -> list[KV]:
            return cache.row_kv(layers, text.row, start, stop)

        return self._store.keep(seq, text.tokens, read, cache.snapshots[text.row])


def recorded(past: WorkingCache) -> Iterator[Kept]:
    """Every row of a working cache, with all tokens that it holds."""
    for row, tokens in enumerate(past.ledger.rows()):
        yield Kept(row, tokens)


def returned(prompts: Prompts, plan: Plan, past: WorkingCache, output: Any) -> Iterator[Kept]:
    """Each returned sequence, cut after its end, as far as a row of its prompt holds it."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    texts = sequences.cpu().numpy().astype(np.int32)
    per_prompt = max(len(texts) // len(prompts.tokens), 1)
    held = past.ledger.rows()
    for index, padded in enumerate(texts):
        origin = index // per_prompt
        text = padded[prompts.pads[origin] :]
        ends = np.flatnonzero(np.isin(text[prompts.tokens[origin].size :], plan.eos))
        if ends.size:
            text = text[: prompts.tokens[origin].size + int(ends[0]) + 1]
        candidates = [
            (_num_shared(text, held[row]), -int(row))
            for row in np.flatnonzero(past.ledger.origins == origin)
        ]
        length, row = max(candidates)
        yield Kept(-row, text[:length])


def brought_home(prompts: Prompts, output: Any) -> Any:
    """Return what `generate` returned, its ids where the prompt's are: there the model's own leaves them."""
    if isinstance(output, torch.Tensor):
        return output.to(prompts.home)
    output.sequences = output.sequences.to(prompts.home)
    return output


def _behind(k: torch.Tensor, v: torch.Tensor, num_columns: int) -> KV:
    """Return the last columns of one row as views, and make those before them finite.

    They are padding, or chunks that are over: masked, but 0 * NaN is NaN.
    """
    num_before = k.shape[-2] - max(min(num_columns, k.shape[-2]), 0)
    k[:, :num_before] = 0
    v[:, :num_before] = 0
    return k[:, num_before:], v[:, num_before:]


def _agree(text: Tokens, prompt: Tokens) -> bool:
    return _num_shared(text, prompt) == min(text.size, prompt.size)


def _num_shared(one: Tokens, two: Tokens) -> int:
    length = min(one.size, two.size)
    differ = np.flatnonzero(one[:length] != two[:length])
    return int(differ[0]) if differ.size else length

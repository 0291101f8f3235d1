"""Prefix reuse for Hugging Face models."""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from quire.core import Explanation, Hint, Scope
from quire.core.hints import NO_HINT
from quire.engines.hf.inputs import (
    Plan,
    Prompts,
    read_plan,
    read_prompts,
)
from quire.engines.hf.keeping import KeptBlocks
from quire.engines.hf.media import Media, Named
from quire.engines.hf.prefill import prefill
from quire.engines.hf.recorder import Recorder
from quire.engines.hf.report import CallReport
from quire.engines.hf.request import Feed, Request
from quire.engines.hf.store import Terms
from quire.engines.hf.texts import recorded, returned
from quire.engines.hf.turns import in_turn
from quire.engines.hf.verify import Check
from quire.engines.hf.working import WorkingCache
from quire.errors import ConfigError, TokensError

if TYPE_CHECKING:
    from quire.tiers.stack.prefetch import Prefetch


class PrefixCache(KeptBlocks):
    """The KV of what a model has read before, kept and found again by prefix.

        cache = PrefixCache(model, "2GiB")
        output = cache.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=50)

    `generate` returns what `model.generate` returns. Logits differ by rounding, since a suffix is
    computed in other matrix shapes than a whole prompt (1e-6 in float32, more in half precision);
    greedy tokens are equal unless two logits are closer than that.

    model       a decoder of transformers, in eval mode, on one device; its layers may be full,
                sliding-window, chunked, recurrent (linear attention, Mamba, convolutions), or mixed
    capacity    bytes for K, V and states: "2GiB", "512MB", or an integer; or blocks per layer
                group by name
    block_size  tokens per block; reuse ends inside a block where prompts part
    policy      what to evict: a name of `quire.core.policies.POLICIES`, or a factory of policies
    dtype       what the pool stores; None stores K and V as computed. A smaller one saves
                memory and gives up equality
    expected_tokens    length of a cached sequence, by which layer groups share the capacity
    snapshot_interval  tokens between windows and states that are kept on the way, besides those
                at ends and branch points; None: every four windows, and no states
    debug       fresh memory is NaN and the manager checks itself: for tests
    clock, observer    seconds, rising; told of every prompt, for instance `quire.Recorder`
    tiers       where KV goes that outlives the pool, fastest first: `[Host("8GiB"), Disk(path, "200GiB")]`, or
                lines as `quire.tiers.opening` reads them, or a `TierStack`. Reading is verified; a tier
                that fails is a miss. With tiers, `close` the cache or use it in a `with` block
    tier_dtype  store K and V in tiers as "fp8", "int8" or "int4", giving up equality; None: as in the pool
    verify      what is tried before K and V are reused: "probe", a short check of the model and requests
                to a tiny twin of its config; "first", besides, the first reused call of each shape
                (rows, padding, windows, beams, media, adapter) against a whole forward of the model,
                with an `UnsupportedModel` out of that call where they differ; None, the short check alone

    One thread uses a cache at a time, and another is refused with `CacheBusy`; the model may be used by
    others meanwhile, and have several caches. K and V go back to the pool once, at the end of a call;
    what does not fit, or fills no block, is not kept. The last new token of a call has no KV yet.

    Two rows with the same tokens and `Scope` share; the model's fingerprint is part of the key.
    So are adapters (PEFT) that take part, changed weights, buffers and settings, and autocast: each state
    of the model finds what it has computed itself. `docs/identity.md` says what cannot be noticed.

    Raises `ConfigError` for settings that cannot work and `UnsupportedModel` for a model whose
    KV is not a function of the tokens before it; the message names the check, the distance and its limit.
    """

    @in_turn
    def generate(
        self,
        input_ids: Any = None,
        *,
        attention_mask: Any = None,
        media: Named | None = None,
        scope: Scope | None = None,
        priority: int = 0,
        retain_s: float | None = None,
        store_until: int | None = None,
        hint: Hint = NO_HINT,
        **arguments: Any,
    ) -> Any:
        """`model.generate(input_ids, ...)`, computing only what is not cached.

        input_ids, attention_mask: `[rows, tokens]`, left-padded: tensors, arrays or lists, one flat list
        for one row; or what a tokenizer or processor returns, as the one `input_ids`:
        `cache.generate(tokenizer(text, return_tensors="pt"))`. All other `arguments` are
        generate's own: sampling, beams, return sequences, assisted decoding, streamers, stopping
        criteria, and what the processor of a model with images or audio returns. Returns what
        generate returns. With `return_dict_in_generate`, attentions and
        hidden states of the first step cover the computed suffix only.

        media: the prompt's images, videos and audio by name, where hashing them takes too long:
        `quire.MediaItem` in the order of the prompt, a list of lists for several rows. A digest must
        name the processed content and its grid. By default it is SHA-256 of both.
        scope: who may share this prefix; priority, retain_s: how long it is worth keeping; store_until:
        how many of each row's tokens, padding not counted, are kept at most: 0 keeps nothing, the prompt's
        length no answer.
        hint: a `quire.Hint`, what you foresee of its reuse; see `end_session`.

        What is kept: each returned sequence, as far as a row of the cache holds its KV. A beam
        that finished early may have lost its row; then its prompt and the part it shares with a
        row that is left are kept.

        Raises `TokensError`, `MediaError`, `ConfigError` and `ScopeError` before anything is changed; whatever
        generate raises leaves the cache usable and keeps nothing of this call, but for states of the
        prompt (recurrent layers), which are kept on the way.
        """
        started = self._clock()
        prompts = self._prompts(input_ids, attention_mask, arguments)
        found = self._media.read(prompts, arguments, media)
        plan = read_plan(self.model, self._signatures, prompts, arguments)
        self._check_expandable(prompts, found, plan)
        if self._first is not None:
            self._first.admit(found)
        terms = Terms(self._weights.scope(scope), priority, retain_s, store_until, hint)
        request = Request(self._store, prompts, found, terms)
        try:
            making = self._making.for_call(plan.room, plan.eos)
            if plan.assisted and ("position_ids" not in self._signatures.forward or found.items):
                past = request.start_empty(making)  # its loop feeds the whole prompt, unseen
            else:
                past = request.start(making, self._feed(plan.chunk))
            if plan.expand > 1:
                self._prefill(prompts, found, past, plan.chunk, prompts.ids.shape[1] - 1)
                past.batch_repeat_interleave(plan.expand)
            check = self._comparing(request, found, terms)
            is_same = self._is_same_model(terms.scope, by_itself=True) if plan.calls_back else None
            with self._recorder(past, found, check, is_same) as recorder:
                output = self._watched.model.generate(
                    prompts.ids,
                    attention_mask=prompts.full_mask(),
                    past_key_values=past,
                    **found.arguments(past.get_seq_length()),
                    **arguments,
                    **plan.extra,
                )
            unchanged = self._weights.is_unchanged(terms.scope, by_itself=True)
            stored = request.keep(past, returned(prompts, plan, past, output)) if unchanged else 0
            self._report(request, stored, started, recorder)
        finally:
            self._close(request)
        return output

    @contextmanager
    def session(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        media: Named = (),
        scope: Scope | None = None,
        priority: int = 0,
        retain_s: float | None = None,
        store_until: int | None = None,
        hint: Hint = NO_HINT,
    ) -> Generator[WorkingCache, None, None]:
        """Lend a cache to pass to the model yourself, with the head of `input_ids` in it.

            with cache.session(input_ids) as past:
                output = model.generate(input_ids, past_key_values=past, max_new_tokens=50)

        `past.get_seq_length()` tokens need no compute; a loop of your own feeds the rest:
        `model(input_ids[:, past.get_seq_length():], past_key_values=past, use_cache=True)`.
        The prompt may be given in any form that `generate` takes. For beams or return sequences, call
        `past.batch_repeat_interleave(n)` first.

        At the end of the block, whatever the model has computed into `past` is kept, also when the block
        raises: the tokens are recorded as the model is fed, by its `forward`, which is a wrapper of quire's
        until then. A forward that did not finish counts for nothing. Nothing is kept if
        weights or adapters changed meanwhile. What is computed under another mask than that of the
        padding, other positions than those of the tokens, or with arguments that may change K and V, is not
        kept, nor what follows it: `last.unknown_tokens` counts it. Positions that you leave out are those of
        the tokens. Gradients do not flow through `past`.

        For a prompt with images or audio, `media` names all of them (a list per row, for several
        rows), and you feed the content of those behind `past.get_seq_length()`. What follows a
        placeholder that it does not name is not kept. Models whose positions depend on media
        (M-RoPE) keep an offset of their own between calls: they are refused; use `generate`.
        """
        with self._turn:
            started = self._clock()
            if self._media.positions_depend:
                raise ConfigError(
                    f"{type(self.model).__name__} keeps the positions of its last call, so that a cache "
                    "alone does not tell how to go on; use cache.generate(...)"
                )
            prompts = self._prompts(input_ids, attention_mask, others := {})
            if others:
                raise ConfigError(
                    f"{', '.join(others)}: a session takes ids, their mask and the names of media; feed "
                    "the rest to the model yourself"
                )
            declared = self._media.declared(prompts, media or [()] * len(prompts.tokens))
            if self._first is not None:
                self._first.admit(declared, is_session=True)
            terms = Terms(self._weights.scope(scope), priority, retain_s, store_until, hint)
            request = Request(self._store, prompts, declared, terms)
            try:
                past = request.start(self._making, self._feed(None))
                self._store.transfers.join()
                check = self._comparing(request, declared, terms)
                recorder = self._recorder(past, declared, check, self._is_same_model(terms.scope))
                try:
                    with recorder, self._watched.lending(), self._turn.lending():
                        yield past
                finally:
                    refused = self._first is not None and self._first.refusal is not None
                    unchanged = not refused and self._weights.is_unchanged(terms.scope)
                    stored = request.keep(past, recorded(past)) if unchanged else 0
                    self._report(request, stored, started, recorder)
            finally:
                self._close(request)

    @in_turn
    def explain(
        self,
        input_ids: Any,
        scope: Scope | None = None,
        *,
        attention_mask: Any = None,
        media: Named = (),
        **content: Any,
    ) -> Explanation:
        """Return what is cached of a prompt `[1, tokens]` or `[tokens]`, what is not, and why.

        Media are given as to `generate`: what the processor returned, or `media` by name.
        """
        prompts = self._prompts(input_ids, attention_mask, content)
        if len(prompts.tokens) > 1:
            raise TokensError(f"{len(prompts.tokens)} rows; explain takes one prompt at a time")
        found = (
            self._media.read(prompts, content, media or None)
            if content
            else self._media.declared(prompts, media)
        )
        if content:
            raise ConfigError(f"{', '.join(content)}: no media that this model takes")
        bound, tokens = self._weights.scope(scope), prompts.tokens[0]
        explained = self.manager.explain(tokens, bound, found.spans[0])
        if self._store.tiers is not None:
            held = self._store.tiers.held(tokens, bound, found.spans[0])
            explained = msgspec.structs.replace(explained, in_tiers=list(held.items()))
        return explained

    @in_turn
    def prefetch(
        self,
        input_ids: Any,
        scope: Scope | None = None,
        *,
        attention_mask: Any = None,
        media: Named | None = None,
        **content: Any,
    ) -> "list[Prefetch]":
        """Begin to bring what a prompt will need from slower tiers into the fastest one; returns at once.

        One `Prefetch` for each row of which something is there. Its `finish`, when the row's turn has come, ends
        it, at once or after `wait_s`, and says how much has come.
        """
        prompts = self._prompts(input_ids, attention_mask, content)
        found = self._media.read(prompts, content, media)
        bound, below = self._weights.scope(scope), self._store.tiers
        if below is None:
            return []
        begun = (
            below.prefetch(tokens, bound, spans)
            for tokens, spans in zip(prompts.tokens, found.spans, strict=True)
        )
        return [each for each in begun if each is not None]

    def _prompts(
        self, input_ids: object, attention_mask: object, others: dict[str, Any]
    ) -> Prompts:
        prompts = read_prompts(self.model, input_ids, attention_mask, others)
        columns, below = prompts.ids.shape[1], self._making.padded_below
        if below is not None and prompts.pads.any() and columns >= below:
            raise ConfigError(
                f"{type(self.model).__name__} computes rows behind padding differently from column "
                f"{below} on, and the prompts have {columns} columns; give rows of one length, or "
                "one row at a time"
            )
        return prompts

    def _is_same_model(self, bound: Scope, *, by_itself: bool = False) -> Callable[[], bool]:
        """Return what tells whether the model is the one that a scope was bound to."""
        return lambda: self._weights.is_unchanged(bound, by_itself=by_itself)

    def _recorder(
        self,
        past: WorkingCache,
        media: Media,
        check: Check | None = None,
        is_same_model: Callable[[], bool] | None = None,
    ) -> Recorder:
        # A forward that waits for what comes from tiers does not tell what computing takes.
        below = self._store.tiers if self._store.transfers.is_idle else None
        return Recorder(
            self._watched,
            past,
            self._clock,
            media=media,
            learn=below.cost.observe if below is not None else None,
            check=check,
            is_same_model=is_same_model,
        )

    def _comparing(self, request: Request, media: Media, terms: Terms) -> Check | None:
        if self._first is None or not request.num_reused:
            return None
        return self._first.check(request.prompts, media, terms.scope.lora)

    def _close(self, request: Request) -> None:
        request.close()
        if self._first is not None and self._first.refusal is not None:
            self.manager.clear()

    def _check_expandable(self, prompts: Prompts, media: Media, plan: Plan) -> None:
        last = prompts.ids.shape[1] - 1
        if plan.expand > 1 and media.cut(last) != last:
            raise ConfigError(
                "the prompt ends in an image, video or audio, which cannot be fed to beams or "
                "return sequences; let a token of text follow it"
            )

    def _feed(self, chunk: int | None) -> Feed:
        """Return a function that computes a prompt of one row, without media, up to a length."""

        def feed(prompt: Prompts, past: WorkingCache, num_tokens: int) -> None:
            media = self._media.declared(prompt, [()])
            self._prefill(prompt, media, past, chunk, num_tokens)

        return feed

    def _prefill(
        self, prompts: Prompts, media: Media, past: WorkingCache, chunk: int | None, stop: int
    ) -> None:
        with self._recorder(past, media):
            prefill(
                self._watched.model, self._signatures, prompts, media, past, stop=stop, chunk=chunk
            )

    def _report(self, request: Request, stored: int, started: float, recorder: Recorder) -> None:
        first = recorder.first_token_at
        self.last = CallReport(
            prompt_tokens=request.prompts.num_tokens,
            cached_tokens=request.num_reused,
            stored_tokens=stored,
            ttft_s=None if first is None else first - started,
            tier_tokens=_sum(each.tokens for each in request.onboarded),
            tier_misses=_sum(each.causes for each in request.onboarded),
            unknown_tokens=recorder.ledger.num_unknown,
            unknown_reason=recorder.ledger.reason,
        )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total = Counter[str]()
    for each in counts:
        total.update(each)
    return dict(total)

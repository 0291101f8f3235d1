"""Prefix reuse for Hugging Face models."""

import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, Unpack

import msgspec

from quire import ops
from quire.core import CacheManager, Scope, Stats
from quire.core.terms import RequestTerms
from quire.engines.hf.inputs import read_plan, taken_segments, taken_terms
from quire.engines.hf.media import Named
from quire.engines.hf.memory import GroupMemory, used_words
from quire.engines.hf.model_calls import NO_REPORT, Calls
from quire.engines.hf.request import brought_home, recorded, returned
from quire.engines.hf.storage import Capacity, KeptBlocks, Settings, check_settings
from quire.engines.hf.verify import FirstCalls
from quire.engines.models.battery import check_kind
from quire.engines.models.cache_factory import CacheFactory
from quire.engines.models.inventory import Inventory
from quire.engines.models.probe import probe_model
from quire.engines.models.supported import ModelFace, checked_model
from quire.engines.models.working_cache import WorkingCache
from quire.engines.purging import PurgeableCache
from quire.engines.thread_guard import ThreadGuard, guarded
from quire.ops import Explanation, Pin

if TYPE_CHECKING:
    from quire.engines.tiered.saved import Loaded
    from quire.tiers.stack.prefetch import Prefetch


class PrefixCache(PurgeableCache, ModelFace):
    """The KV cache of a model with prefix reuse across calls of `generate`.

        cache = PrefixCache(model, "2GiB")
        output = cache.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=50)

    `generate` returns what `model.generate` returns. Logits differ by rounding, since a suffix is
    computed in other matrix shapes than a whole prompt (1e-6 in float32, more in half precision);
    greedy tokens are equal unless two logits are closer than that.

    model       a decoder of transformers, or a `PeftModel` around one, in eval mode, on one device; its layers may
                be full, sliding-window, chunked, recurrent beside attention (linear attention, Mamba-2, convolutions), or mixed
    capacity    bytes for K, V and states: "2GiB", "512MB", or an integer; or blocks per layer
                group by name
    block_size  tokens per block; reuse ends inside a block where prompts part
    and, by name:
    policy      what to evict: as `CacheManager` takes it: a name, or what makes policies
    dtype       what the pool stores; None stores K and V as computed. A smaller one saves
                memory and gives up equality
    expected_tokens    length of a cached sequence, by which layer groups share the capacity
    snapshot_interval  tokens between windows and states that are kept on the way, besides those
                at ends and branch points; None: every four windows, and no states
    debug       fresh memory is NaN and the manager checks itself: for tests
    clock, watchers    seconds, rising; told of requests and blocks, for instance `[quire.Recorder(...)]`
    tiers       where KV goes that outlives the pool, fastest first: `[Host("8GiB"), Disk(path, "200GiB")]`, or
                lines as `quire.tiers.opening` reads them, or a `TierStack`. Reading is verified; a tier
                that fails is a miss. With tiers, `close` the cache or use it in a `with` block
    tier_dtype  store K and V in tiers as "fp8", "int8" or "int4", giving up equality; None: as in the pool
    verify      what is tried before K and V are reused: "probe", a short check of the model and requests
                to a tiny twin of its config; "first", besides, the first reused call of each shape
                (rows, padding, windows, beams, media, adapter) against a whole forward of the model,
                with an `UnsupportedModel` out of that call where they differ; None, the short check alone
    passages    reuse K and V of passages at any position where a call gives `segments`, approximately:
                `quire_passages.Passages("1GiB")`; the attribute `passages` keeps them. None: never
    wait_s      seconds that a call waits while another thread uses the cache, in the order of calls, before
                `CacheBusy`. None: not at all

    One thread uses a cache at a time, and another is refused with `CacheBusy`, after `wait_s`; the model may be
    used by others meanwhile, and have several caches. K and V go back to the pool once, at the end of a call;
    what does not fit, or fills no block, is not kept. The last new token of a call has no KV yet.

    Two rows with the same tokens and `Scope` share; the model's fingerprint is part of the key.
    So are adapters (PEFT) that take part, changed weights, buffers and settings, and autocast: each state
    of the model finds what it has computed itself. `docs/identity.md` says what cannot be noticed.

    Raises `ConfigError` for settings that cannot work and `UnsupportedModel` for a model whose
    KV is not a function of the tokens before it; the message names the check, the distance and its limit.
    """

    def __init__(
        self,
        model: Any,
        capacity: Capacity = "1GiB",
        block_size: int = 16,
        **settings: Unpack[Settings],
    ) -> None:
        self._given, model = model, checked_model(model, "PrefixCache")
        check_settings(capacity, settings)
        self._model = model
        self._guard = ThreadGuard(wait_s=settings.get("wait_s"))
        verify, before = settings.get("verify", "probe"), Inventory(model)
        kinds, computed = probe_model(model, block_size)
        twin = verify != "first"
        below = None if verify is None else check_kind(model, PrefixCache, needs_twin=twin)
        computed = computed.with_interval(settings.get("snapshot_interval"))
        self.kept = KeptBlocks(model, computed, capacity, settings, before, given=self._given)
        debug = settings.get("debug", False)
        factory = CacheFactory(kinds, computed, model.device, debug_nan=debug, padded_below=below)
        first = FirstCalls(model, kinds) if verify == "first" else None
        self._calls = Calls(model, self.kept, factory, first, settings.get("clock", time.monotonic))
        self.layout, self.tiers = self.kept.layout, self.kept.tiers
        self.last = NO_REPORT
        own = settings.get("passages")
        self.passages = None if own is None else own.in_cache(self.kept, kinds, self._guard)

    @guarded
    def generate(
        self,
        input_ids: Any = None,
        *,
        attention_mask: Any = None,
        media: Named | None = None,
        scope: Scope | None = None,
        **arguments: Any,
    ) -> Any:
        """`model.generate(input_ids, ...)`, which computes only uncached tokens.

        input_ids, attention_mask: `[rows, tokens]`, left-padded: tensors, arrays or lists, one flat list
        for one row; or what a tokenizer or processor returns, as the one `input_ids`. All other
        `arguments` are generate's own, what the processor of images or audio returns among them. With
        `return_dict_in_generate`, attentions and hidden states of the first step cover the computed
        suffix only.

        media: the prompt's images, videos and audio by name, where hashing them takes too long:
        `quire.MediaItem` in the order of the prompt, a list of lists for several rows. A digest must
        name the processed content and its grid. By default it is SHA-256 of both.
        scope: who may share this prefix.
        segments: in place of ids, `[head, passage, ..., question]`, ids each, for one row (`docs/passages.md`); the
        answer is approximate where `last.passages` says so. selector: which rows are computed again.
        By name: priority, retain_s: how long it is worth keeping; store_until: how many of each row's
        tokens, padding not counted, are kept at most: 0 keeps nothing, the prompt's length no answer;
        hint: a `quire.Hint`, what you foresee of its reuse; see `end_session`.

        What is kept: each returned sequence, as far as a row of the cache holds its KV. A beam
        that finished early may have lost its row; then its prompt and the part it shares with a
        row that is left are kept.

        Raises `TokensError`, `MediaError`, `ConfigError` and `ScopeError` before anything is changed; whatever
        generate raises leaves the cache usable and keeps nothing of this call, but for states of the
        prompt (recurrent layers), which are kept on the way.
        """
        self._follow_settings()
        calls, started = self._calls, self._calls.clock()
        terms, asked = taken_terms(arguments), taken_segments(self.passages, arguments)
        if asked is not None:
            input_ids, attention_mask = asked.prompt(input_ids, attention_mask, media)
        prompts = calls.prompts(input_ids, attention_mask, arguments)
        found = calls.media.read(prompts, arguments, media)
        plan = read_plan(self._model, calls.signatures, prompts, arguments)
        last = prompts.ids.shape[1] - 1
        calls.check_fed(found, last, plan)
        if calls.first is not None:
            calls.first.admit(found)
        with calls.opened(prompts, found, scope, terms) as request:
            factory = calls.factory.for_call(plan.room, plan.eos)
            if plan.assisted and ("position_ids" not in calls.signatures.forward or found.items):
                past = request.start_empty(factory)  # its loop feeds the whole prompt, unseen
            else:
                past = request.start(factory, calls.feed(plan.chunk))
            if asked is not None:
                asked.fill(calls, request, past, plan)
            if plan.expand > 1:
                calls.prefill(prompts, found, past, last, plan.chunk)
                past.batch_repeat_interleave(plan.expand)
            is_same = calls.is_same_model(request, by_itself=True) if plan.calls_back else None
            with calls.recorder(request, past, is_same) as recorder:
                output = calls.watched.model.generate(
                    prompts.ids,
                    attention_mask=prompts.full_mask(),
                    past_key_values=past,
                    **found.arguments(past.get_seq_length()),
                    **arguments,
                    **plan.extra,
                )
            texts = returned(prompts, plan, past, output)
            self.last = calls.end(request, recorder, texts, started, is_same or request.has_stayed)
            if asked is not None:
                self.last = asked.ended(request, recorder.cache, self.last, output)
        return brought_home(prompts, output)

    @contextmanager
    def session(
        self,
        input_ids: Any,
        *,
        attention_mask: Any = None,
        media: Named = (),
        scope: Scope | None = None,
        **terms: Unpack[RequestTerms],
    ) -> Generator[WorkingCache, None, None]:
        """Lend a cache to pass to the model yourself, with the head of `input_ids` in it.

            with cache.session(input_ids) as past:
                output = model.generate(input_ids, past_key_values=past, max_new_tokens=50)

        `past.get_seq_length()` tokens need no compute; a loop of your own feeds the rest:
        `model(input_ids[:, past.get_seq_length():], past_key_values=past, use_cache=True)`.
        Prompt and terms are given as to `generate`. For beams or return sequences, call
        `past.batch_repeat_interleave(n)` first. Gradients do not flow through `past`.

        At the end of the block, whatever the model has computed into `past` is kept, also when the block
        raises: the tokens are recorded as the model is fed, by its `forward`, which is a wrapper of quire's
        until then. A forward that did not finish counts for nothing. Nothing is kept if weights or
        adapters changed meanwhile. What is computed under another mask than that of the padding, other
        positions than those of the tokens (or left out), or with arguments that may change K and V, is
        not kept, nor what follows it: `last.unknown_tokens` counts it.

        For a prompt with images or audio, `media` names all of them (a list per row, for several
        rows), and you feed the content of those behind `past.get_seq_length()`. What follows a
        placeholder that it does not name is not kept. Models whose positions depend on media
        (M-RoPE) keep an offset of their own between calls: they are refused; use `generate`.
        """
        with self._guard:
            calls, started = self._calls, self._calls.clock()
            prompts, declared = calls.for_session(input_ids, attention_mask, media)
            with calls.opened(prompts, declared, scope, terms) as request:
                past = request.start(calls.factory, calls.feed(None))
                self.kept.store.transfers.join()
                is_same = calls.is_same_model(request)
                recorder = calls.recorder(request, past, is_same)
                try:
                    with recorder, calls.watched.lending(), self._guard.lending():
                        yield past
                finally:
                    self.last = calls.end(request, recorder, recorded(past), started, is_same)

    @guarded
    def explain(
        self,
        input_ids: Any,
        scope: Scope | None = None,
        *,
        attention_mask: Any = None,
        media: Named = (),
        **content: Any,
    ) -> Explanation:
        """Return the cached and uncached segments of a prompt `[1, tokens]` or `[tokens]`, with reasons.

        Media are given as to `generate`: what the processor returned, or `media` by name.
        """
        tokens, spans = self._calls.one("explain", input_ids, attention_mask, media, content)
        asked = tokens, self.kept.identity.scope(scope), spans
        explained, below = ops.explain(self.manager, *asked), self.kept.store.tiers
        in_tiers = [] if below is None else list(below.held(*asked).items())
        return msgspec.structs.replace(explained, in_tiers=in_tiers)

    @guarded
    def pin(
        self,
        input_ids: Any,
        scope: Scope | None = None,
        *,
        ttl_s: float | None = None,
        attention_mask: Any = None,
        media: Named = (),
        **content: Any,
    ) -> Pin:
        """Keep the cached blocks of a prompt until the pin is closed or `ttl_s` is over.

        The prompt is as in `explain`. The pin's `num_tokens` are kept; `num_missing` are not cached, or fill no
        block. Close it in the thread that has the cache. Raises `PinBudgetExceeded`.
        """
        tokens, spans = self._calls.one("pin", input_ids, attention_mask, media, content)
        bound = self.kept.identity.scope(scope)
        return ops.pin(self.manager, tokens, bound, media=spans, ttl_s=ttl_s)

    @guarded
    def prefetch(
        self,
        input_ids: Any,
        scope: Scope | None = None,
        *,
        attention_mask: Any = None,
        media: Named | None = None,
        **content: Any,
    ) -> "list[Prefetch]":
        """Start to copy a prompt's records from slower tiers into the fastest one; returns at once.

        One `Prefetch` for each row of which something is there. Its `finish`, when the row's turn has come, ends
        it, at once or after `wait_s`, and says how much has come.
        """
        prompts = self._calls.prompts(input_ids, attention_mask, content)
        found = self._calls.media.read(prompts, content, media)
        bound, below = self.kept.identity.scope(scope), self.kept.store.tiers
        if below is None:
            return []
        begun = (
            below.prefetch(tokens, bound, spans)
            for tokens, spans in zip(prompts.tokens, found.spans, strict=True)
        )
        return [each for each in begun if each is not None]

    @property
    def manager(self) -> CacheManager:
        """The manager of all blocks; in a thread whose turn it is not, only to look at counters."""
        with self._guard.if_free() as is_ours:
            if is_ours:
                self.kept.store.settle()
        return self.kept.manager

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the model when this cache was made or cleared, without adapters.

        Over its settings, its layout and its weights (a sample; with tiers, all).
        """
        return self.kept.identity.fingerprint

    @property
    def stats(self) -> Stats:
        """Counters of the manager: hit rate, misses by reason, evictions."""
        return self.manager.stats

    @guarded
    def end_session(self, session_id: str, scope: Scope | None = None) -> int:
        """End the session of `Hint(session_id=...)` in a scope, under the adapters that are active now.

        Its blocks go first. Returns how many that only this session has used are in the cache.
        """
        return self.manager.end_session(session_id, self.kept.identity.scope(scope))

    @guarded
    def clear(self) -> int:
        """Drop all cached blocks and return their number; tiers keep their records.

        After `Interrupted` this starts the cache anew: counters start again, and 0 is returned.
        """
        if self.passages is not None:
            self.passages.clear()
        return self.kept.clear()

    @guarded
    def save(self, path: str | os.PathLike[str]) -> int:
        """Write all that is cached into a directory, for `load`; return how many records that were.

        It holds the prompts, and the salts of their scopes, beside K and V. A cache that was saved
        there before is replaced. Raises `ConfigError` for a directory of anything else, `TierError`
        where it cannot be written.
        """
        return self.kept.save(path)

    @guarded
    def load(self, path: str | os.PathLike[str]) -> "Loaded":
        """Load a saved cache as far as there is room, the most recently used blocks first.

        Raises `ConfigError` for what is no saved cache, or one of another model or layout. Damaged
        records are left out, with what follows them.
        """
        return self.kept.load(path)

    @guarded
    def close(self) -> None:
        """Write the blocks that are due (all cached ones with write-back) to the tiers; leave the tiers."""
        self.kept.close()
        if self.passages is not None:
            self.passages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def memory(self) -> list[GroupMemory]:
        """Return the memory of each layer group: blocks, their states and bytes."""
        return self.kept.memory()

    @guarded
    def snapshot(self) -> dict[str, Any]:
        """Return the manager's state and the memory of each group as plain data, for `quire inspect`."""
        return ops.snapshot(self.manager) | {"memory": [asdict(group) for group in self.memory()]}

    def __repr__(self) -> str:
        used = used_words(self.memory(), self.layout.block_size, self.kept.num_bytes)
        below = "" if self.tiers is None else f", tiers {' > '.join(self.tiers.names)}"
        return (
            f"PrefixCache({type(self._model).__name__}, {used}, "
            f"hit rate {self.stats.hit_rate:.1%}{below})"
        )

"""Prefix reuse for Hugging Face models."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, cast

import torch

from quire.config import format_bytes, parse_bytes
from quire.core import CacheManager, Explanation, Hint, Observer, Scope, Stats, TokenRange
from quire.core.budget import EXPECTED_TOKENS
from quire.core.hints import NO_HINT
from quire.engines.hf.fingerprint import Weights
from quire.engines.hf.inputs import (
    Plan,
    Prompts,
    Signatures,
    inferred_pad_id,
    read_plan,
    read_prompts,
)
from quire.engines.hf.making import Making
from quire.engines.hf.media import Media, MediaReader, Named
from quire.engines.hf.memory import Balance, GroupMemory, group_memory, named_groups, split_layout
from quire.engines.hf.prefill import prefill
from quire.engines.hf.probe import probe_model
from quire.engines.hf.recorder import Recorder
from quire.engines.hf.report import NO_REPORT, CallReport
from quire.engines.hf.request import Feed, Request
from quire.engines.hf.store import BlockStore, Terms
from quire.engines.hf.texts import recorded, returned
from quire.engines.hf.working import WorkingCache
from quire.errors import ConfigError, OutOfBlocks, ScopeError, TokensError
from quire.tensors.pool import make_pool


class PrefixCache:
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

    One thread uses a cache at a time. K and V go back to the pool once, at the end of a call;
    what does not fit, or fills no block, is not kept. The last new token of a call has no KV yet.

    Two rows with the same tokens and `Scope` share; the model's fingerprint is part of the key.
    Adapters (PEFT) are too, by name and content, whenever they are switched. Any other change of
    the weights is refused until it is named in `Scope(lora=...)`, or `clear()` starts anew.

    Raises `ConfigError` for settings that cannot work and `UnsupportedModel` for a model whose
    KV is not a function of the tokens before it; the message names the layers and the reason.
    """

    def __init__(
        self,
        model: Any,
        capacity: str | int | Mapping[str, int] = "1GiB",
        block_size: int = 16,
        *,
        policy: Any = "lru",
        dtype: torch.dtype | None = None,
        expected_tokens: int = EXPECTED_TOKENS,
        snapshot_interval: int | None = None,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
        observer: Observer | None = None,
    ) -> None:
        capacity_bytes = None if isinstance(capacity, Mapping) else parse_bytes(capacity)
        kinds, computed = probe_model(model, block_size)
        computed = computed.with_interval(snapshot_interval)
        self.layout = computed.stored_as(dtype)
        groups = (
            named_groups(self.layout, cast("Mapping[str, int]", capacity))
            if capacity_bytes is None
            else split_layout(self.layout, capacity_bytes, expected_tokens)
        )
        self.model = model
        self.pools = [
            make_pool(group.memory, num.num_blocks, model.device, debug_nan=debug)
            for group, num in zip(self.layout.groups, groups, strict=True)
        ]
        self.manager = CacheManager(
            groups=groups,
            block_size=block_size,
            policy=policy,
            debug=debug,
            clock=clock,
            observer=observer,
            curve=True,
        )
        self._weights = Weights(model, self.layout)
        self.last = NO_REPORT
        self._clock = clock
        self._store = BlockStore(self.manager, self.pools, self.layout)
        self._balance = Balance(self.manager, self.layout)
        self._making = Making(kinds, computed, model.device, debug_nan=debug)
        self._signatures = Signatures.of(model)
        self._media = MediaReader(model)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of what binds K and V to the model: config, layout, a sample of weights."""
        return self._weights.fingerprint

    @property
    def stats(self) -> Stats:
        """Counters of the manager: hit rate, misses by reason, evictions."""
        return self.manager.stats

    def generate(
        self,
        input_ids: torch.Tensor | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        media: Named | None = None,
        scope: Scope | None = None,
        priority: int = 0,
        retain_s: float | None = None,
        ranges: Sequence[TokenRange] = (),
        hint: Hint = NO_HINT,
        **arguments: Any,
    ) -> Any:
        """`model.generate(input_ids, ...)`, computing only what is not cached.

        input_ids, attention_mask: `[rows, tokens]`, left-padded. All other `arguments` are
        generate's own: sampling, beams, return sequences, assisted decoding, streamers, stopping
        criteria, and what the processor of a model with images or audio returns. Returns what
        generate returns. With `return_dict_in_generate`, attentions and
        hidden states of the first step cover the computed suffix only.

        media: the prompt's images, videos and audio by name, where hashing them takes too long:
        `quire.MediaItem` in the order of the prompt, a list of lists for several rows. A digest must
        name the processed content and its grid. By default it is SHA-256 of both.
        scope: who may share this prefix; priority, retain_s: how long it is worth keeping; ranges:
        `quire.TokenRange`s of each row's tokens that are kept on other terms, or not at all:
        TokenRange(0, store=False) keeps nothing, TokenRange(prompt_len, store=False) no answer.
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
        terms = Terms(self._scope(scope), priority, retain_s, tuple(ranges), hint)
        request = Request(self._store, prompts, found, terms)
        try:
            making = self._making.for_call(plan.room, plan.eos)
            if plan.assisted and ("position_ids" not in self._signatures.forward or found.items):
                past = request.start_empty(making)  # its loop feeds the whole prompt, unseen
            else:
                past = request.start(making, self._feed(plan.chunk))
            if plan.expand > 1:
                self._prefill(prompts, found, past, plan.chunk)
                past.batch_repeat_interleave(plan.expand)
            with self._recorder(past, found) as recorder:
                output = self.model.generate(
                    prompts.ids,
                    attention_mask=prompts.full_mask(),
                    past_key_values=past,
                    **found.arguments(past.get_seq_length()),
                    **arguments,
                    **plan.extra,
                )
            stored = request.keep(past, returned(prompts, plan, past, output))
            self._report(request, stored, started, recorder)
        finally:
            request.close()
        return output

    @contextmanager
    def session(
        self,
        input_ids: torch.Tensor,
        *,
        attention_mask: torch.Tensor | None = None,
        media: Named = (),
        scope: Scope | None = None,
        priority: int = 0,
        retain_s: float | None = None,
        ranges: Sequence[TokenRange] = (),
        hint: Hint = NO_HINT,
    ) -> Generator[WorkingCache, None, None]:
        """Lend a cache to pass to the model yourself, with the head of `input_ids` in it.

            with cache.session(input_ids) as past:
                output = model.generate(input_ids, past_key_values=past, max_new_tokens=50)

        `past.get_seq_length()` tokens need no compute; a loop of your own feeds the rest:
        `model(input_ids[:, past.get_seq_length():], past_key_values=past, use_cache=True)`.
        For beams or return sequences, call `past.batch_repeat_interleave(n)` first.

        At the end of the block, whatever the model has computed into `past` is kept, also when
        the block raises: the tokens are recorded as the model is fed, and a forward that did not
        finish counts for nothing. Nothing is kept if weights or adapters changed meanwhile. Gradients do not flow through `past`.

        For a prompt with images or audio, `media` names all of them (a list per row, for several
        rows), and you feed the content of those behind `past.get_seq_length()`. What follows a
        placeholder that it does not name is not kept. Models whose positions depend on media
        (M-RoPE) keep an offset of their own between calls: they are refused; use `generate`.
        """
        started = self._clock()
        if self._media.positions_depend:
            raise ConfigError(
                f"{type(self.model).__name__} keeps the positions of its last call, so that a cache "
                "alone does not tell how to go on; use cache.generate(...)"
            )
        prompts = self._prompts(input_ids, attention_mask, {})
        declared = self._media.declared(prompts, media or [()] * len(prompts.tokens))
        terms = Terms(self._scope(scope), priority, retain_s, tuple(ranges), hint)
        request = Request(self._store, prompts, declared, terms)
        state = self._weights.state()
        try:
            past = request.start(self._making, self._feed(None))
            recorder = self._recorder(past, declared)
            try:
                with recorder:
                    yield past
            finally:
                unchanged = self._weights.state() == state
                stored = request.keep(past, recorded(past)) if unchanged else 0
                self._report(request, stored, started, recorder)
        finally:
            request.close()

    def explain(
        self,
        input_ids: Any,
        scope: Scope | None = None,
        *,
        attention_mask: torch.Tensor | None = None,
        media: Named = (),
        **content: Any,
    ) -> Explanation:
        """Return what is cached of a prompt `[1, tokens]` or `[tokens]`, what is not, and why.

        Media are given as to `generate`: what the processor returned, or `media` by name.
        """
        ids = torch.as_tensor(input_ids)
        prompts = self._prompts(ids[None] if ids.ndim == 1 else ids, attention_mask, {})
        if len(prompts.tokens) > 1:
            raise TokensError(f"{len(prompts.tokens)} rows; explain takes one prompt at a time")
        found = (
            self._media.read(prompts, content, media or None)
            if content
            else self._media.declared(prompts, media)
        )
        if content:
            raise ConfigError(f"{', '.join(content)}: no media that this model takes")
        return self.manager.explain(prompts.tokens[0], self._scope(scope), found.spans[0])

    def end_session(self, session_id: str) -> int:
        """Say that a session named by `Hint(session_id=...)` has ended: its blocks go first.

        Returns how many blocks that only this session has used are in the cache.
        """
        return self.manager.end_session(session_id)

    def clear(self) -> int:
        """Drop all that is cached, accept changed weights, and return how many blocks that were."""
        dropped = self.manager.clear()
        self._weights.renew()
        return dropped

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.num_bytes for pool in self.pools)

    def memory(self) -> list[GroupMemory]:
        """Return what each layer group has of the memory: blocks, their states and bytes."""
        return group_memory(self.layout, self.manager)

    def snapshot(self) -> dict[str, Any]:
        """Return the manager's state and the memory of each group as plain data, for `quire inspect`."""
        return self.manager.snapshot() | {"memory": [asdict(group) for group in self.memory()]}

    def rebalance(self) -> bool:
        """Move memory from layer groups with room to spare to those that lacked it; whether any was.

        Counts what each group was refused, and what prompts missed for want of it, since the last
        call; up to an eighth of a group moves at a time. Costs a copy of the pools that change:
        call it now and then, not in every turn. A model with one group has nothing to move.
        """
        refused = self._store.lacked
        self._store.lacked = [0] * len(refused)
        wanted = self._balance.counts(refused)
        changed = {
            group.name: wanted[group.name]
            for group in self.memory()
            if group.num_blocks != wanted[group.name]
        }
        try:
            self._store.resize(changed)
        except OutOfBlocks:
            return False  # sessions that are open hold what would have moved
        return bool(changed)

    def __repr__(self) -> str:
        groups = self.memory()
        used = sum((group.active + group.cached) * group.bytes_per_block for group in groups)
        named = [f"{group.name} " if len(groups) > 1 else "" for group in groups]
        blocks = ", ".join(
            f"{name}{group.active + group.cached} of {group.num_blocks}"
            for name, group in zip(named, groups, strict=True)
        )
        return (
            f"PrefixCache({type(self.model).__name__}, {blocks} blocks of "
            f"{self.layout.block_size} tokens used ({format_bytes(used)} of "
            f"{format_bytes(self.num_bytes)}), {sum(group.active for group in groups)} active, "
            f"{sum(group.cached for group in groups)} cached, hit rate {self.stats.hit_rate:.1%})"
        )

    def _prompts(
        self, input_ids: object, attention_mask: object, arguments: dict[str, Any]
    ) -> Prompts:
        if self.model.training:
            raise ConfigError(
                "the model is in training mode, where dropout changes K and V; call model.eval()"
            )
        return read_prompts(
            arguments.pop("inputs", None) if input_ids is None else input_ids,
            attention_mask,
            self.model.get_input_embeddings().num_embeddings,
            inferred_pad_id(self.model, arguments),
        )

    def _recorder(self, past: WorkingCache, media: Media) -> Recorder:
        return Recorder(self.model, past, self._clock, names=self._signatures.forward, media=media)

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
        self, prompts: Prompts, media: Media, past: WorkingCache, chunk: int | None, stop: int = -1
    ) -> None:
        with self._recorder(past, media):
            prefill(self.model, self._signatures, prompts, media, past, stop=stop, chunk=chunk)

    def _scope(self, scope: object) -> Scope:
        if scope is None:
            return self._weights.bind(Scope())
        if not isinstance(scope, Scope):
            raise ScopeError(f"scope is {scope!r}; pass quire.core.Scope(salt=..., lora=...)")
        if scope.model is not None:
            raise ScopeError(
                f"scope.model is {scope.model!r}; a PrefixCache sets it to the fingerprint of its "
                "model: leave it out, and use salt to keep prompts apart"
            )
        return self._weights.bind(scope)

    def _report(self, request: Request, stored: int, started: float, recorder: Recorder) -> None:
        first = recorder.first_token_at
        self.last = CallReport(
            prompt_tokens=request.prompts.num_tokens,
            cached_tokens=request.num_reused,
            stored_tokens=stored,
            ttft_s=None if first is None else first - started,
        )

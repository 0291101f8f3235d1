"""Calls of one cache: their way to the model, the recording of their KV, and their reports."""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from quire import ops
from quire.core import Scope
from quire.core.terms import RequestTerms
from quire.engines.companions import PassageAccount
from quire.engines.hf.inputs import Plan, Prompts, Signatures, read_prompts
from quire.engines.hf.media import Media, MediaReader, Named, moved
from quire.engines.hf.recorder import KVRecorder, Learn
from quire.engines.hf.request import Feed, Kept, Request
from quire.engines.hf.storage import KeptBlocks
from quire.engines.hf.verify import FirstCalls
from quire.engines.models.cache_factory import CacheFactory
from quire.engines.models.interception import Watched
from quire.engines.models.working_cache import WorkingCache
from quire.errors import ConfigError, TokensError


@dataclass(frozen=True, slots=True)
class CallReport:
    """The account of one call of `PrefixCache.generate` or one session.

    prompt_tokens == cached_tokens + computed_tokens, summed over the rows of the call, padding
    not counted. Rows of a batch advance together: a row's cached head is reused up to the
    column that all rows have cached, so `cached_tokens` may be below what the manager found.

    stored_tokens   written to the pool, those included that another call turned out to have written
    ttft_s          seconds from the call to the first new token; None when no forward finished
    tier_tokens     tokens that came back from tiers, by the tier's name; they are among `cached_tokens`
                    where all rows could start behind them
    tier_misses     records that were found in a tier and did not come, by `quire.tiers.Outcome`
    unknown_tokens  tokens that cannot be stored, as what the model computed for them, or for one before
                    them, is not what their ids alone give: a mask, positions or embeddings of the caller's
    unknown_reason  what came first among these; None where all tokens are known
    passages        what became of the passages of a call with segments; then `cached_tokens` are those of the
                    prefix alone, and K and V of passages that were placed are among neither
    """

    prompt_tokens: int
    cached_tokens: int
    stored_tokens: int
    ttft_s: float | None
    tier_tokens: dict[str, int] = field(default_factory=dict[str, int])
    tier_misses: dict[str, int] = field(default_factory=dict[str, int])
    unknown_tokens: int = 0
    unknown_reason: str | None = None
    passages: PassageAccount | None = None

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the model had to compute."""
        if self.passages is not None:
            return self.passages.computed_tokens + self.passages.recomputed_rows
        return self.prompt_tokens - self.cached_tokens


NO_REPORT = CallReport(prompt_tokens=0, cached_tokens=0, stored_tokens=0, ttft_s=None)


class Calls:
    """The model of a cache as calls reach it, and all that they have in common.

    signatures, watched   the arguments that the model takes; how it is called
    media, first          find the media of a prompt; compare the first calls of each shape, in strict mode
    """

    def __init__(
        self,
        model: Any,
        kept: KeptBlocks,
        factory: CacheFactory,
        first: FirstCalls | None,
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._kept = kept
        self.factory = factory
        self.first = first
        self.clock = clock
        self.signatures = Signatures.of(model)
        self.watched = Watched(model, self.signatures.forward, clock)
        self.media = MediaReader(model)

    def prompts(self, input_ids: object, attention_mask: object, others: dict[str, Any]) -> Prompts:
        """Read the prompts of a call; what else comes with them goes into `others`."""
        prompts = read_prompts(self._model, input_ids, attention_mask, others)
        columns, below = prompts.ids.shape[1], self.factory.padded_below
        if below is not None and prompts.pads.any() and columns >= below:
            raise ConfigError(
                f"{type(self._model).__name__} computes rows behind padding differently from column "
                f"{below} on, and the prompts have {columns} columns; give rows of one length, or "
                "one row at a time"
            )
        return prompts

    def one(
        self, name: str, input_ids: Any, attention_mask: Any, media: Named, content: dict[str, Any]
    ) -> tuple[Any, Any]:
        """Return the one prompt that a call named `name` takes, and the spans of its media.

        Media are given by name (`media`) or by `content`.
        """
        prompts = self.prompts(input_ids, attention_mask, content)
        if len(prompts.tokens) > 1:
            raise TokensError(f"{len(prompts.tokens)} rows; {name} takes one prompt at a time")
        if content:
            found = self.media.read(prompts, content, media or None)
        else:
            found = self.media.declared(prompts, media)
        if content:
            raise ConfigError(f"{', '.join(content)}: no media that this model takes")
        return prompts.tokens[0], found.spans[0]

    def for_session(
        self, input_ids: Any, attention_mask: Any, media: Named | None
    ) -> tuple[Prompts, Media]:
        """Read the prompts that a session takes, and their media by name."""
        if self.media.positions_depend:
            raise ConfigError(
                f"{type(self._model).__name__} keeps the positions of its last call, so that a cache "
                "alone does not tell how to go on; use cache.generate(...)"
            )
        prompts = self.prompts(input_ids, attention_mask, others := {})
        if others:
            raise ConfigError(
                f"{', '.join(others)}: a session takes ids, their mask and the names of media; feed "
                "the rest to the model yourself"
            )
        declared = self.media.declared(prompts, media or [()] * len(prompts.tokens))
        if self.first is not None:
            self.first.admit(declared, is_session=True)
        return prompts, declared

    @contextmanager
    def opened(
        self, prompts: Prompts, media: Media, scope: Scope | None, terms: RequestTerms
    ) -> Generator[Request, None, None]:
        """Open the sequences of a call, and close them at the end of the block."""
        identity = self._kept.identity
        bound = identity.scope(scope)
        seen = identity.inventory
        request = Request(self._kept.store, prompts, media, bound, **terms)
        request.has_stayed = lambda: seen is not None and identity.stayed(bound, seen)
        try:
            yield request
        finally:
            request.close()
            if self.first is not None and self.first.refusal is not None:
                ops.clear(self._kept.manager)

    def check_fed(self, media: Media, last: int, plan: Plan) -> None:
        """Raise `ConfigError` where a prompt of `last` + 1 columns cannot be fed as `plan` would have it.

        To several rows it is fed up to its last token first; in pieces it may be cut inside an item.
        """
        self.media.check_chunk(media, plan.chunk)
        if plan.expand > 1 and media.cut(last) != last:
            raise ConfigError(
                "the prompt ends in an image, video or audio, which cannot be fed to beams or "
                "return sequences; let a token of text follow it"
            )

    def is_same_model(self, request: Request, *, by_itself: bool = False) -> Callable[[], bool]:
        """Return a function that tells whether the model is the one that a call began with, whatever it was meanwhile.

        `by_itself`: only the model has run meanwhile; see `Identity.is_unchanged`.
        """
        bound = request.scope
        return lambda: self._kept.identity.is_unchanged(bound, by_itself=by_itself)

    def recorder(
        self, request: Request, past: WorkingCache, is_same_model: Callable[[], bool] | None
    ) -> KVRecorder:
        """Return the recorder of a call's working cache."""
        check = None
        if self.first is not None and request.num_reused:
            check = self.first.check(request.prompts, request.media, request.scope.lora)
        return KVRecorder(
            self.watched,
            past,
            request.media,
            learn=self._learn(),
            check=check,
            is_same_model=is_same_model,
        )

    def feed(self, chunk: int | None) -> Feed:
        """Return a function that computes a prompt of one row, with its media, up to a length."""
        return lambda prompt, media, past, num_tokens: self.prefill(
            prompt, media, past, num_tokens, chunk
        )

    def prefill(
        self, prompts: Prompts, media: Media, past: WorkingCache, stop: int, chunk: int | None
    ) -> None:
        """Compute the columns of prompts that `past` lacks, up to column `stop`.

        So a prompt is computed once before its rows multiply, where generate would do it once per beam
        or return sequence, and so rows and pieces are computed that generate knows nothing of.
        `chunk`: tokens that one forward may have, None for all.
        """
        names, device = self.signatures.forward, self._model.device
        ids, mask = prompts.ids[:, :stop].to(device), prompts.mask
        if mask is not None and "position_ids" not in names:
            return
        fixed: dict[str, Any] = {"past_key_values": past, "use_cache": True}
        if "logits_to_keep" in names:
            fixed["logits_to_keep"] = 1
        content = moved(media.content(past.get_seq_length(), stop), device)
        # Content is fed whole, in one forward: generate cannot split it either.
        step = max(ids.shape[1], 1) if content or chunk is None else chunk
        with KVRecorder(self.watched, past, media, learn=self._learn()), torch.no_grad():
            for start in range(past.get_seq_length(), ids.shape[1], step):
                end = min(start + step, ids.shape[1])
                given: dict[str, Any] = {}
                if mask is not None:
                    seen = mask[:, :end].to(device)
                    positions = (seen.long().cumsum(-1) - 1).clamp_min(0)
                    given = {"attention_mask": seen, "position_ids": positions[:, start:]}
                elif "position_ids" in names:  # some models count them from 0 in every forward
                    given = {"position_ids": torch.arange(start, end, device=device)[None]}
                if media.positions is not None:
                    given["position_ids"] = media.positions[..., start:end]
                if media.type_ids is not None and not media.is_causal:
                    given[media.type_name] = media.type_ids[:, :end].to(device)
                self.watched.model(input_ids=ids[:, start:end], **fixed, **given, **content)

    def end(
        self,
        request: Request,
        recorder: KVRecorder,
        texts: Iterable[Kept],
        started: float,
        is_same_model: Callable[[], bool],
    ) -> CallReport:
        """Keep texts that a call has left in its working cache, unless the model changed; report."""
        refused = self.first is not None and self.first.refusal is not None
        keeps = not refused and is_same_model()
        stored = request.keep(recorder.cache, texts) if keeps else 0
        first, ledger = recorder.first_token_at, recorder.ledger
        return CallReport(
            prompt_tokens=request.prompts.num_tokens,
            cached_tokens=request.num_reused,
            stored_tokens=stored,
            ttft_s=None if first is None else first - started,
            tier_tokens=summed(each.tokens for each in request.onboarded),
            tier_misses=summed(each.causes for each in request.onboarded),
            unknown_tokens=ledger.num_unknown,
            unknown_reason=ledger.reason,
        )

    def _learn(self) -> Learn | None:
        # A forward that waits for what comes from tiers does not tell what computing takes.
        store = self._kept.store
        return store.tiers.cost.observe if store.tiers and store.transfers.is_idle else None


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return counts of the same names as one."""
    return dict(sum(map(Counter, counts), Counter[str]()))

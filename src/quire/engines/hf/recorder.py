"""Watching which tokens a model's forward computes into a working cache."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch

from quire.engines.hf.fed import foreign, positions
from quire.engines.hf.ledger import TokenLedger
from quire.engines.hf.media import Media
from quire.engines.hf.verify import Check
from quire.engines.hf.watched import Watched
from quire.engines.hf.working import WorkingCache

Learn = Callable[[int, int, float], None]
"""Takes the first token of a forward, the one behind its last, and the seconds that it took."""


class Recorder:
    """Enters the tokens of every finished forward over `cache` into its ledger.

    A cache sees K and V, never tokens; `watched` sees the tokens. It tells this recorder of the
    forwards that are passed this very cache, as long as the `with` block lives; other calls of the
    model in between, by an assistant or another session, pass by untouched.

    One thing is put right on the way in: a decoding loop that feeds the whole prompt again
    although the cache holds its head (assisted decoding does, in transformers 5.23) has the
    head cut off its input. It is recognised by its position ids, which start at 0, and by its
    tokens, which are those the cache holds.

    Another: `position_ids` that are left out, over a cache that holds columns already or rows with
    padding, are given as those of the tokens; some models would count them from 0 again.

    `check` is given what the first forward returned, `learn` is told what it took over one row.
    What a forward computes under a mask, positions or other arguments than quire's own counts as
    not known, with all that follows it: `fed.foreign` says when. So do placeholders that `media`
    does not declare: their K and V are those of content without a name. And so does what a forward
    computes where `is_same_model` says that the model is another than at the beginning; it is asked
    before each one where code of the caller's runs in between.
    """

    def __init__(
        self,
        watched: Watched,
        cache: WorkingCache,
        clock: Callable[[], float] = time.monotonic,
        *,
        media: Media | None = None,
        learn: Learn | None = None,
        check: Check | None = None,
        is_same_model: Callable[[], bool] | None = None,
    ) -> None:
        self.first_token_at: float | None = None
        self._learn = learn
        self._check = check
        self._is_same_model = is_same_model
        self._begun_at = 0.0
        self._first_span = (0, 0)
        self.num_forwards = 0
        self.num_computed = 0
        self._watched = watched
        self._cache = cache
        self._clock = clock
        self._media = media
        self._fed: torch.Tensor | str = ""

    def __enter__(self) -> Self:
        self._watched.recorders[id(self._cache)] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del self._watched.recorders[id(self._cache)]
        self.mark_first_token()
        self._cache.drop_partial()

    @property
    def ledger(self) -> TokenLedger:
        """The tokens behind the columns of the cache."""
        return self._cache.ledger

    def mark_first_token(self) -> None:
        """Note the time of the first token: the first call after the first forward does."""
        if self.first_token_at is None and self.num_forwards:
            self.first_token_at = self._clock()
            if self._learn is not None and self._cache.ledger.num_rows == 1:
                self._learn(*self._first_span, self.first_token_at - self._begun_at)

    def forward_starts(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Note that a forward begins with these arguments, by name; return others where it needs them."""
        self.mark_first_token()
        if not self.num_forwards and self._learn is not None:
            self._begun_at = self._clock()
        self._cache.forward_starts()
        changed = self._without_head(given) or self._with_positions(given)
        given = changed or given
        reason = foreign(given, self._cache.ledger, self._media)
        if self._watched.model.training:
            reason = "the model was in training mode"
        if reason is None and self._is_same_model is not None and not self._is_same_model():
            reason = "the model was another than when the call began"
        self._fed = reason or given["input_ids"]
        return changed

    def forward_ends(self, output: Any) -> None:
        """Enter what the forward that began last has computed, and returned as `output`."""
        start = self._cache.ledger.length
        self.num_computed += self._cache.forward_ends(self._fed)
        self._forget_unnamed(self._fed, start)
        self._fed = ""
        if not self.num_forwards:
            self._first_span = (start, self._cache.ledger.length)
        self.num_forwards += 1
        if self.num_forwards == 1 and self._check is not None:
            self._check(self._cache, output)

    def _forget_unnamed(self, fed: torch.Tensor | str, start: int) -> None:
        if isinstance(fed, torch.Tensor) and self._media is not None:
            ledger = self._cache.ledger
            known = start + self._media.num_known(fed, start, ledger.origins)
            ledger.forget_from(known, "a placeholder stood for content that has no name")

    def _without_head(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments without what the cache holds, where they begin with the very same."""
        ids, places = given.get("input_ids"), given.get("position_ids")
        ledger = self._cache.ledger
        held = ledger.known
        if not isinstance(ids, torch.Tensor) or not isinstance(places, torch.Tensor):
            return None
        if not 0 < held == ledger.length < ids.shape[-1] == places.shape[-1]:
            return None
        if ids.shape[0] != ledger.num_rows or bool((places[..., 0] != 0).any()):
            return None
        if not bool((ids[:, :held] == ledger.tokens.to(ids.device)).all()):
            return None
        return {**given, "input_ids": ids[:, held:], "position_ids": places[..., held:]}

    def _with_positions(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments with the positions of the tokens, where these are left out."""
        ids, ledger = given.get("input_ids"), self._cache.ledger
        if given.get("position_ids") is not None or "position_ids" not in self._watched.names:
            return None
        if not isinstance(ids, torch.Tensor) or not (ledger.length or ledger.pads.any()):
            return None
        if self._media is not None and self._media.positions is not None:
            return None
        start = ledger.length
        own = positions(ledger, start, start + ids.shape[-1], ids.device)
        return {**given, "position_ids": own.clamp_min(0)}

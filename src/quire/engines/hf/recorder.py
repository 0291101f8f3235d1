"""Watching which tokens a model's forward computes into a working cache."""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch

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

    `check` is given what the first forward returned, `learn` is told what it took over one row.
    Placeholders that `media` does not declare, and all that follows them, count as not known: their
    K and V are those of content without a name.
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
    ) -> None:
        self.first_token_at: float | None = None
        self._learn = learn
        self._check = check
        self._begun_at = 0.0
        self._first_span = (0, 0)
        self.num_forwards = 0
        self.num_computed = 0
        self._watched = watched
        self._cache = cache
        self._clock = clock
        self._media = media
        self._fed: torch.Tensor | None = None

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
        ids = given.get("input_ids")
        self._fed = ids if isinstance(ids, torch.Tensor) and ids.ndim == 2 else None
        if self._fed is None or not self._feeds_again(self._fed, given):
            return None
        held = self._cache.ledger.length
        self._fed = self._fed[:, held:]
        positions: torch.Tensor = given["position_ids"]
        return {**given, "input_ids": self._fed, "position_ids": positions[..., held:]}

    def forward_ends(self, output: Any) -> None:
        """Enter what the forward that began last has computed, and returned as `output`."""
        start = self._cache.ledger.length
        self.num_computed += self._cache.forward_ends(self._fed)
        self._forget_unnamed(self._fed, start)
        self._fed = None
        if not self.num_forwards:
            self._first_span = (start, self._cache.ledger.length)
        self.num_forwards += 1
        if self.num_forwards == 1 and self._check is not None:
            self._check(self._cache, output)

    def _forget_unnamed(self, fed: torch.Tensor | None, start: int) -> None:
        if fed is not None and self._media is not None:
            ledger = self._cache.ledger
            known = start + self._media.num_known(fed, start, ledger.origins)
            ledger.known = min(ledger.known, known)

    def _feeds_again(self, fed: torch.Tensor, given: Mapping[str, Any]) -> bool:
        """Whether `fed` starts with the very tokens that the cache holds already."""
        ledger = self._cache.ledger
        held = ledger.known
        if not 0 < held == ledger.length < fed.shape[1] or fed.shape[0] != ledger.num_rows:
            return False
        positions = given.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.shape[-1] != fed.shape[1]:
            return False
        if ledger.pads.min() > 0 or bool((positions[..., 0] != 0).any()):
            return False
        return bool((fed[:, :held] == ledger.tokens.to(fed.device)).all())

"""Watching which tokens a model's forward computes into a working cache."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from quire.engines.hf.media import Media
from quire.engines.hf.working import WorkingCache

Learn = Callable[[int, int, float], None]
"""Takes the first token of a forward, the one behind its last, and the seconds that it took."""


class Recorder:
    """Enters the tokens of every finished forward of `model` into `cache.ledger`.

    A cache sees K and V, never tokens; a forward hook sees the tokens. The hooks live as long
    as the `with` block and act on forwards whose `past_key_values` is this very cache, so other
    calls of the model in between, by an assistant or another session, pass by untouched.

    One thing is put right on the way in: a decoding loop that feeds the whole prompt again
    although the cache holds its head (assisted decoding does, in transformers 5.23) has the
    head cut off its input. It is recognised by its position ids, which start at 0, and by its
    tokens, which are those the cache holds.

    `learn` is told what the first forward over one row took.

    `names` are the parameters of `model.forward` in order; () has them looked up. Placeholders
    that `media` does not declare, and all that follows them, count as not known: their K and V
    are those of content without a name.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: WorkingCache,
        clock: Callable[[], float] = time.monotonic,
        *,
        names: Sequence[str] = (),
        media: Media | None = None,
        learn: Learn | None = None,
    ) -> None:
        self.first_token_at: float | None = None
        self._learn = learn
        self._begun_at = 0.0
        self._first_span = (0, 0)
        self.num_forwards = 0
        self.num_computed = 0
        self._model = model
        self._cache = cache
        self._clock = clock
        self._media = media
        self._fed: torch.Tensor | None = None
        self._names = list(names) or list(inspect.signature(model.forward).parameters)
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        self._handles = [
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            self._model.register_forward_hook(self._after, with_kwargs=True),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self.mark_first_token()
        self._cache.drop_partial()

    def mark_first_token(self) -> None:
        """Note the time of the first token: the first call after the first forward does."""
        if self.first_token_at is None and self.num_forwards:
            self.first_token_at = self._clock()
            if self._learn is not None and self._cache.ledger.num_rows == 1:
                self._learn(*self._first_span, self.first_token_at - self._begun_at)

    def _before(
        self, _module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._argument("past_key_values", args, kwargs) is not self._cache:
            return None
        self.mark_first_token()
        if not self.num_forwards and self._learn is not None:
            self._begun_at = self._clock()
        self._cache.forward_starts()
        ids = self._argument("input_ids", args, kwargs)
        self._fed = ids if isinstance(ids, torch.Tensor) and ids.ndim == 2 else None
        if self._fed is None or not self._feeds_again(self._fed, kwargs):
            return None
        held = self._cache.ledger.length
        self._fed = self._fed[:, held:]
        trimmed = {**kwargs, "input_ids": self._fed}
        if isinstance(positions := kwargs.get("position_ids"), torch.Tensor):
            trimmed["position_ids"] = positions[..., held:]
        return args, trimmed

    def _after(
        self,
        _module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        _output: object,
    ) -> None:
        if self._argument("past_key_values", args, kwargs) is not self._cache:
            return
        start = self._cache.ledger.length
        self.num_computed += self._cache.forward_ends(self._fed)
        self._forget_unnamed(self._fed, start)
        self._fed = None
        if not self.num_forwards:
            self._first_span = (start, self._cache.ledger.length)
        self.num_forwards += 1

    def _forget_unnamed(self, fed: torch.Tensor | None, start: int) -> None:
        if fed is not None and self._media is not None:
            ledger = self._cache.ledger
            known = start + self._media.num_known(fed, start, ledger.origins)
            ledger.known = min(ledger.known, known)

    def _feeds_again(self, fed: torch.Tensor, kwargs: Mapping[str, Any]) -> bool:
        """Whether `fed` starts with the very tokens that the cache holds already."""
        ledger = self._cache.ledger
        held = ledger.known
        if not 0 < held == ledger.length < fed.shape[1] or fed.shape[0] != ledger.num_rows:
            return False
        positions = kwargs.get("position_ids")
        if not isinstance(positions, torch.Tensor) or positions.shape[-1] != fed.shape[1]:
            return False
        if ledger.pads.min() > 0 or bool((positions[..., 0] != 0).any()):
            return False
        return bool((fed[:, :held] == ledger.tokens.to(fed.device)).all())

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if name in kwargs or not args:
            return kwargs.get(name)
        index = self._names.index(name) if name in self._names else len(args)
        return args[index] if index < len(args) else None

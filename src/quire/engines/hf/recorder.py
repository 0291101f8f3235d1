"""Watching which tokens a model's forward computes into a working cache."""

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch

from quire.engines.hf.media import Media
from quire.engines.hf.verify import Check
from quire.engines.models.column_tokens import TokenLedger
from quire.engines.models.interception import Watched
from quire.engines.models.working_cache import WorkingCache

_HARMLESS = frozenset(
    {"input_ids", "past_key_values", "use_cache", "return_dict", "output_attentions"}
    | {"output_hidden_states", "output_router_logits", "logits_to_keep", "tokenizer"}
    | {"assistant_tokenizer", "labels"}
)
"""Arguments of a forward that change what it returns, and neither K nor V nor states."""

Learn = Callable[[int, int, float], None]
"""Takes the first token of a forward, the one behind its last, and the seconds that it took."""


class KVRecorder:
    """Enters the tokens of every finished forward over `cache` into its ledger.

    A cache sees K and V, never tokens; `watched` sees the tokens. It tells this recorder of the
    forwards that are passed this very cache, as long as the `with` block lives; other calls of the
    model in between, by an assistant or another session, pass by untouched.

    Two things are put right on the way in. A loop that feeds the whole prompt again although the cache
    holds its head (assisted decoding does, in transformers 5.23) has the head cut off its input; it is
    recognised by position ids from 0 on, and by its tokens. And `position_ids` that are left out over
    columns or padding are given as those of the tokens; some models would count from 0 again.

    Not known, with all that follows it, is what a forward computes under a mask, positions or other
    arguments than quire's own (`foreign` says when), where `is_same_model` says that the model is another
    than at the beginning, and placeholders that `media` does not declare: their content has no name.
    `check` is given what the first forward returned, `learn` is told what it took over one row.
    """

    def __init__(
        self,
        watched: Watched,
        cache: WorkingCache,
        media: Media,
        *,
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
        self._num_forwards = 0
        self._watched = watched
        self.cache = cache
        self._media = media
        self._fed: torch.Tensor | str = ""

    def __enter__(self) -> Self:
        self._watched.recorders[id(self.cache)] = self
        return self

    def __exit__(self, *_: object) -> None:
        del self._watched.recorders[id(self.cache)]
        self.mark_first_token()
        self.cache.drop_partial()

    @property
    def ledger(self) -> TokenLedger:
        """The tokens behind the columns of the cache."""
        return self.cache.ledger

    def mark_first_token(self) -> None:
        """Note the time of the first token: the first call after the first forward does."""
        if self.first_token_at is None and self._num_forwards:
            self.first_token_at = self._watched.clock()
            if self._learn is not None and self.cache.ledger.num_rows == 1:
                self._learn(*self._first_span, self.first_token_at - self._begun_at)

    def forward_starts(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Note that a forward begins with these arguments, by name; return others where it needs them."""
        self.mark_first_token()
        if not self._num_forwards and self._learn is not None:
            self._begun_at = self._watched.clock()
        self.cache.forward_starts()
        changed = self._without_head(given) or self._with_positions(given)
        given = changed or given
        reason = foreign(given, self.cache.ledger, self._media)
        if self._watched.model.training:
            reason = "the model was in training mode"
        if reason is None and self._is_same_model is not None and not self._is_same_model():
            reason = "the model was another than when the call began"
        self._fed = reason or given["input_ids"]
        return changed

    def forward_ends(self, output: Any) -> None:
        """Enter what the forward that began last has computed, and returned as `output`."""
        ledger, fed, self._fed = self.cache.ledger, self._fed, ""
        start = ledger.length
        self.cache.forward_ends(fed)
        if isinstance(fed, torch.Tensor):
            known = start + self._media.num_known(fed, start, ledger.origins)
            ledger.forget_from(known, "a placeholder stood for content that has no name")
        self._num_forwards += 1
        if self._num_forwards == 1:
            self._first_span = (start, ledger.length)
            if self._check is not None:
                self._check(self.cache, output)

    def _without_head(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments without what the cache holds, where they begin with the very same."""
        ids, places = given.get("input_ids"), given.get("position_ids")
        ledger = self.cache.ledger
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
        ids, ledger = given.get("input_ids"), self.cache.ledger
        if given.get("position_ids") is not None or "position_ids" not in self._watched.names:
            return None
        if not isinstance(ids, torch.Tensor) or not (ledger.length or ledger.pads.any()):
            return None
        if self._media.positions is not None:
            return None
        start = ledger.length
        own = positions(ledger, start, start + ids.shape[-1], ids.device)
        return {**given, "position_ids": own.clamp_min(0)}


def foreign(given: Mapping[str, Any], ledger: TokenLedger, media: Media) -> str | None:
    """Return why a forward with these arguments computes something else than its tokens' KV.

    None: all it is given is what quire itself would give it for the next columns of `ledger`: token
    ids, the mask of the padding, positions counted from each row's first token, the named content
    of `media`. An argument that is not known to be harmless is a reason.
    """
    ids, num_rows = given.get("input_ids"), ledger.num_rows
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[0] != num_rows:
        return f"input_ids were not a tensor [{num_rows}, tokens]"
    stop = ledger.length + ids.shape[1]
    for name, value in given.items():
        if value is None or name in _HARMLESS or name in media.names:
            continue
        if name == "position_ids":
            if not _same_positions(value, ids, ledger, media):
                return "position_ids were not those of the tokens, counted from the first of a row"
        elif name != "attention_mask":
            return f"{name} may change K and V"
    if not media.is_seen_so(given.get(media.type_name), ledger.origins, ledger.length, stop):
        return f"{media.type_name} were not those of the prompt's media, which see all of an item"
    if not _same_mask(given.get("attention_mask"), ledger, stop):
        return f"attention_mask was not [{num_rows}, {stop}] with zeros for padding alone"
    return None


def positions(ledger: TokenLedger, start: int, stop: int, device: Any) -> torch.Tensor:
    """Return the positions of columns as tokens of their rows: `[rows, n]`, negative in padding.

    `[1, n]` where no row has padding.
    """
    columns = torch.arange(start, stop, device=device)[None]
    if not ledger.pads.any():
        return columns
    return columns - torch.as_tensor(ledger.pads, device=device)[:, None]


def _same_mask(mask: object, ledger: TokenLedger, stop: int) -> bool:
    if mask is None:
        return not ledger.pads.any()
    if not isinstance(mask, torch.Tensor) or mask.shape != (ledger.pads.size, stop):
        return False
    there = positions(ledger, 0, stop, mask.device) >= 0 if ledger.pads.any() else 1
    return bool((mask == there).all())


def _same_positions(given: object, ids: torch.Tensor, ledger: TokenLedger, media: Media) -> bool:
    start, stop = ledger.length, ledger.length + ids.shape[1]
    if not isinstance(given, torch.Tensor) or given.shape[-1] != ids.shape[1]:
        return False
    if media.positions is not None:
        ours = media.positions_of(ledger.origins, start, stop).to(given.device)
        return given.shape == ours.shape and bool((given == ours).all())
    if given.ndim != 2 or given.shape[0] not in {1, ids.shape[0]}:
        return False
    ours = positions(ledger, start, stop, given.device)
    same = given == ours
    return bool((same | (ours < 0) if ledger.pads.any() else same).all())

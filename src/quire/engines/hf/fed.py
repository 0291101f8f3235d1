"""What a forward was fed besides tokens: whether its K and V are those of the tokens alone."""

from collections.abc import Mapping
from typing import Any

import torch

from quire.engines.hf.ledger import TokenLedger
from quire.engines.hf.media import Media

_HARMLESS = frozenset(
    {
        "input_ids",
        "past_key_values",
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "logits_to_keep",
        "tokenizer",
        "assistant_tokenizer",
        "labels",
    }
)
"""Arguments of a forward that change what it returns, and neither K nor V nor states."""


def foreign(given: Mapping[str, Any], ledger: TokenLedger, media: Media | None) -> str | None:
    """Return why a forward with these arguments computes something else than its tokens' KV.

    None: all it is given is what quire itself would give it for the next columns of `ledger`: token
    ids, the mask of the padding, positions counted from each row's first token, the named content
    of `media`. An argument that is not known to be harmless is a reason.
    """
    ids = given.get("input_ids")
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.shape[0] != ledger.num_rows:
        return f"input_ids were not a tensor [{ledger.num_rows}, tokens]"
    stop = ledger.length + ids.shape[1]
    for name, value in given.items():
        if value is None or name in _HARMLESS or (media is not None and name in media.names):
            continue
        if name == "position_ids":
            if not _same_positions(value, ids, ledger, media):
                return "position_ids were not those of the tokens, counted from the first of a row"
        elif name != "attention_mask":
            return f"{name} may change K and V"
    if not _same_mask(given.get("attention_mask"), ledger, stop):
        return f"attention_mask was not [{ledger.num_rows}, {stop}] with zeros for padding alone"
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
    if not isinstance(mask, torch.Tensor) or mask.shape != (ledger.num_rows, stop):
        return False
    return bool((mask == (positions(ledger, 0, stop, mask.device) >= 0)).all())


def _same_positions(
    given: object, ids: torch.Tensor, ledger: TokenLedger, media: Media | None
) -> bool:
    start, stop = ledger.length, ledger.length + ids.shape[1]
    if not isinstance(given, torch.Tensor) or given.shape[-1] != ids.shape[1]:
        return False
    if media is not None and media.positions is not None:
        ours = media.positions_of(ledger.origins, start, stop).to(given.device)
        return given.shape == ours.shape and bool((given == ours).all())
    ours = positions(ledger, start, stop, given.device)
    if given.ndim != 2 or given.shape[0] not in {1, ledger.num_rows}:
        return False
    return bool(((given == ours) | (ours < 0)).all())

"""Token ids and masks as callers give them, made into tensors."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from quire.errors import ConfigError, TokensError

_TENSORS = "pass a tensor [rows, tokens], as a tokenizer returns with return_tensors='pt'"


def unpacked(input_ids: object, attention_mask: object, others: dict[str, Any]) -> tuple[Any, Any]:
    """Return ids and mask of a call; what else a tokenizer has returned with them goes into `others`.

    `input_ids` may be what a tokenizer or processor returns, a mapping with ids in it. Raises
    `ConfigError` for what is given twice, and for embeddings without ids.
    """
    inputs = others.pop("inputs", None)
    if input_ids is None:
        input_ids = inputs
    elif inputs is not None:
        raise ConfigError(
            "inputs and input_ids are both given, and mean the same; pass one of them"
        )
    if isinstance(input_ids, Mapping):
        held = dict(cast("Mapping[str, Any]", input_ids))
        if held.get("input_ids") is None:
            raise TokensError(f"a mapping without input_ids: it has {', '.join(held) or 'nothing'}")
        input_ids = held.pop("input_ids")
        given = {**others, "attention_mask": attention_mask}
        twice = [name for name in held if given.get(name) is not None]
        if twice:
            raise ConfigError(
                f"{', '.join(twice)}: given beside a mapping of inputs that has it as well; leave one out"
            )
        attention_mask = held.pop("attention_mask", attention_mask)
        others.update(held)
    if input_ids is None and others.get("inputs_embeds") is not None:
        raise ConfigError(
            "inputs_embeds without input_ids: embeddings have no token ids to find a prefix by; pass "
            "input_ids, or call model.generate"
        )
    return input_ids, attention_mask


def as_ids(given: object) -> torch.Tensor:
    """Return ids `[rows, tokens]` of type int64 on the device they are on; one flat list is one row.

    Raises `TokensError` for what holds no integers, or is not rectangular.
    """
    ids = _as_tensor(given, "input_ids", _TENSORS)
    if ids.numel() and ids.dtype not in (torch.int64, torch.int32):
        raise TokensError(f"input_ids are {ids.dtype}; token ids are int64 or int32")
    if ids.ndim == 1:
        ids = ids[None]
    if ids.ndim != 2 or ids.numel() == 0:
        raise TokensError(
            f"input_ids have shape {list(ids.shape)}; they must be [rows, tokens] with at "
            "least one row and one token"
        )
    return ids.long()


def as_mask(given: object, ids: torch.Tensor) -> torch.Tensor:
    """Return a mask of the shape of ids, on their device."""
    like = f"it must be a tensor of the shape of input_ids, {list(ids.shape)}"
    mask = _as_tensor(given, "attention_mask", like)
    if mask.ndim == 1:
        mask = mask[None]
    if mask.shape != ids.shape:
        raise TokensError(f"attention_mask is {list(mask.shape)}; {like}")
    return mask.to(ids.device)


def _as_tensor(given: object, name: str, wanted: str) -> torch.Tensor:
    if isinstance(given, torch.Tensor):
        return given
    if not isinstance(given, np.ndarray | list | tuple):
        raise TokensError(f"{name}: {type(given).__name__} is no kind of ids; {wanted}")
    try:
        array = np.asarray(cast("Any", given))
    except (ValueError, TypeError):  # rows of different lengths, or of anything
        array = np.asarray(None)
    if array.dtype.kind not in "iufb":
        raise TokensError(f"{name}: {_what_rows(cast('Sequence[Any]', given))}; {wanted}")
    return torch.tensor(array)


def _what_rows(given: Sequence[Any]) -> str:
    lengths = [len(row) for row in given if hasattr(row, "__len__") and not isinstance(row, str)]
    if len(lengths) == len(given) and len(set(lengths)) > 1:
        return (
            f"rows of {min(lengths)} to {max(lengths)} tokens; pad them on the left and pass the mask, "
            "as tokenizer(texts, padding=True, padding_side='left', return_tensors='pt') does"
        )
    odd = next((type(each).__name__ for each in given if not isinstance(each, int)), "nothing")
    return f"a {type(given).__name__} of {odd} where ids are expected"

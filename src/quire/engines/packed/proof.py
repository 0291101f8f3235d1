"""Packed rows against plain forwards of the same model, before it serves requests."""

from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch

from quire.engines.models.battery import twin_of
from quire.engines.models.distance import limit_for, relative
from quire.engines.models.quantized import rounds_activations, why_far
from quire.engines.models.supported import num_embeddings
from quire.engines.models.twin import MAX_DISTANCE, distances
from quire.engines.packed.decoder import is_plain
from quire.engines.packed.model import PackedModel, locked
from quire.errors import QuireError, UnsupportedModel
from quire.kernels.attention import Packed
from quire.tensors.kinds import model_type
from quire.tensors.pool import KVPool

_LIMITS = (1e-4, 0.1)
"""Relative L2 distance of the logits of some forwards, in single and in half precision (`_far`)."""

_BLOCK_SIZE = 4
_SHORT = 13
_LONG = 2 * MAX_DISTANCE + 11


def proven(model: Any, block_size: int) -> PackedModel:
    """Return the packed form of a model whose logits are those of its plain forwards.

    The model itself computes a few short texts; longer ones, over every window, chunk and threshold of
    positions, a tiny twin of random weights, once for each kind of model. Raises `UnsupportedModel` with the
    distance and its limit, or what `PackedModel` raises.
    """
    with locked(model):
        return _proven(model, block_size)


def _proven(model: Any, block_size: int) -> PackedModel:
    # What has the parts of a plain decoder may compute anything with them, and fit together in no other way.
    with suppress(RuntimeError):
        if is_plain(model) and _refusal(model, plain=True) is None:
            return PackedModel(model, block_size, plain=True)
    if (refusal := _refusal(model, plain=False)) is not None:
        raise UnsupportedModel(refusal)
    return PackedModel(model, block_size)


def _refusal(model: Any, *, plain: bool) -> str | None:
    """Return what is wrong with the packed rows of a model, computed as a plain decoder or by itself; None: nothing."""
    name = f"{model_type(model.config)} ({type(model).__name__})"
    if (far := _distance(model, _SHORT, plain=plain)) is not None:
        return (
            f"{name} does not compute packed rows as it does plain ones: {far}; call model.generate "
            f"instead{why_far(model)}"
        )
    values = repr(model.config.to_dict())
    refused = _of_kind(_PackedKind(cast("Any", type(model)), values, plain, model.config))
    return refused and f"{name}: a tiny twin of its config with random weights {refused}"


@dataclass(frozen=True, slots=True)
class _PackedKind:
    """The identity of models that compute packed rows in the same way: a class, and a config by its values."""

    model_class: Any
    values: str
    plain: bool
    config: Any = field(compare=False, repr=False)


@lru_cache(maxsize=128)
def _of_kind(kind: _PackedKind) -> str | None:
    """Return what is wrong with the packed rows of a kind of model, seen on a twin; None: nothing."""
    try:
        twin = twin_of(kind.model_class, kind.config, seed=0)
    except Exception as error:  # noqa: BLE001 - a config may be anything
        if not distances(kind.config):
            return None  # no window and no threshold that short texts do not show
        return f"cannot be built, on which windows would be checked: {error}"
    try:
        far = _distance(twin, _LONG, plain=kind.plain)
    except QuireError as error:
        return f"is refused: {error}"
    return None if far is None else f"does not compute packed rows as it does plain ones: {far}"


def _distance(model: Any, num_tokens: int, *, plain: bool) -> str | None:
    """Return how far the logits of packed rows are from those of whole texts; None: within the limit.

    Three texts, of which the third begins as the first does and reads its blocks: in parts, together, then one
    token each.
    """
    packed = PackedModel(model, _BLOCK_SIZE, plain=plain)
    texts = _texts(model, num_tokens)
    with torch.inference_mode():
        whole = [model(input_ids=text[None], use_cache=False).logits[0] for text in texts]
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    places = np.arange(3 * num_blocks, dtype=np.int32)[::-1].reshape(3, num_blocks).copy()
    shared = num_tokens // 2 // _BLOCK_SIZE
    places[2, :shared] = places[0, :shared]
    pools = [
        KVPool(group.memory, places.size, model.device, debug_nan=True)  # pyright: ignore[reportArgumentType]
        for group in packed.layout.groups
    ]
    # (text, start, stop) of each request of each step
    head, near, last = shared * _BLOCK_SIZE, num_tokens // 3, num_tokens - 1
    steps = [
        [(0, 0, near)],
        [(0, near, head + 1), (1, 0, last)],
        [(1, last, num_tokens), (0, head + 1, last), (2, head, last)],
        [(0, last, num_tokens), (2, last, num_tokens)],
    ]
    plans = packed.plans()
    found: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for parts in steps:
        rows = Packed(
            tables=places[[text for text, _, _ in parts]],
            context=np.array([start for _, start, _ in parts], np.int64),
            lengths=np.array([stop - start for _, start, stop in parts], np.int64),
        )
        ids = torch.cat([texts[text][start:stop] for text, start, stop in parts])
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in parts]).to(
            ids.device
        )
        for plan in plans:
            plan.update(rows)
        found.append(packed.forward(ids, positions, None, plans, pools))
        expected += [whole[text][start:stop] for text, start, stop in parts]
    limit = limit_for(whole[0].dtype, _LIMITS, coarse=rounds_activations(model))
    if not (far := _far(torch.cat(found), torch.cat(expected))) <= limit:
        return f"their logits are {far:.2g} from them (limit {limit:g}, {num_tokens} tokens)"
    return None


def _far(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far rows are from those that are expected.

    In half precision that is the middle row's: rounding sends single ones to other experts, in plain forwards too.
    """
    if expected.dtype.itemsize >= 4 or not logits.isfinite().all():
        return relative(logits - expected, expected)
    rows = sorted(relative(a - b, b) for a, b in zip(logits, expected, strict=True))
    return rows[len(rows) // 2]


def _texts(model: Any, num_tokens: int) -> torch.Tensor:
    """Return three texts `[3, num_tokens]`, of which the third begins as the first one."""
    vocab = num_embeddings(model)
    texts = (torch.arange(1, 3 * num_tokens + 1) * 7919 % max(vocab - 3, 1)).reshape(
        3, num_tokens
    ) + min(3, vocab - 1)
    shared = num_tokens // 2 // _BLOCK_SIZE * _BLOCK_SIZE
    texts[2, :shared] = texts[0, :shared]
    return texts.to(model.device)

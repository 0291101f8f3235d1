"""Which layer tells best what of a moved passage is wrong, and is not too deep."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.engines.hf.chunks.capture import ChunkKV, captured, grow, place
from quire.engines.hf.chunks.runs import Runs
from quire.engines.hf.models import num_embeddings
from quire.tensors.rotary import Rotation

_NUM_PASSAGES = 4
_PASSAGE_TOKENS = 64
_SHARE = 0.15
_ENOUGH = 0.8

Deviations = npt.NDArray[np.float64]


def check_layer(
    runs: Runs, rotations: Sequence[Rotation | None], sample: Sequence[Sequence[int]] | None
) -> int:
    """Return the first layer that finds what all layers together find, of those in the first half.

    Passages are computed alone, moved to where they stand in a text of all, and compared there with what
    that text gives. Rows are ranked by how far K and V are off in all layers; a layer is good enough
    if its own first 15 % hold four fifths of those of that ranking. Where none does, the best one is taken.
    """
    if len(rotations) < 2:
        return 1
    passages = _passages(runs, sample)
    far = deviations(runs, rotations, passages)
    count = max(round(_SHARE * far.shape[1]), 1)
    wanted = set(np.argsort(-far.sum(0))[:count].tolist())
    found = [
        len(wanted.intersection(np.argsort(-far[layer])[:count].tolist())) / count
        for layer in range(1, max(len(rotations) // 2, 1) + 1)
        if layer < len(rotations)
    ]
    enough = [layer for layer, recall in enumerate(found, start=1) if recall >= _ENOUGH]
    return enough[0] if enough else 1 + int(np.argmax(found))


def deviations(
    runs: Runs, rotations: Sequence[Rotation | None], passages: Sequence[npt.NDArray[np.int64]]
) -> Deviations:
    """Return how far K and V of each row of all passages but the first are off: `[layers, rows]`.

    Squared distances, over the mean square of a row in that layer.
    """
    text = np.concatenate(passages)
    whole = runs.past(len(text))
    runs.feed(whole, text)
    parts: list[Deviations] = []
    start = len(passages[0])
    for ids in passages[1:]:
        stop = start + len(ids)
        exact = captured(whole, start, stop)
        assert exact is not None
        alone = runs.kv(ids, 0)
        moved = runs.past(stop)
        grow(moved, alone, stop)
        place(moved, alone, start, start, rotations)
        there = captured(moved, start, stop)
        assert there is not None
        parts.append(_between(exact, there))
        start = stop
    return np.concatenate(parts, axis=1)


def _between(exact: ChunkKV, moved: ChunkKV) -> Deviations:
    layers = [
        _relative(one[0], two[0]) + _relative(one[1], two[1])
        for one, two in zip(exact.layers, moved.layers, strict=True)
    ]
    return torch.stack(layers).double().numpy(force=True)


def _relative(exact: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    size = exact.float().square().sum((0, 2))
    far = (exact.float() - moved.float()).square().sum((0, 2))
    return far / size.mean().clamp_min(1e-12)


def _passages(runs: Runs, sample: Sequence[Sequence[int]] | None) -> list[npt.NDArray[np.int64]]:
    given = [np.asarray(ids, np.int64) for ids in sample or () if len(ids)]
    if len(given) > 1:
        return given
    vocab = num_embeddings(runs.model)
    ids = np.random.default_rng(1).integers(1, vocab, (_NUM_PASSAGES, _PASSAGE_TOKENS))
    return list(ids)

"""Block ids and the token slots they stand for: index arithmetic on the host."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.errors import ConfigError

BlockIds = Sequence[int] | npt.NDArray[np.int32] | npt.NDArray[np.int64]


def block_array(block_ids: BlockIds, num_blocks: int) -> npt.NDArray[np.int64]:
    """Return block ids as int64 `[n]`, each `0 <= id < num_blocks`; else `ConfigError`."""
    ids = np.asarray(block_ids, dtype=np.int64)
    if ids.ndim != 1:
        raise ConfigError(f"block ids have shape {ids.shape}; they must be one-dimensional")
    if ids.size and (ids.min() < 0 or ids.max() >= num_blocks):
        bad = int(ids[(ids < 0) | (ids >= num_blocks)][0])
        raise ConfigError(f"block id {bad} is not in this pool of {num_blocks} blocks")
    return ids


def runs(ids: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return runs of neighbouring ids, as `(index of the first, length)` in order."""
    if not ids.size:
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
    lengths = np.diff(np.concatenate((starts, [ids.size])))
    return [(int(start), int(length)) for start, length in zip(starts, lengths, strict=True)]


def on_device(ids: npt.NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """Return an index array as a tensor on `device`, for what is queued on its current stream."""
    index = torch.from_numpy(ids)  # pyright: ignore[reportUnknownMemberType] - torch leaves the parameter untyped
    if device.type == "cuda" and ids.size:
        # From pageable memory, the host would wait for all that is queued.
        return index.pin_memory().to(device, non_blocking=True)
    return index.to(device)

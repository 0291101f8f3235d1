"""K and V of passages: taken out of working caches, and put into others at another position."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quire.engines.models.working_cache import WorkingCache
from quire.tensors import KV
from quire.tensors.rotary import Rotation, rotate_into


@dataclass(frozen=True, slots=True, eq=False)
class PassageKV:
    """K and V of a passage at the position at which it was captured: `[kv_heads, tokens, width]` per layer.

    They are changed by a purge alone: what is placed in a prompt is a copy.
    """

    layers: tuple[KV, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V of all layers."""
        return sum(each.nbytes for layer in self.layers for each in layer)

    def wipe(self) -> None:
        """Overwrite K and V with zeros: nobody may place them any more."""
        with torch.inference_mode():
            for layer in self.layers:
                for each in layer:
                    each.zero_()

    @property
    def num_tokens(self) -> int:
        """Tokens of the passage."""
        return self.layers[0][0].shape[1]


def captured(past: WorkingCache, start: int, stop: int) -> PassageKV | None:
    """Copy tokens `start` to `stop` of a working cache of one row; None where a layer lacks some of them.

    A windowed layer that began with a window alone lacks what lies before it.
    """
    held = [past.kv_layers[index] for index in sorted(past.kv_layers)]
    if any(max(each.first, each.whole_from) > start for each in held):
        return None
    rows = (each.row(0, start, stop) for each in held)
    return PassageKV(tuple((k.contiguous().clone(), v.contiguous().clone()) for k, v in rows))


def grow(past: WorkingCache, like: PassageKV, num_columns: int) -> None:
    """Append columns for so many tokens to all layers, unwritten."""
    for index, (k, v) in zip(sorted(past.kv_layers), like.layers, strict=True):
        past.kv_layers[index].extend(
            *(each[None, :, :1].expand(-1, -1, num_columns, -1) for each in (k, v))
        )


def place(
    past: WorkingCache,
    kv: PassageKV,
    start: int,
    shift: int,
    rotations: Sequence[Rotation | None],
) -> None:
    """Write a passage into columns that are there, from position `start` on, `shift` behind its own.

    A windowed layer takes what of it stands in the columns that it has.
    """
    stop = start + kv.num_tokens
    for index, (k, v), rotation in zip(sorted(past.kv_layers), kv.layers, rotations, strict=True):
        layer = past.kv_layers[index]
        first = min(max(start, layer.first), stop)
        k_out, v_out = layer.row(0, first, stop)
        for out, held, turned in ((k_out, k, False), (v_out, v, True)):
            each = held[:, first - start :]
            if rotation is not None and rotation.in_values is turned:
                rotate_into(out, each, rotation, shift)
            else:
                out.copy_(each)

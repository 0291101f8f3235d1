"""K and V of passages in the blocks of an engine: whether they can stand there, and copies of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch

from quire.errors import NotRelocatable
from quire.tensors import KVLayout, gather_into
from quire.tensors.kinds import KVShape, kv_shapes, model_type
from quire_passages.hf.capture import PassageKV

if TYPE_CHECKING:
    from quire.core import Sequence
    from quire.engines.loop.computing import Forward


def refusal_of(forward: Forward) -> NotRelocatable | None:
    """Return why the blocks of an engine cannot take K and V as transformers caches them; None: they can."""
    name, layout = model_type(forward.model.model.config), forward.model.layout
    if not layout.is_full_attention or len(layout.groups) != 1:
        return NotRelocatable(
            f"{name} has layers with windows, whose blocks an engine gives back as it goes on: passages are placed "
            "in blocks of full attention alone; PrefixCache places them"
        )
    memory = cast("KVLayout", layout.groups[0].memory)
    blocks = KVShape(memory.kv_heads, memory.k_width, memory.v_width)
    if any(shape != blocks for shape in kv_shapes(forward.model.model.config)):
        return NotRelocatable(
            f"{name} caches latents, and an engine's blocks hold the heads that come of them; PrefixCache places "
            "its passages"
        )
    return None


def copied(forward: Forward, seq: Sequence, start: int, stop: int) -> PassageKV:
    """Return a copy of K and V of tokens `start` to `stop` of a sequence."""
    pool, model = forward.pools[0], forward.model.model
    memory = cast("KVLayout", forward.model.layout.groups[0].memory)
    made: dict[str, Any] = {"dtype": model.dtype, "device": model.device}
    layers = tuple(
        (
            torch.empty(memory.kv_heads, stop - start, memory.k_width, **made),
            torch.empty(memory.kv_heads, stop - start, memory.v_width, **made),
        )
        for _ in pool.k
    )
    gather_into(pool, seq.block_ids(0), stop, layers, start)
    return PassageKV(layers)

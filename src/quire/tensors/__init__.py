"""K and V, and recurrent states, as tensors.

kinds   what a transformers config says about a model's layers
layout  shapes and bytes per token, block and state
model   the layer groups of a model
slots   block ids and token slots, on the host
pool    paged storage on a device
copy    gather, scatter, planned copies of blocks, moves of single tokens
slot_pool   contiguous storage: a slot per request
payload     where a block's bytes lie in a record
quant       K and V in fewer bits
staging     between a device and host memory, in chunks
records     blocks as payloads of records, and back
transfers   blocks on their way to a device, layer after layer
"""

from quire.tensors.copy import (
    KV,
    apply_copies,
    apply_plan,
    gather,
    gather_into,
    scatter,
)
from quire.tensors.layout import KVLayout, StateLayout, StateShape
from quire.tensors.model import GroupLayout, ModelLayout
from quire.tensors.pool import KVPool, Pool, StatePool, make_pool
from quire.tensors.quant import Quantization
from quire.tensors.records import BlockCodec
from quire.tensors.slot_pool import SlotPool

__all__ = [
    "KV",
    "BlockCodec",
    "GroupLayout",
    "KVLayout",
    "KVPool",
    "ModelLayout",
    "Pool",
    "Quantization",
    "SlotPool",
    "StateLayout",
    "StatePool",
    "StateShape",
    "apply_copies",
    "apply_plan",
    "gather",
    "gather_into",
    "make_pool",
    "scatter",
]

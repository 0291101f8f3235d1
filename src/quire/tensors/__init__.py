"""K and V as tensors.

kinds   what a transformers config says about a model's KV
layout  shapes and bytes per token and block
slots   block ids and token slots, on the host
pool    paged storage on a device
copy    gather, scatter, and planned block copies
"""

from quire.tensors.copy import KV, apply_copies, gather, gather_into, scatter
from quire.tensors.layout import KVLayout
from quire.tensors.pool import KVPool

__all__ = ["KV", "KVLayout", "KVPool", "apply_copies", "gather", "gather_into", "scatter"]

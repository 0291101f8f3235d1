"""Which bytes of a payload are which tensor, from the words that its namespace has for it."""

from __future__ import annotations

import re
from math import prod

import msgspec

from quire.tiers.contents.tensor_file import ITEM_BYTES
from quire.tiers.format import Namespace

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}

_ENDIAN = ", little-endian"
_KV = re.compile(r"per layer K \[(\d+), (\d+), (\d+)\], V \[(\d+), (\d+), (\d+)\]")
_STATE = re.compile(r"([A-Za-z0-9_]+) \[([0-9, ]*)\] ([a-z0-9_]+)")


class Slice(msgspec.Struct, frozen=True):
    """Bytes `begin` to `end` of a payload as a tensor of a safetensors dtype."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def slices_of(namespace: Namespace | None, payload_bytes: int) -> list[Slice]:
    """Return the tensors of a payload, in order and without gaps.

    One of all bytes, "payloads", where the namespace is not known, speaks of another size, or has
    words that are not those of `quire.tensors.records` for numbers as a pool holds them.
    """
    if namespace is not None and namespace.layout.endswith(_ENDIAN):
        words = namespace.layout.removesuffix(_ENDIAN)
        shapes = _kv(namespace, words) or _states(namespace, words)
        slices: list[Slice] = []
        begin = 0
        for name, dtype, shape in shapes:
            end = begin + prod(shape) * ITEM_BYTES[dtype]
            slices.append(Slice(name, dtype, shape, begin, end))
            begin = end
        if slices and begin == payload_bytes and len({each.name for each in slices}) == len(slices):
            return slices
    return [Slice("payloads", "U8", (payload_bytes,), 0, payload_bytes)]


def _kv(namespace: Namespace, words: str) -> list[tuple[str, str, tuple[int, ...]]]:
    match = _KV.fullmatch(words)
    dtype = DTYPES.get(namespace.dtype)
    if match is None or dtype is None:
        return []
    numbers = tuple(map(int, match.groups()))
    return [
        (f"layers.{layer}.{name}", dtype, shape)
        for layer in namespace.layers
        for name, shape in (("k", numbers[:3]), ("v", numbers[3:]))
    ]


def _states(namespace: Namespace, words: str) -> list[tuple[str, str, tuple[int, ...]]]:
    layers = words.removeprefix("states ").split("; ")
    if layers[0] == words or len(layers) != len(namespace.layers):
        return []
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for layer, tensors in zip(namespace.layers, layers, strict=True):
        for tensor in tensors.split(" + "):
            match = _STATE.fullmatch(tensor)
            if match is None or match[3] not in DTYPES:
                return []
            shape = tuple(map(int, match[2].split(", "))) if match[2] else ()
            found.append((f"layers.{layer}.{match[1]}", DTYPES[match[3]], shape))
    return found

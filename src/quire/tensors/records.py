"""Blocks of a pool as payloads of records, and back."""

import sys
from collections.abc import Iterator, Sequence

import torch

from quire.errors import ConfigError
from quire.tensors.layout import KVLayout, StateLayout
from quire.tensors.payload import ExactForm, ExactKV, ExactStates, Filled, Ids, PayloadForm
from quire.tensors.pool import Pool
from quire.tensors.quant import Quantization, QuantizedKV
from quire.tensors.slots import BlockIds, block_array, on_device
from quire.tensors.staging import Staging

CHUNK_BYTES = {"cpu": 1 << 19, "cuda": 16 << 20}
"""So many bytes of payloads are packed at a time: on a CPU what fits its cache, else what hides a transfer's start."""


class BlockCodec:
    """Between blocks of one layer group's pool and payloads; see `quire.tensors.payload` for the bytes.

    `memory`  the group's `KVLayout` or `StateLayout`
    `dtype`   None stores the very bits of the pool; "fp8", "int8" and "int4" store K and V in
              fewer bits, see `quire.tensors.quant`. Recurrent states keep theirs: a state is a sum
              over all tokens before it, and rounding it would round all of them

    In host memory each byte is copied once. From and to a CUDA device blocks go in chunks through
    pinned memory, one copy per chunk, the next chunk being packed meanwhile; `decode` then
    returns when the last copy is queued on the current stream, and the buffers are free.

    One thread at a time, but where it only `copies`. Raises `ConfigError` for an unknown dtype.
    """

    def __init__(self, memory: KVLayout | StateLayout, dtype: str | None = None) -> None:
        self.memory = memory
        self.num_heads = memory.kv_heads if isinstance(memory, KVLayout) else 0
        self._form = _form(memory, dtype)
        self.payload_bytes = sum(self._form.layer_bytes)
        """Bytes of the payload of one block."""
        self._staging = Staging()

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len(self._form.layer_bytes)

    @property
    def layout_name(self) -> str:
        """The order of tensors in a payload, in words: `Namespace.layout`."""
        memory = self.memory
        if isinstance(memory, KVLayout):
            of = f"[{memory.block_size}, {memory.kv_heads}, "
            text = f"per layer K {of}{memory.k_width}], V {of}{memory.v_width}]"
        else:
            tensors = (
                " + ".join(
                    f"{tensor.name} {list(tensor.shape)} {_name(tensor.dtype)}" for tensor in layer
                )
                for layer in memory.layers
            )
            text = f"states {'; '.join(tensors)}"
        return f"{text}, {sys.byteorder}-endian"

    @property
    def dtype_name(self) -> str:
        """The type of the numbers in a payload, in words: `Namespace.dtype`."""
        if isinstance(self._form, QuantizedKV):
            return f"{self._form.kind} of {self._held_dtype}, K per channel, V per token"
        return self._held_dtype

    @property
    def dtype_code(self) -> str:
        """The same as the name of a `quire.tiers.format.DType`."""
        kind = self._form.kind if isinstance(self._form, QuantizedKV) else self._held_dtype
        return "FLOAT8" if kind.startswith(("float8", "fp8")) else kind.upper()

    def copies(self, pool: Pool) -> bool:
        """Whether payloads are plain copies from and to host memory: then any threads may `encode` and `decode`."""
        return isinstance(self._form, ExactForm) and pool.device.type == "cpu"

    def encode(
        self,
        pool: Pool,
        block_ids: BlockIds,
        buffers: Sequence[memoryview],
        filled: Filled = lambda _: None,
    ) -> None:
        """Write the payload of each block into its buffer, of exactly `payload_bytes`.

        `filled` is called once for each, with its index, when it is there.

        Raises `ConfigError`, with nothing written, for a pool of another layout, a block outside
        it, and buffers that do not fit.
        """
        ids = self._checked(pool, block_ids, buffers)
        if any(buffer.readonly for buffer in buffers):
            raise ConfigError("a buffer to write a payload into is read-only")
        if isinstance(self._form, ExactForm) and self.copies(pool):
            self._form.copy_out(pool, ids, buffers, filled)
            return
        self._staging.fetch(
            (self._form.pack(pool, on_device(ids[chunk], pool.device)), buffers[chunk])
            for chunk in _chunks(pool, self.payload_bytes, len(ids))
        )
        for at in range(len(ids)):
            filled(at)

    def decode(
        self,
        buffers: Sequence[memoryview],
        pool: Pool,
        block_ids: BlockIds,
        layer: int | None = None,
    ) -> None:
        """Write payloads into blocks; with `layer`, the group's i-th layer of them alone.

        The buffers are whole payloads in either case. Raises `ConfigError` as `encode` does, and
        for two payloads into one block.
        """
        ids = self._checked(pool, block_ids, buffers)
        if len(set(ids.tolist())) != len(ids):
            raise ConfigError("two payloads have the same block; it can hold one only")
        layers = self._layers(layer)
        form = self._form
        if isinstance(form, ExactForm) and self.copies(pool):
            form.copy_in(buffers, pool, ids, layers)
            return
        first, stop = form.span(layers)
        for chunk in _chunks(pool, stop - first, len(ids)):
            parts = [buffer[first:stop] for buffer in buffers[chunk]]
            rows = self._staging.send(parts, pool.device)
            form.unpack(rows, pool, on_device(ids[chunk], pool.device), layers)

    def wipe(self) -> None:
        """Overwrite the staging memory between device and host with zeros."""
        self._staging.wipe()

    def _layers(self, layer: int | None) -> range:
        if layer is None:
            return range(self.num_layers)
        if not 0 <= layer < self.num_layers:
            raise ConfigError(f"layer {layer} is not one of the group's {self.num_layers}")
        return range(layer, layer + 1)

    @property
    def _held_dtype(self) -> str:
        """The dtype of the pool, or "mixed"."""
        if isinstance(self.memory, KVLayout):
            return _name(self.memory.dtype)
        names = {_name(tensor.dtype) for layer in self.memory.layers for tensor in layer}
        return names.pop() if len(names) == 1 else "mixed"

    def _checked(self, pool: Pool, block_ids: BlockIds, buffers: Sequence[memoryview]) -> Ids:
        if pool.layout != self.memory:
            raise ConfigError(f"a pool of {pool.layout} and a codec for {self.memory} do not fit")
        ids = block_array(block_ids, pool.num_blocks)
        if len(ids) != len(buffers):
            raise ConfigError(f"{len(ids)} blocks and {len(buffers)} buffers; give one for each")
        for buffer in buffers:
            if buffer.nbytes != self.payload_bytes or buffer.itemsize != 1:
                raise ConfigError(
                    f"a buffer has {buffer.nbytes} bytes in items of {buffer.itemsize}; a payload "
                    f"takes {self.payload_bytes}, in items of 1"
                )
        return ids


def _form(memory: KVLayout | StateLayout, dtype: str | None) -> PayloadForm:
    kinds = [kind.value for kind in Quantization]
    if dtype is not None and dtype not in kinds:
        raise ConfigError(
            f"dtype {dtype!r} is not one of {', '.join(map(repr, kinds))} or None, which stores "
            "what the pool holds"
        )
    if isinstance(memory, StateLayout):
        return ExactStates(memory)
    return ExactKV(memory) if dtype is None else QuantizedKV(memory, Quantization(dtype))


def _chunks(pool: Pool, num_bytes: int, count: int) -> Iterator[slice]:
    step = max(1, CHUNK_BYTES.get(pool.device.type, 1 << 20) // num_bytes)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

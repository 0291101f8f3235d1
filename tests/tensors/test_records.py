"""Blocks as payloads and back: the bytes, heads, layers, and what is refused."""

import numpy as np
import pytest
import torch

from quire.errors import ConfigError
from quire.tensors import KVLayout, KVPool, StateLayout, StatePool, StateShape
from quire.tensors.records import BlockCodec
from quire.tiers.format import DType

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
STATES = StateLayout(
    (
        (
            StateShape("conv", (3, 5), torch.bfloat16),
            StateShape("sum", (2, 4), torch.float32),
        ),
        (StateShape("count", (), torch.float32),),
    )
)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def noisy(pool, seed=0):
    """Every bit pattern may occur, signalling NaNs included."""
    generator = torch.Generator().manual_seed(seed)
    held = (
        [pool.k, pool.v]
        if isinstance(pool, KVPool)
        else [each for layer in pool.layers for each in layer]
    )
    for tensor in held:
        shape = (*tensor.shape, tensor.element_size())
        random = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        tensor.copy_(random.view(tensor.dtype).reshape(tensor.shape))
    return pool


def payloads(codec, count):
    return [memoryview(bytearray(codec.payload_bytes)) for _ in range(count)]


def layout(dtype=torch.float16, heads=4, k_width=6, v_width=10):
    return KVLayout(3, heads, k_width, v_width, dtype, 5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_comes_back_to_the_last_bit(dtype):
    memory = layout(dtype)
    source, target = noisy(KVPool(memory, 9)), KVPool(memory, 9)
    codec = BlockCodec(memory)
    buffers = payloads(codec, 3)
    codec.encode(source, [4, 0, 7], buffers)
    codec.decode(buffers, target, [1, 2, 8])
    for name in ("k", "v"):
        got = getattr(target, name)[:, [1, 2, 8]]
        assert torch.equal(bits(got), bits(getattr(source, name)[:, [4, 0, 7]]))


@pytest.mark.parametrize("widths", [(8, 8), (7, 3), (1, 1)], ids=str)
def test_a_payload_is_k_then_v_of_each_layer(widths):
    memory = layout(torch.float8_e4m3fn, 2, *widths)
    pool = noisy(KVPool(memory, 4))
    codec = BlockCodec(memory)
    (buffer,) = payloads(codec, 1)
    codec.encode(pool, [2], [buffer])
    for layer in range(3):
        first, stop = codec._form.span(range(layer, layer + 1))
        wanted = bits(pool.k[layer, 2]).numpy().tobytes() + bits(pool.v[layer, 2]).numpy().tobytes()
        assert bytes(buffer[first:stop]) == wanted
    assert codec.payload_bytes == memory.bytes_per_block


def test_a_layer_of_a_record_is_read_alone():
    memory = layout()
    source, target = noisy(KVPool(memory, 4)), noisy(KVPool(memory, 4), seed=1)
    before = target.k.clone(), target.v.clone()
    codec = BlockCodec(memory)
    buffers = payloads(codec, 2)
    codec.encode(source, [0, 3], buffers)
    codec.decode(buffers, target, [2, 1], layer=1)
    assert torch.equal(bits(target.k[1, [2, 1]]), bits(source.k[1, [0, 3]]))
    assert torch.equal(bits(target.v[1, [2, 1]]), bits(source.v[1, [0, 3]]))
    for now, then in zip((target.k, target.v), before, strict=True):
        assert torch.equal(bits(now[[0, 2]]), bits(then[[0, 2]]))
        assert torch.equal(bits(now[1, [0, 3]]), bits(then[1, [0, 3]]))


def test_recurrent_states_come_back_to_the_last_bit():
    source, target = noisy(StatePool(STATES, 5)), StatePool(STATES, 5)
    codec = BlockCodec(STATES)
    buffers = payloads(codec, 2)
    codec.encode(source, [4, 1], buffers)
    assert bytes(buffers[0][:30]) == bits(source.layers[0][0][4]).numpy().tobytes()
    for layer in (0, 1):
        codec.decode(buffers, target, [0, 2], layer=layer)
    for mine, theirs in zip(source.layers, target.layers, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(bits(other[[0, 2]]), bits(one[[4, 1]]))


@pytest.mark.parametrize(
    "memory", [layout(), layout(torch.float8_e4m3fn, 3, 7, 1), STATES], ids=str
)
def test_packing_on_a_device_gives_the_same_bytes(memory):
    pool = noisy((KVPool if isinstance(memory, KVLayout) else StatePool)(memory, 6))
    codec = BlockCodec(memory)
    buffers = payloads(codec, 3)
    codec.encode(pool, [5, 0, 2], buffers)
    rows = codec._form.pack(pool, torch.tensor([5, 0, 2]))
    assert [bytes(buffer) for buffer in buffers] == [row.numpy().tobytes() for row in rows]
    again = noisy(type(pool)(memory, 6), seed=1)
    first, stop = codec._form.span(range(1, 2))
    codec._form.unpack(
        rows[:, first:stop].contiguous(), again, torch.tensor([1, 3, 4]), range(1, 2)
    )
    plain = noisy(type(pool)(memory, 6), seed=1)
    codec.decode(buffers, plain, [1, 3, 4], layer=1)
    for one, other in zip(
        codec._form.planes(again, range(2)), codec._form.planes(plain, range(2)), strict=True
    ):
        assert torch.equal(one.held, other.held)


def test_different_layouts_have_different_names():
    layouts = [
        layout(),
        layout(k_width=10, v_width=6),
        layout(torch.bfloat16),
        KVLayout(3, 4, 6, 10, torch.float16, 4),
        STATES,
        StateLayout((STATES.layers[0], STATES.layers[0])),
        StateLayout(STATES.layers[::-1]),
    ]
    codecs = [BlockCodec(memory) for memory in layouts]
    names = [(codec.layout_name, codec.dtype_name) for codec in codecs]
    assert len(set(names)) == len(names)
    assert codecs[0].layout_name == "per layer K [5, 4, 6], V [5, 4, 10], little-endian"
    assert codecs[-2].layout_name.startswith("states conv [3, 5] bfloat16 + sum [2, 4] float32; ")


def test_every_dtype_has_a_code_in_the_header():
    codes = [DType[BlockCodec(layout(dtype)).dtype_code] for dtype in DTYPES]
    assert codes == [
        DType.FLOAT32,
        DType.FLOAT16,
        DType.BFLOAT16,
        DType.FLOAT64,
        DType.FLOAT8,
    ]
    assert BlockCodec(STATES).dtype_code == "MIXED"


def test_encoding_no_blocks_does_nothing():
    pool, codec = KVPool(layout(), 2), BlockCodec(layout())
    codec.encode(pool, [], [])
    codec.decode([], pool, np.array([], dtype=np.int64))


@pytest.mark.parametrize(
    ("blocks", "sizes", "message"),
    [
        ([0, 9], (0, 0), "block id 9"),
        ([0], (0, 0), "1 blocks and 2 buffers"),
        ([0], (1,), "a payload takes"),
        ([0], (-1,), "a payload takes"),
    ],
)
def test_blocks_and_buffers_that_do_not_fit_are_refused_before_anything(blocks, sizes, message):
    pool, codec = noisy(KVPool(layout(), 4)), BlockCodec(layout())
    before = pool.k.clone()
    buffers = [memoryview(bytearray(codec.payload_bytes + more)) for more in sizes]
    with pytest.raises(ConfigError, match=message):
        codec.encode(pool, blocks, buffers)
    with pytest.raises(ConfigError, match=message):
        codec.decode(buffers, pool, blocks)
    assert not any(any(buffer) for buffer in buffers)
    assert torch.equal(bits(pool.k), bits(before))


def decoded(blocks, layer=None, dtype=torch.float16):
    pool, codec = KVPool(layout(dtype), 4), BlockCodec(layout())
    codec.decode(payloads(codec, len(blocks)), pool, blocks, layer=layer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: decoded([1, 1]), "two payloads"),
        (lambda: decoded([0], dtype=torch.bfloat16), "do not fit"),
        (lambda: decoded([0], layer=-1), "layer -1"),
        (lambda: decoded([0], layer=3), "layer 3"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_reason(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_buffer_that_cannot_be_written_is_refused_to_encode_and_read_to_decode():
    pool, codec = noisy(KVPool(layout(), 4)), BlockCodec(layout())
    frozen = memoryview(bytes(codec.payload_bytes))
    with pytest.raises(ConfigError, match="read-only"):
        codec.encode(pool, [0], [frozen])
    codec.decode([frozen], pool, [0])
    assert not bits(pool.k[:, 0]).any()

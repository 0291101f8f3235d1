"""Payloads from and to a CUDA device are those of host memory."""

import pytest
import torch

from quire.tensors import KVLayout, KVPool, StateLayout, StatePool, StateShape
from quire.tensors.records import BlockCodec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

MEMORY = KVLayout(4, 4, 32, 24, torch.bfloat16, 16)


def filled(num_blocks=40):
    pool = KVPool(MEMORY, num_blocks)
    generator = torch.Generator().manual_seed(0)
    pool.k.copy_(torch.randn(pool.k.shape, generator=generator))
    pool.v.copy_(torch.randn(pool.v.shape, generator=generator) * 30)
    pool.k[1, 3, 2, 1, 5] = torch.nan
    pool.v[2, 4, 0, 0, 0] = torch.inf
    device = KVPool(MEMORY, num_blocks, "cuda")
    device.k.copy_(pool.k)
    device.v.copy_(pool.v)
    return pool, device


def buffers_of(codec, count):
    return [memoryview(bytearray(codec.payload_bytes)) for _ in range(count)]


def bits(tensor):
    return tensor.cpu().contiguous().view(torch.uint8)


@pytest.fixture(params=[1 << 30, 200_000], ids=["one chunk", "chunks"])
def _chunks(request, monkeypatch):
    monkeypatch.setattr("quire.tensors.records.CHUNK_BYTES", {"cuda": request.param})


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("heads", [None, (1, 3)], ids=str)
@pytest.mark.parametrize("dtype", [None, "fp8", "int8", "int4"])
def test_a_device_writes_and_reads_the_bytes_of_host_memory(dtype, heads):
    host, device = filled()
    codec = BlockCodec(MEMORY, dtype, heads)
    ids = [*range(39, 20, -1), 3, 4]
    mine, theirs = buffers_of(codec, len(ids)), buffers_of(codec, len(ids))
    codec.encode(host, ids, theirs)
    codec.encode(device, ids, mine)
    assert [bytes(each) for each in mine] == [bytes(each) for each in theirs]
    for pool in (host, device):
        pool.k.zero_()
        pool.v.zero_()
        codec.decode(mine, pool, ids[::-1])
    assert torch.equal(device.k.cpu().isnan(), host.k.isnan())
    assert torch.equal(device.k.cpu().nan_to_num(), host.k.nan_to_num())
    assert torch.equal(device.v.cpu().nan_to_num(), host.v.nan_to_num())


@pytest.mark.usefixtures("_chunks")
def test_layers_are_read_one_by_one_on_a_stream_of_their_own():
    host, device = filled()
    codec = BlockCodec(MEMORY)
    ids = list(range(40))
    buffers = buffers_of(codec, 40)
    codec.encode(host, ids, buffers)
    device.k.zero_()
    device.v.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for layer in range(4):
            codec.decode(buffers, device, ids, layer)
    for buffer in buffers:  # they are the caller's again once `decode` has returned
        buffer[:] = bytes(len(buffer))
    side.synchronize()
    assert torch.equal(bits(device.k), bits(host.k))
    assert torch.equal(bits(device.v), bits(host.v))


def test_states_come_back_to_the_last_bit():
    memory = StateLayout(
        ((StateShape("conv", (3, 5), torch.bfloat16),), (StateShape("sum", (7,), torch.float32),))
    )
    pool = StatePool(memory, 5, "cuda")
    for layer in pool.layers:
        for held in layer:
            held.normal_()
    codec = BlockCodec(memory)
    buffers = buffers_of(codec, 2)
    codec.encode(pool, [4, 1], buffers)
    codec.decode(buffers, pool, [0, 2])
    for (held,) in pool.layers:
        assert torch.equal(bits(held[[0, 2]]), bits(held[[4, 1]]))

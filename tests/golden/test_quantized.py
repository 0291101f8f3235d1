"""Quantized payloads are a published format: they never change."""

import json
from pathlib import Path

import pytest
import torch

from quire.tensors import KVLayout, KVPool
from quire.tensors.records import BlockCodec

VECTORS = json.loads(Path(__file__).with_name("quantized.json").read_text(encoding="utf-8"))


def name_of(vector):
    return f"{vector['stored_as']} of {vector['dtype']}, {vector['heads']} heads"


def codec_and_pool(vector):
    dtype = getattr(torch, vector["dtype"])
    k_width, v_width = vector["widths"]
    memory = KVLayout(
        vector["layers"], vector["heads"], k_width, v_width, dtype, vector["block_size"]
    )
    return BlockCodec(memory, vector["stored_as"]), KVPool(memory, 2)


def numbers(text, like):
    held = torch.frombuffer(bytearray.fromhex(text), dtype=like.dtype)
    return held.view(like[:, 1].shape)


@pytest.mark.parametrize("vector", VECTORS, ids=name_of)
def test_payloads_equal_the_published_vectors(vector):
    codec, pool = codec_and_pool(vector)
    pool.k[:, 1] = numbers(vector["k"], pool.k)
    pool.v[:, 1] = numbers(vector["v"], pool.v)
    payload = bytearray(codec.payload_bytes)
    codec.encode(pool, [1], [memoryview(payload)])
    assert payload.hex() == vector["payload"]


@pytest.mark.parametrize("vector", VECTORS, ids=name_of)
def test_decoded_payloads_equal_the_published_vectors(vector):
    codec, pool = codec_and_pool(vector)
    codec.decode([memoryview(bytes.fromhex(vector["payload"]))], pool, [1])
    for held, text in ((pool.k, vector["k_back"]), (pool.v, vector["v_back"])):
        got, wanted = held[:, 1], numbers(text, held)
        assert torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(0), wanted.nan_to_num(0))

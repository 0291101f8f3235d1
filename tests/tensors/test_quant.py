"""K and V in fewer bits: how far they are from what was stored, and what never goes wrong."""

import pytest
import torch

from quire.errors import ConfigError
from quire.tensors import KVLayout, KVPool, StateLayout, StatePool, StateShape
from quire.tensors.quant import Quantization, dequantize, quantize
from quire.tensors.records import BlockCodec
from quire.tiers.format import DType

KINDS = list(Quantization)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WITH_MINIMUMS = [Quantization.INT8, Quantization.INT4]
# Relative L2 error over normally distributed numbers; keys with large channels fare no worse.
LIMITS = {Quantization.FP8: 0.03, Quantization.INT8: 0.006, Quantization.INT4: 0.11}


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def back(numbers, kind, dim=0):
    return dequantize(quantize(numbers, kind, dim))


def keys_and_values(dtype=torch.float16, heads=4, seed=0):
    """A pool whose keys have channels that are large in every token, as models' have."""
    pool = KVPool(KVLayout(3, heads, 32, 32, dtype, 16), 8)
    pool.k.copy_(random(*pool.k.shape, seed=seed))
    pool.k[..., 3] = pool.k[..., 3] * 2 + 40
    pool.k[..., 17] -= 25
    pool.v.copy_(random(*pool.v.shape, seed=seed + 1))
    return pool


def stored(codec, pool, ids):
    buffers = [memoryview(bytearray(codec.payload_bytes)) for _ in ids]
    codec.encode(pool, ids, buffers)
    return buffers


def relative(got, wanted):
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_comes_back_within_the_error_of_its_kind(kind, dtype):
    pool = keys_and_values(dtype)
    again = KVPool(pool.layout, 8)
    codec = BlockCodec(pool.layout, kind)
    codec.decode(stored(codec, pool, [0, 5, 6]), again, [1, 2, 7])
    assert relative(again.v[:, [1, 2, 7]], pool.v[:, [0, 5, 6]]) < LIMITS[kind]
    assert relative(again.k[:, [1, 2, 7]], pool.k[:, [0, 5, 6]]) < LIMITS[kind]


@pytest.mark.parametrize("kind", WITH_MINIMUMS)
def test_keys_with_large_channels_need_scales_per_channel(kind):
    keys = keys_and_values(torch.float32).k[0, 0]
    rest = [channel for channel in range(32) if channel not in (3, 17)]
    per_channel, per_token = back(keys, kind, 0), back(keys, kind, 2)
    assert relative(per_channel[..., rest], keys[..., rest]) < LIMITS[kind]
    assert relative(per_token[..., rest], keys[..., rest]) > 5 * LIMITS[kind]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", WITH_MINIMUMS)
def test_the_quantization_error_is_at_most_half_a_step(kind, dtype):
    numbers = random(16, 4, 8, dtype=dtype) * 100
    found = quantize(numbers, kind, 0)
    rounding = 2 * torch.finfo(dtype).eps * numbers.abs().double()
    difference = (dequantize(found).double() - numbers.double()).abs()
    assert (difference <= found.scales.double() * 0.5001 + rounding).all()


def test_fp8_is_off_by_a_sixteenth_at_most():
    numbers = random(16, 4, 8) * 100
    found = quantize(numbers, Quantization.FP8, 0)
    difference = (dequantize(found) - numbers).abs()
    assert (difference <= numbers.abs() / 16 + found.scales * 2**-10).all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_are_quantized_to_zeros(kind):
    assert not back(torch.zeros(16, 2, 4, dtype=torch.float16), kind).any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", WITH_MINIMUMS)
def test_constant_values_are_quantized_exactly(kind, dtype):
    numbers = random(1, 4, 8, dtype=dtype).expand(16, 4, 8)
    assert torch.equal(back(numbers, kind), numbers)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_a_nan_spoils_the_values_of_its_scale_alone(kind, bad):
    numbers = random(16, 4, 8, dtype=torch.float16)
    clean = back(numbers, kind)
    numbers[7, 1, 2] = bad
    found = back(numbers, kind)
    assert found[:, 1, 2].isnan().all()
    found[:, 1, 2] = clean[:, 1, 2]
    assert torch.equal(found, clean)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "ends"),
    [
        (torch.float16, (65504.0, -65504.0)),
        (torch.float16, (65504.0, 65472.0)),
        (torch.float16, (6e-8, -6e-8)),
        (torch.float16, (6e-8, 0.0)),
        (torch.bfloat16, (3.3e38, 3.2e38)),
        (torch.bfloat16, (1e-40, -1e-40)),
        (torch.float32, (1e-45, 0.0)),
        (torch.float64, (1e300, -1e300)),
    ],
    ids=str,
)
def test_numbers_at_the_ends_of_a_dtype_come_back_finite_and_near(kind, dtype, ends):
    numbers = torch.tensor(ends * 8, dtype=dtype).view(16, 1)
    found = back(numbers, kind)
    assert found.isfinite().all()
    assert relative(found, numbers) <= 0.07


def test_a_range_beyond_the_arithmetic_is_no_number():
    numbers = torch.tensor([[3e38], [-3e38]], dtype=torch.bfloat16)
    assert back(numbers, Quantization.INT8).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_storing_is_deterministic_and_what_came_back_changes_little_when_stored_again(kind):
    pool = keys_and_values()
    codec = BlockCodec(pool.layout, kind)
    first, second = stored(codec, pool, [2]), stored(codec, pool, [2])
    assert bytes(first[0]) == bytes(second[0])
    codec.decode(first, pool, [3])
    once = pool.k[:, 3].clone()
    codec.decode(stored(codec, pool, [3]), pool, [4])
    assert relative(pool.k[:, 4], once) < LIMITS[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_does_not_depend_on_the_blocks_beside_it(kind, monkeypatch):
    monkeypatch.setattr("quire.tensors.records.CHUNK_BYTES", {"cpu": 20_000})
    pool = keys_and_values()
    codec = BlockCodec(pool.layout, kind)
    together = stored(codec, pool, range(8))
    alone = [stored(codec, pool, [block])[0] for block in range(8)]
    assert [bytes(each) for each in together] == [bytes(each) for each in alone]


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_is_read_alone(kind):
    pool, again = keys_and_values(heads=3), keys_and_values(heads=3, seed=9)
    before = again.k.clone()
    codec = BlockCodec(pool.layout, kind)
    reference, payloads = KVPool(pool.layout, 8), stored(codec, pool, [0])
    codec.decode(payloads, reference, [0])
    codec.decode(payloads, again, [5], layer=2)
    assert torch.equal(again.k[2, 5], reference.k[2, 0])
    assert torch.equal(again.v[2, 5], reference.v[2, 0])
    assert torch.equal(again.k[:2], before[:2])


@pytest.mark.parametrize(("kind", "bits"), [("fp8", 9), ("int8", 10), ("int4", 6)])
def test_payloads_are_as_small_as_the_format_says(kind, bits):
    # 16 tokens share the scale of a channel, and the minimum: 1 or 2 bits per key. V: 128 wide.
    memory = KVLayout(2, 8, 128, 128, torch.bfloat16, 16)
    numbers = 2 * 16 * 8 * 128
    k = numbers * bits // 8
    v = numbers * {"fp8": 8, "int8": 8, "int4": 4}[kind] // 8
    v += 2 * 16 * 8 * 2 * (1 if kind == "fp8" else 2)
    assert BlockCodec(memory, kind).payload_bytes == k + v < memory.bytes_per_block * 0.61


def test_recurrent_states_keep_their_bits_whatever_k_and_v_are_stored_as():
    memory = StateLayout(((StateShape("sum", (4, 4), torch.float32),),))
    pool, again = StatePool(memory, 2), StatePool(memory, 2)
    pool.layers[0][0].copy_(random(2, 4, 4))
    codec = BlockCodec(memory, "int4")
    codec.decode(stored(codec, pool, [0]), again, [1])
    assert torch.equal(again.layers[0][0][1], pool.layers[0][0][0])
    assert codec.dtype_name == BlockCodec(memory).dtype_name == "float32"


def test_names_and_codes_tell_kinds_and_sources_apart():
    layouts = [KVLayout(2, 2, 8, 8, dtype) for dtype in FLOATS]
    names = {BlockCodec(memory, kind).dtype_name for memory in layouts for kind in (*KINDS, None)}
    assert len(names) == 16
    codes = [DType[BlockCodec(layouts[0], kind).dtype_code] for kind in KINDS]
    assert codes == [DType.FLOAT8, DType.INT8, DType.INT4]


def test_an_unknown_kind_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="'fp8', 'int8', 'int4' or None"):
        BlockCodec(KVLayout(1, 1, 4, 4, torch.float16), "int2")


def test_a_pool_of_8_bits_is_refused():
    with pytest.raises(ConfigError, match="8 bits already"):
        BlockCodec(KVLayout(1, 1, 4, 4, torch.float8_e4m3fn), "int4")

"""Blocks to payloads and back: speed beside a plain copy, sizes, and the error of fewer bits.

    python benchmarks/block_codec.py [--blocks 64]

CPU time on one thread, medians of 9 runs, MB of the pool's bytes per second. The error is that of the
KV which the model in `src/quire/assets` computes for a text of 1,024 bytes, over all layers and blocks.
"""

import argparse
import statistics
import time
from functools import partial
from pathlib import Path

import torch

from quire import demo_model
from quire.tensors import KVLayout, KVPool, scatter
from quire.tensors.records import BlockCodec
from quire.tiers.format import new_buffer

LAYOUTS = {
    "1 MiB": KVLayout(32, 8, 64, 64, torch.float16, 16),
    "256 KiB": KVLayout(8, 8, 64, 64, torch.bfloat16, 16),
    "16 KiB": KVLayout(4, 2, 32, 32, torch.float16, 16),
}
KINDS = (None, "fp8", "int8", "int4")
MODEL = demo_model()


def median_s(call, rounds=9):
    call()
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return statistics.median(times)


def speed(layout, count):
    pool = KVPool(layout, 2 * count)
    pool.k.normal_()
    pool.v.normal_()
    ids = torch.randperm(2 * count, generator=torch.Generator().manual_seed(0))[:count].numpy()
    size = layout.bytes_per_block
    source = memoryview(bytearray(size * count))
    targets = [new_buffer(size) for _ in range(count)]

    def copy():
        for index, target in enumerate(targets):
            target[:] = source[index * size : (index + 1) * size]

    mb = size * count / 1e6
    print(f"  copy: {mb / median_s(copy):,.0f} MB/s")
    for kind in KINDS:
        codec = BlockCodec(layout, kind)
        buffers = [new_buffer(codec.payload_bytes) for _ in range(count)]
        encode = median_s(partial(codec.encode, pool, ids, buffers))
        decode = median_s(partial(codec.decode, buffers, pool, ids))
        print(
            f"  {kind or 'exact'}: encode {mb / encode:,.0f} MB/s, decode {mb / decode:,.0f} MB/s, "
            f"payload {codec.payload_bytes / size:.3f} of the block"
        )


def error():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL)
    text = (Path(__file__).parents[1] / "README.md").read_bytes()[:1024]
    with torch.inference_mode():
        cache = model(torch.tensor([list(text)]), use_cache=True).past_key_values
    kv = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    heads, tokens, width = kv[0][0].shape
    layout = KVLayout(len(kv), heads, width, width, torch.bfloat16, 16)
    pool, again = KVPool(layout, tokens // 16), KVPool(layout, tokens // 16)
    ids = list(range(tokens // 16))
    scatter(pool, ids, 0, kv)
    for kind in KINDS[1:]:
        codec = BlockCodec(layout, kind)
        buffers = [memoryview(bytearray(codec.payload_bytes)) for _ in ids]
        codec.encode(pool, ids, buffers)
        codec.decode(buffers, again, ids)
        found = [
            float((new.double() - old.double()).norm() / old.double().norm())
            for new, old in ((again.k, pool.k), (again.v, pool.v))
        ]
        print(f"  {kind}: K {found[0]:.2%}, V {found[1]:.2%}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=64)
    count = parser.parse_args().blocks
    torch.set_num_threads(1)
    for name, layout in LAYOUTS.items():
        print(f"blocks of {name} ({layout.dtype})")
        speed(layout, count)
    print(f"relative error, {MODEL.name} in bfloat16")
    error()


if __name__ == "__main__":
    main()

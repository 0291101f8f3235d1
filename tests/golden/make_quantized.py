"""Write quantized.json: K and V of blocks, and their payloads in fewer bits.

They are computed here from the definition in `quire/tensors/quant.py`, number by number with
NumPy scalars, so that the file checks the code and not itself.
"""

import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("quantized.json")
HIGHEST = {"fp8": 448, "int8": 255, "int4": 15}
LAYERS, BLOCK = 2, 3


def bfloat16(value):
    """The nearest bfloat16 as its 16 bits, ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    if np.isnan(value):
        return 0x7FC0
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


class Half:
    """Numbers of one dtype, as integers of their bits."""

    def __init__(self, name):
        self.name = name
        self.size = 4 if name == "float32" else 2

    def bits(self, value):
        if self.name == "bfloat16":
            return bfloat16(value)
        kind, held = (np.float16, np.uint16) if self.size == 2 else (np.float32, np.uint32)
        return int(kind(value).view(held))

    def value(self, bits):
        if self.name == "bfloat16":
            return np.uint32(bits << 16).view(np.float32)
        if self.size == 2:
            return np.float32(np.uint16(bits).view(np.float16))
        return np.uint32(bits).view(np.float32)

    @property
    def nan(self):
        return {"float16": 0x7E00, "bfloat16": 0x7FC0, "float32": 0x7FC00000}[self.name]

    @property
    def largest(self):
        return {
            "float16": np.float32(65504),
            "bfloat16": self.value(0x7F7F),
            "float32": np.finfo(np.float32).max,
        }[self.name]


def e4m3(code):
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


MAGNITUDES = [e4m3(code) for code in range(0x7F)]  # 0x7F is NaN


def to_e4m3(value):
    sign = 0x80 if np.signbit(value) else 0
    distance = [abs(abs(float(value)) - each) for each in MAGNITUDES]
    nearest = min(distance)
    codes = [code for code, each in enumerate(distance) if each == nearest]
    return sign | next((code for code in codes if code % 2 == 0), codes[0])


def group(values, kind, half):
    """Return scale bits, minimum bits, codes, and what comes back, of numbers that share a scale."""
    highest = np.float32(HIGHEST[kind])
    low = np.float32(0) if kind == "fp8" else min(values)
    span = max(map(abs, values)) if kind == "fp8" else max(values) - low
    if any(np.isnan(values)) or not np.isfinite(span):
        return half.nan, 0, [0] * len(values), [half.nan] * len(values)
    scale = half.bits(span / highest)
    if half.value(scale) * highest < span:
        scale += 1
    step = half.value(scale)
    codes, back = [], []
    for value in values:
        ratio = (value - low) / (step or np.float32(1))
        if kind == "fp8":
            code = to_e4m3(np.clip(ratio, -highest, highest))
            found = np.float32(e4m3(code)) * step
        else:
            code = int(np.clip(np.round(ratio), 0, highest))
            found = np.float32(code) * step + low
        codes.append(code)
        back.append(half.bits(np.clip(found, -half.largest, half.largest)))
    return scale, half.bits(low), codes, back


def part(numbers, kind, half, axis):
    """Return the bytes of K (axis 0 shares) or V (axis 2) of a layer, and the bits that come back."""
    shape = numbers.shape
    back = np.empty(shape, dtype=object)
    codes = np.empty(shape, dtype=object)
    scales, lows = [], []
    kept = [length for dim, length in enumerate(shape) if dim != axis]
    for place in np.ndindex(*kept):
        where = [*place[:axis], slice(None), *place[axis:]]
        values = [half.value(bits) for bits in numbers[tuple(where)]]
        scale, low, codes[tuple(where)], back[tuple(where)] = group(values, kind, half)
        scales.append(scale)
        lows.append(low)
    data = b"".join(each.to_bytes(half.size, "little") for each in scales)
    if kind != "fp8":
        data += b"".join(each.to_bytes(half.size, "little") for each in lows)
    flat = list(codes.flatten())
    if kind == "int4":
        flat += [0] * (len(flat) % 2)
        flat = [low | high << 4 for low, high in zip(flat[::2], flat[1::2], strict=True)]
    return data + bytes(flat), back


def values_of(half, shape, seed):
    """Numbers with outliers, a constant and a zero channel, an infinity and a NaN."""
    random = np.random.default_rng(seed)
    values = random.normal(size=shape).astype(np.float32)
    values[..., 0] *= 37
    values[1, :, :, 1] = 1.625
    if shape[3] > 2:
        values[0, :, :, 2] = 0
    values[1, 0, 0, -1] = np.inf
    values[1, 2, -1, 0] = np.nan
    return np.array([half.bits(value) for value in values.flatten()], dtype=object).reshape(shape)


def hexed(numbers, half):
    return b"".join(each.to_bytes(half.size, "little") for each in numbers.flatten()).hex()


def vector(name, kind, heads, widths):
    half = Half(name)
    k, v = (
        values_of(half, (LAYERS, BLOCK, heads, width), seed)
        for seed, width in enumerate(widths, start=heads)
    )
    payload, k_back, v_back = b"", [], []
    for layer in range(LAYERS):
        for numbers, axis, back in ((k, 0, k_back), (v, 2, v_back)):
            data, found = part(numbers[layer], kind, half, axis)
            payload += data
            back.append(found)
    return {
        "dtype": name,
        "stored_as": kind,
        "layers": LAYERS,
        "block_size": BLOCK,
        "heads": heads,
        "widths": widths,
        "k": hexed(k, half),
        "v": hexed(v, half),
        "payload": payload.hex(),
        "k_back": hexed(np.stack(k_back), half),
        "v_back": hexed(np.stack(v_back), half),
    }


def main():
    with np.errstate(all="ignore"):
        vectors = [
            vector(name, kind, heads, widths)
            for name in ("float32", "float16", "bfloat16")
            for kind in HIGHEST
            for heads, widths in ((1, (3, 5)), (2, (4, 2)))
        ]
    FILE.write_text(json.dumps(vectors, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

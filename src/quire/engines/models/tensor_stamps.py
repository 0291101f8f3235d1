"""Stamps of tensors: where they lie, how often they were written, and a few of their values."""

from collections.abc import Sequence
from operator import attrgetter

import torch

NUM_SAMPLED = 8
"""Values of each tensor that are looked at in every call."""

Sizes = tuple[int, ...]
Place = tuple[int, int, Sizes, Sizes]
"""Address, version (torch counts writes in place in it), shape and strides of a tensor."""

Sample = list[tuple[int, tuple[int], tuple[int]]]
"""Sampled values of tensors of one dtype and device: index, number of values, step between them."""

_version, _shape, _dtype = map(attrgetter, ("_version", "shape", "dtype"))


def writes_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
    """Return the addresses of tensors, and their versions."""
    try:
        versions = list(map(_version, tensors))
    except RuntimeError:  # torch counts no writes to tensors made in inference mode
        versions = [0 if each.is_inference() else _version(each) for each in tensors]
    return list(map(torch.Tensor.data_ptr, tensors)), versions


def forms_of(tensors: Sequence[torch.Tensor]) -> tuple[list[Sizes], list[Sizes], list[torch.dtype]]:
    """Return the shapes of tensors, their strides, and their types."""
    strides = map(torch.Tensor.stride, tensors)
    return list(map(_shape, tensors)), list(strides), list(map(_dtype, tensors))


def samples_of(tensors: Sequence[torch.Tensor]) -> list[Sample]:
    """Return the indices of the sampled values of each tensor.

    They are evenly spaced, or on the diagonal of a tensor that is not contiguous.
    """
    samples: dict[tuple[torch.dtype, torch.device], Sample] = {}
    for index, tensor in enumerate(tensors):
        num_values = tensor.numel()
        if not num_values or tensor.is_meta or tensor.layout != torch.strided:
            continue
        num, between = min(num_values, NUM_SAMPLED), NUM_SAMPLED - 1
        step = (num_values - 1) // max(num - 1, 1)
        if not tensor.is_contiguous():
            num = NUM_SAMPLED
            sides = zip(tensor.shape, tensor.stride(), strict=True)
            step = sum((size - 1) // between * stride for size, stride in sides)
        samples.setdefault((tensor.dtype, tensor.device), []).append((index, (num,), (step,)))
    return list(samples.values())


def values_of(tensors: Sequence[torch.Tensor], samples: list[Sample]) -> list[bytes]:
    """Return the sampled values as bytes, read at once for each dtype and device."""
    with torch.inference_mode():
        values = [
            torch.cat([tensors[index].as_strided(size, step) for index, size, step in sample])
            for sample in samples
        ]
        return [each.view(torch.uint8).cpu().numpy().tobytes() for each in values]


def stamps_of(tensors: Sequence[torch.Tensor]) -> list[tuple[Place, bytes]]:
    """Return the place and the sampled values of each tensor."""
    sampled, samples = [b""] * len(tensors), samples_of(tensors)
    for sample, data in zip(samples, values_of(tensors, samples), strict=True):
        start = 0
        for index, (num,), _ in sample:
            stop = start + num * tensors[index].itemsize
            sampled[index], start = data[start:stop], stop
    shapes, strides, _ = forms_of(tensors)
    places = zip(*writes_of(tensors), shapes, strides, strict=True)
    return list(zip(places, sampled, strict=True))

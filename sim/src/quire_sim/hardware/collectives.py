"""Messages between the devices that share a model: the real throughput of the link."""

from __future__ import annotations

from math import log2

from quire_sim.hardware.accelerators import Accelerator

DIRECT_SHARE, HOST_SHARE = 0.7, 0.25
"""Shares of a link's bandwidth that collectives reach: peers with a link of their own, and messages
that pass through the host's memory, written and read there by both sides at once."""

DIRECT_HOP_S, HOST_HOP_S = 5e-6, 10e-6
"""Seconds of a message however small, for each doubling of the devices and once more."""


def all_reduce_s(accelerator: Accelerator, num_devices: int, num_bytes: float) -> float:
    """Return the seconds in which each device has the sum of all: twice the work of a gather."""
    return _latency_s(accelerator, num_devices) + 2 * _transfer_s(
        accelerator, num_devices, num_bytes
    )


def gather_s(accelerator: Accelerator, num_devices: int, num_bytes: float) -> float:
    """Return the seconds in which each device has all parts of `num_bytes`, or the sum of one part."""
    return _latency_s(accelerator, num_devices) + _transfer_s(accelerator, num_devices, num_bytes)


def _latency_s(accelerator: Accelerator, num_devices: int) -> float:
    if num_devices == 1:
        return 0.0
    hop_s = DIRECT_HOP_S if accelerator.peers_directly else HOST_HOP_S
    return hop_s * (1 + log2(num_devices))


def _transfer_s(accelerator: Accelerator, num_devices: int, num_bytes: float) -> float:
    share = DIRECT_SHARE if accelerator.peers_directly else HOST_SHARE
    return (num_devices - 1) / num_devices * num_bytes / (accelerator.peer_bandwidth * share)

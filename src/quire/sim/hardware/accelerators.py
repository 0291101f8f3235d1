"""Accelerators as five numbers, from the makers' data sheets."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from quire.config import read_bytes
from quire.errors import ConfigError
from quire.sim.distributions import check_positive
from quire.sim.names import plain, unknown

GB, TB = 10**9, 10**12


class Accelerator(msgspec.Struct, frozen=True):
    """A device that computes, and its memory.

    `peak_flops`        dense bf16 FLOPs per second, without sparsity
    `bandwidth`         bytes per second of its memory
    `memory_bytes`      its memory
    `link_bandwidth`    bytes per second from or to the host, in one direction
    `peer_bandwidth`    bytes per second to its peers, in one direction; equals `link_bandwidth`
                        where there is no link of their own
    `peer_latency_s`    seconds that one message between peers takes at least
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: int
    link_bandwidth: float
    peer_bandwidth: float
    peer_latency_s: float = 10e-6

    def __post_init__(self) -> None:
        for field in (
            "peak_flops",
            "bandwidth",
            "memory_bytes",
            "link_bandwidth",
            "peer_bandwidth",
        ):
            check_positive(f"{field} of {self.name!r}", getattr(self, field))


# bf16 TFLOP/s without sparsity, TB/s, memory (marketed as GB; devices report about as many GiB), and
# GB/s per direction of the host link (PCIe x16) and of the link between peers (NVLink, Infinity
# Fabric). Data sheets: NVIDIA H100 (SXM5), H200, DGX B200, A100 (SXM4 80 GB and 40 GB), L4, L40S,
# A10; AMD Instinct MI300X.
_TABLE: dict[str, tuple[float, float, int, int, int]] = {
    "h100": (989.5, 3.35, 80, 64, 450),
    "h100-pcie": (756, 2.0, 80, 64, 64),
    "h200": (989.5, 4.8, 141, 64, 450),
    "b200": (2250, 8.0, 180, 64, 900),
    "gb200": (2500, 8.0, 186, 450, 900),
    "a100": (312, 2.039, 80, 32, 300),
    "a100-40gb": (312, 1.555, 40, 32, 300),
    "l4": (121, 0.3, 24, 32, 32),
    "l40s": (362, 0.864, 48, 32, 32),
    "a10g": (70, 0.6, 24, 32, 32),
    "mi300x": (1307.4, 5.3, 192, 64, 448),
    "mi325x": (1307.4, 6.0, 256, 64, 448),
}
_OTHER_NAMES = {"h100-sxm": "h100", "h100-80gb": "h100", "a100-80gb": "a100", "a100-sxm": "a100"}


def cpu() -> Accelerator:
    """Return a guess at this machine's CPU: 20 GFLOP/s a core and 10 GB/s. Calibrate before believing it."""
    cores = os.cpu_count() or 1
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Accelerator("cpu", cores * 20 * GB, 10 * GB, memory_bytes, 10 * GB, 10 * GB)


def accelerator_named(name: str) -> Accelerator:
    """Return a known accelerator, or the one that a JSON file with the fields of one describes.

    Raises `ConfigError`, for an unknown name with those that resemble it.
    """
    if name.endswith(".json"):
        return _read(Path(name).expanduser())
    wanted = plain(name)
    for prefix in ("nvidia-", "amd-", "instinct-"):
        wanted = wanted.removeprefix(prefix)
    wanted = _OTHER_NAMES.get(wanted, wanted)
    if wanted == "cpu":
        return cpu()
    if wanted not in _TABLE:
        instead = "describe yours in a .json file with the fields of Accelerator"
        raise unknown("accelerator", name, accelerator_names(), instead)
    tflops, tb_per_s, gib, link, peer = _TABLE[wanted]
    return Accelerator(wanted, tflops * TB, tb_per_s * TB, gib << 30, link * GB, peer * GB)


def accelerator_names() -> list[str]:
    """Return the names of all known accelerators."""
    return [*_TABLE, "cpu"]


def _read(path: Path) -> Accelerator:
    try:
        return msgspec.json.decode(read_bytes(path), type=Accelerator)
    except msgspec.DecodeError as error:
        fields = ", ".join(Accelerator.__struct_fields__)
        raise ConfigError(f"{str(path)!r} describes no accelerator ({fields}): {error}") from error

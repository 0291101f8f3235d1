"""Accelerators as five numbers, from the makers' data sheets."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from quire.errors import ConfigError
from quire.sim.hardware.names import plain, unknown

GB, TB = 10**9, 10**12

Links = tuple[float, float]


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
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
            value = getattr(self, field)
            if not value > 0:
                raise ConfigError(f"{field} of {self.name!r} is {value}; it is above 0")


def _gpu(name: str, tflops: float, tb_per_s: float, gib: int, links: Links) -> Accelerator:
    return Accelerator(
        name=name,
        peak_flops=tflops * TB,
        bandwidth=tb_per_s * TB,
        memory_bytes=gib << 30,
        link_bandwidth=links[0] * GB,
        peer_bandwidth=links[1] * GB,
    )


# bf16 TFLOP/s without sparsity, TB/s, memory (marketed as GB; devices report about as many GiB), and
# GB/s per direction of the host link (PCIe x16) and
# of the link between peers (NVLink, Infinity Fabric). Data sheets: NVIDIA H100 (SXM5), H200, DGX
# B200, A100 (SXM4 80 GB and 40 GB), L4, L40S, A10; AMD Instinct MI300X; Google TPU v5e.
_TABLE = (
    _gpu("h100", 989.5, 3.35, 80, (64, 450)),
    _gpu("h100-pcie", 756, 2.0, 80, (64, 64)),
    _gpu("h200", 989.5, 4.8, 141, (64, 450)),
    _gpu("b200", 2250, 8.0, 180, (64, 900)),
    _gpu("gb200", 2500, 8.0, 186, (450, 900)),
    _gpu("a100", 312, 2.039, 80, (32, 300)),
    _gpu("a100-40gb", 312, 1.555, 40, (32, 300)),
    _gpu("l4", 121, 0.3, 24, (32, 32)),
    _gpu("l40s", 362, 0.864, 48, (32, 32)),
    _gpu("a10g", 70, 0.6, 24, (32, 32)),
    _gpu("mi300x", 1307.4, 5.3, 192, (64, 448)),
    _gpu("mi325x", 1307.4, 6.0, 256, (64, 448)),
)
_BY_NAME = {each.name: each for each in _TABLE}
_OTHER_NAMES = {"h100-sxm": "h100", "h100-80gb": "h100", "a100-80gb": "a100", "a100-sxm": "a100"}


def cpu(num_cores: int | None = None, memory_bytes: int | None = None) -> Accelerator:
    """Return a guess at a CPU: 20 GFLOP/s a core and 10 GB/s. Calibrate before believing it.

    Cores and memory are this machine's where they are not given.
    """
    cores = num_cores or os.cpu_count() or 1
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Accelerator(
        name="cpu",
        peak_flops=cores * 20 * GB,
        bandwidth=10 * GB,
        memory_bytes=memory_bytes,
        link_bandwidth=10 * GB,
        peer_bandwidth=10 * GB,
    )


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
    if wanted not in _BY_NAME:
        instead = "describe yours in a .json file with the fields of Accelerator"
        raise unknown("accelerator", name, accelerator_names(), instead)
    return _BY_NAME[wanted]


def accelerator_names() -> list[str]:
    """Return the names of all known accelerators."""
    return [*_BY_NAME, "cpu"]


def _read(path: Path) -> Accelerator:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Accelerator)
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        fields = ", ".join(Accelerator.__struct_fields__)
        raise ConfigError(f"{str(path)!r} describes no accelerator ({fields}): {error}") from error

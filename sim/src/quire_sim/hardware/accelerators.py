"""Accelerators as a few numbers, from the makers' data sheets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from quire.config import memory_bytes, read_bytes
from quire.errors import ConfigError
from quire_sim.distributions import check_positive
from quire_sim.names import plain, unknown

GB, TB = 10**9, 10**12


class Accelerator(msgspec.Struct, frozen=True):
    """A device that computes, and its memory.

    `peak_flops`        dense bf16 FLOPs per second with 32-bit sums, without sparsity
    `bandwidth`         bytes per second of its memory
    `memory_bytes`      its memory, as its driver reports it
    `link_bandwidth`    bytes per second from or to the host, in one direction
    `peer_bandwidth`    bytes per second to its peers, in one direction; equals `link_bandwidth`
                        where there is no link of their own, so that messages pass the host
    `unit_flops`        what its matrix units could compute: above the peak where 32-bit sums are
                        held to half of their rate, as on consumer cards; 0 is the peak
    `fp8_flops`         dense 8-bit FLOPs per second; 0 where it computes with 16 bits at least
    `packs_heads`       its attention kernels share K and V among the query heads of a KV head in steps
                        with prompts too: FlashAttention 3 and later, and AMD's; FlashAttention 2 does not
    """

    name: str
    peak_flops: float
    bandwidth: float
    memory_bytes: int
    link_bandwidth: float
    peer_bandwidth: float
    unit_flops: float = 0.0
    fp8_flops: float = 0.0
    packs_heads: bool = False

    def __post_init__(self) -> None:
        for field in (
            "peak_flops",
            "bandwidth",
            "memory_bytes",
            "link_bandwidth",
            "peer_bandwidth",
        ):
            check_positive(f"{field} of {self.name!r}", getattr(self, field))

    @property
    def peers_directly(self) -> bool:
        """Whether peers have a link of their own, past the host."""
        return self.peer_bandwidth > self.link_bandwidth


class DataSheet(NamedTuple):
    """A row of the table: TFLOP/s, TB/s, GiB that the driver reports, GB/s of both links."""

    bf16: float
    bandwidth: float
    gib: float
    link: int
    peer: int
    fp8: float = 0.0
    units: float = 0.0


# bf16 TFLOP/s with 32-bit sums and without sparsity, TB/s, memory as the driver reports it to a
# program, and GB/s per direction of the host link (PCIe x16) and of the link between peers (NVLink,
# Infinity Fabric; PCIe again where there is none), then fp8 TFLOP/s and those of the matrix units
# where sums in 32 bits halve them. From the makers' data sheets and architecture papers.
_TABLE: dict[str, DataSheet] = {
    "h100": DataSheet(989.5, 3.35, 79.2, 64, 450, 1979),
    "h100-pcie": DataSheet(756, 2.0, 79.2, 64, 64, 1513),
    "h100-nvl": DataSheet(835, 3.94, 93.1, 64, 300, 1671),
    "h200": DataSheet(989.5, 4.8, 139.8, 64, 450, 1979),
    "h20": DataSheet(148, 4.0, 95.1, 64, 450, 296),
    "gh200": DataSheet(989.5, 4.0, 94.5, 450, 450, 1979),
    "b200": DataSheet(2250, 8.0, 178.4, 64, 900, 4500),
    "gb200": DataSheet(2500, 8.0, 184.0, 450, 900, 5000),
    "a100": DataSheet(312, 2.039, 79.2, 32, 300),
    "a100-40gb": DataSheet(312, 1.555, 39.4, 32, 300),
    "a100-pcie": DataSheet(312, 1.935, 79.2, 32, 32),
    "v100": DataSheet(125, 0.9, 31.7, 16, 150),
    "t4": DataSheet(65, 0.32, 14.6, 16, 16),
    "l4": DataSheet(121, 0.3, 22.0, 32, 32, 242),
    "l20": DataSheet(119.5, 0.864, 44.4, 32, 32, 239),
    "l40": DataSheet(181, 0.864, 44.4, 32, 32, 362),
    "l40s": DataSheet(362, 0.864, 44.4, 32, 32, 733),
    "a10": DataSheet(125, 0.6, 22.1, 32, 32),
    "a10g": DataSheet(70, 0.6, 22.1, 32, 32),
    "a30": DataSheet(165, 0.933, 23.5, 32, 32),
    "a40": DataSheet(149.7, 0.696, 44.4, 32, 32),
    "rtx-a5000": DataSheet(111.1, 0.768, 23.6, 32, 32),
    "rtx-a6000": DataSheet(154.8, 0.768, 47.5, 32, 32),
    "rtx-6000-ada": DataSheet(364.2, 0.96, 47.5, 32, 32, 728),
    "rtx-pro-6000": DataSheet(503.8, 1.597, 95.0, 64, 64, 1007),
    "rtx-pro-6000-workstation": DataSheet(503.8, 1.792, 95.0, 64, 64, 1007),
    "rtx-3090": DataSheet(71, 0.936, 23.7, 32, 32, 0, 142),
    "rtx-4080": DataSheet(97.5, 0.717, 15.6, 32, 32, 195, 195),
    "rtx-4090": DataSheet(165.2, 1.008, 23.52, 32, 32, 330.3, 330.3),
    "rtx-5090": DataSheet(209.5, 1.792, 31.4, 64, 64, 419, 419),
    "mi210": DataSheet(181, 1.638, 64.0, 32, 150),
    "mi250x": DataSheet(191.5, 1.638, 64.0, 32, 200),
    "mi300x": DataSheet(1307.4, 5.3, 192.0, 64, 448, 2614.9),
    "mi325x": DataSheet(1307.4, 6.0, 256.0, 64, 448, 2614.9),
    "mi355x": DataSheet(2516.6, 8.0, 288.0, 64, 538, 5033.2),
}
_OTHER_NAMES = {
    "a100-sxm4-40gb": "a100-40gb", "a100-pcie-40gb": "a100-40gb", "a100-80gb-pcie": "a100-pcie",
    "rtx-6000": "rtx-6000-ada", "rtx-6000-ada-generation": "rtx-6000-ada",
    "rtx-pro-6000-blackwell": "rtx-pro-6000", "a6000": "rtx-a6000", "a5000": "rtx-a5000",
    "gh200-480gb": "gh200", "rtx-pro-6000-blackwell-workstation-edition": "rtx-pro-6000-workstation",
    "rtx-pro-6000-blackwell-max-q-workstation-edition": "rtx-pro-6000-workstation",
}  # fmt: skip
_PACKING = ("h100", "h200", "h20", "gh200", "b200", "gb200", "mi")
_BRANDS = ("nvidia-", "amd-", "instinct-", "geforce-", "tesla-")
_ENDINGS = re.compile(
    r"-(sxm\d*|hbm\d*e?|\d+gb?|tensor-core-gpu|gpu|server-edition|max-q-workstation-edition|"
    r"workstation-edition|blackwell|graphics|oam|vf)$"
)
_COMPACT = re.compile(r"^(?P<head>rtx-?(?:pro-?)?a?)(?P<number>\d{4})")


def cpu() -> Accelerator:
    """Return a guess at this machine's CPU: 20 GFLOP/s a core and 10 GB/s. Calibrate before believing it."""
    cores = os.cpu_count() or 1
    return Accelerator("cpu", cores * 20 * GB, 10 * GB, memory_bytes(), 10 * GB, 10 * GB)


def accelerator_named(name: str) -> Accelerator:
    """Return a known accelerator, or the one that a JSON file with the fields of one describes.

    Raises `ConfigError`, for an unknown name with those that resemble it.
    """
    if name.endswith(".json"):
        return _read(Path(name).expanduser())
    wanted = _table_name(name)
    if wanted == "cpu":
        return cpu()
    if wanted not in _TABLE:
        instead = "describe yours in a .json file with the fields of Accelerator"
        raise unknown("accelerator", name, accelerator_names(), instead)
    row = _TABLE[wanted]
    return Accelerator(
        wanted,
        row.bf16 * TB,
        row.bandwidth * TB,
        round(row.gib * (1 << 30)),
        row.link * GB,
        row.peer * GB,
        row.units * TB,
        row.fp8 * TB,
        wanted.startswith(_PACKING),
    )


def accelerator_names() -> list[str]:
    """Return the names of all known accelerators."""
    return [*_TABLE, "cpu"]


def _table_name(name: str) -> str:
    """Return the name in the table that a driver's, a cloud's or a person's name may mean.

    Brands, kinds of boards and memory sizes go, one by one, as long as what is left is not known.
    """
    wanted = plain(name)
    for brand in _BRANDS:
        wanted = wanted.removeprefix(brand)
    wanted = _COMPACT.sub(_spaced, wanted)
    while wanted not in _TABLE:
        shorter = _OTHER_NAMES.get(wanted) or _ENDINGS.sub("", wanted)
        if shorter == wanted:
            break
        wanted = shorter
    return wanted


def _spaced(found: re.Match[str]) -> str:
    """Return the begin of a card's name with its parts apart: `rtxpro6000` is `rtx-pro-6000`."""
    words = [part for part in ("rtx", "pro") if part in found["head"]]
    return "-".join([*words, "a" * found["head"].endswith("a") + found["number"]])


def _read(path: Path) -> Accelerator:
    try:
        return msgspec.json.decode(read_bytes(path), type=Accelerator)
    except msgspec.DecodeError as error:
        fields = ", ".join(Accelerator.__struct_fields__)
        raise ConfigError(f"{str(path)!r} describes no accelerator ({fields}): {error}") from error

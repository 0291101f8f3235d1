"""Tiers of memory below the device: how much they hold, and how fast they give it back."""

from __future__ import annotations

import re

import msgspec

from quire.config import format_bytes, parse_bytes
from quire.errors import ConfigError

_TIER = re.compile(r"(?P<name>[\w.-]+)=(?P<size>[^@]+)@(?P<speed>[^@,]+?)/s(?:@(?P<wait>[^@]+))?")
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
LATENCY_S = {"host": 20e-6, "disk": 200e-6}
"""Latency of tiers by name, where none is given; 1 ms for others."""


class MemoryTier(msgspec.Struct, frozen=True):
    """A place that cached blocks are fetched from. Bandwidth is bytes per second towards the device."""

    name: str
    capacity_bytes: int
    bandwidth: float
    latency_s: float = 1e-3

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1 or not self.bandwidth > 0 or not self.latency_s >= 0:
            raise ConfigError(
                f"tier {self.name!r} has {self.capacity_bytes} bytes at {self.bandwidth} bytes/s and "
                f"{self.latency_s} s latency; bytes and bandwidth are above 0, latency not below"
            )

    def fetch_s(self, num_bytes: float) -> float:
        """Return the seconds that fetching takes."""
        return self.latency_s + num_bytes / self.bandwidth

    def __str__(self) -> str:
        size, speed = format_bytes(self.capacity_bytes), format_bytes(int(self.bandwidth))
        return f"{self.name}={size}@{speed}/s"

    @classmethod
    def parse(cls, text: str) -> MemoryTier:
        """Read `host=256GiB@50GB/s`, or `disk=2TiB@6GB/s@100us` with a latency.

        Raises `ConfigError`.
        """
        match = _TIER.fullmatch(text.strip())
        if match is None:
            raise ConfigError(
                f"{text!r} is not a tier; write name=size@speed, for example host=256GiB@50GB/s, "
                "or with a latency disk=2TiB@6GB/s@100us"
            )
        name, wait = match["name"], match["wait"]
        latency_s = parse_seconds(wait, text) if wait else LATENCY_S.get(name, 1e-3)
        return cls(name, parse_bytes(match["size"]), parse_bytes(match["speed"]), latency_s)


def parse_tiers(text: str) -> list[MemoryTier]:
    """Read tiers separated by commas, fastest first. Raises `ConfigError`."""
    tiers = [MemoryTier.parse(each) for each in text.split(",") if each.strip()]
    names = [each.name for each in tiers]
    if len(dict.fromkeys(names)) < len(names):
        raise ConfigError(f"two tiers of {text!r} have the same name; each needs its own")
    return tiers


def parse_seconds(text: str, whole: str) -> float:
    """Return the seconds of `100us`, `2ms` or `1.5s`, a part of `whole`. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text.strip())
    if match is None:
        raise ConfigError(f"{text!r} in {whole!r} is no time; write for example 100us or 2ms")
    return float(match[1]) * _TIME[match[2]]

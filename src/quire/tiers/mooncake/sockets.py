"""Sockets of Mooncake: a probe of its master, and listeners of its clients that are kept to this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias

from quire.errors import ConfigError, TierError
from quire.tiers.addresses import described

Settings: TypeAlias = tuple[str, str, int, int, str, str, str]
"""What the library's `setup` takes: host, metadata, bytes to give, bytes of its buffer, protocol, devices, master."""

_PROBE = """
import os, sys
from mooncake.store import MooncakeDistributedStore
host, metadata, protocol, devices, master = sys.argv[1:]
store = MooncakeDistributedStore()
os._exit(1 if store.setup(host, metadata, 0, 1 << 20, protocol, devices, master) else 0)
"""

_BIND_TO_DEVICE = 25
"""SO_BINDTODEVICE of Linux, which `socket` names only from Python 3.12 on."""


def address_of(master: str) -> tuple[str, int]:
    """Return host and port of `host:port`. Raises `ConfigError` for anything else."""
    host, _, port = str(master).rpartition(":")
    if not host or not port.isdecimal():
        seen = described("master", master)
        raise ConfigError(f"master: {seen}; give host:port, for instance '127.0.0.1:50051'")
    return host.strip("[]"), int(port)


def check_master(settings: Settings, timeout_s: float) -> None:
    """Raise `TierError` where no master answers in time.

    A process of its own tries to join: where the master hangs, the library would stop all of Python for minutes.
    """
    master = settings[-1]
    deadline = time.monotonic() + timeout_s
    try:
        socket.create_connection(address_of(master), timeout=timeout_s).close()
    except (OSError, OverflowError) as error:
        raise TierError(f"no Mooncake master at {master}: {error}") from error
    words = (settings[0], settings[1], settings[4], settings[5], master)
    try:
        result = subprocess.run(  # noqa: S603 - our own interpreter and code
            [sys.executable, "-c", _PROBE, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=max(0.1, deadline - time.monotonic()),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TierError(
            f"{master} takes connections, but does not answer as a Mooncake master within {timeout_s} s"
        ) from error
    if result.returncode:
        lines = result.stderr.decode(errors="replace").strip().splitlines()
        raise TierError(
            f"Mooncake cannot join {master} as {settings[0]!r}: {lines[-1] if lines else 'no reason given'}"
        )


def is_loopback(host: str) -> bool:
    """Return whether an address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def open_listeners() -> dict[str, int]:
    """Return the sockets of this process that listen on all interfaces: their names in /proc, and descriptors."""
    found: dict[str, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:") and _listens_everywhere(int(entry.name)):
                found[name] = int(entry.name)
    return found


def keep_to_loopback(before: dict[str, int]) -> int:
    """Let the listeners that came since answer on the loopback device only; return how many.

    The kernel then drops what arrives elsewhere. Raises `OSError` where it does not allow that.
    """
    new = [fd for name, fd in open_listeners().items() if name not in before]
    for fd in new:
        with socket.socket(fileno=os.dup(fd)) as copy:
            copy.setsockopt(socket.SOL_SOCKET, _BIND_TO_DEVICE, b"lo\0")
    return len(new)


def _listens_everywhere(fd: int) -> bool:
    with socket.socket(fileno=os.dup(fd)) as copy:
        return (
            copy.family in (socket.AF_INET, socket.AF_INET6)
            and copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            and copy.getsockname()[0] in ("0.0.0.0", "::")  # noqa: S104 - looked for, not bound
        )

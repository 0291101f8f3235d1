"""The virtual environment the peers are measured in, apart from quire's own.

`prepare` makes it (2.4 GB on a machine without a GPU) and installs each peer with its dependencies
left out, then only the packages that the imports of its cache modules ask for. The peers pin
different versions of most of their dependencies and could not be installed side by side otherwise.
A marker file per peer makes a second call a matter of milliseconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FOLDER = Path(".venv-peers")
INSTALL_TIMEOUT_S = 1_800

TORCH = ("torch==2.13.0", "numpy==2.4.6")
"""Installed first and kept: an unpinned torch would pull gigabytes of GPU libraries."""

NOT_PUBLISHED = {
    "nano-vllm": "no distribution of this name in the package registry (checked November 2026)",
    "mini-sglang": "no distribution of this name in the package registry (checked November 2026)",
}
"""Peers that are wanted and cannot be installed, and why."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Peer:
    """A peer's distribution, installed without dependencies, and what its cache modules import."""

    name: str
    version: str
    bare: tuple[str, ...]
    needs: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """The distribution pinned, as pip reads it."""
        return f"{self.name}=={self.version}"


SGLANG = Peer(
    name="sglang",
    version="0.5.23",
    bare=(),
    needs=(
        "anyio",
        "msgspec",
        "orjson",
        "packaging",
        "pillow",
        "psutil",
        "pybase64",
        "pydantic",
        "pyzmq",
        "requests",
        "starlette",
        "tqdm",
    ),
)
VLLM = Peer(
    name="vllm",
    version="0.33.0",
    bare=("xgrammar",),  # its own dependencies include a GPU compiler of a gigabyte
    needs=(
        "aiohttp",
        "apache-tvm-ffi",
        "cachetools",
        "cbor2",
        "cloudpickle",
        "fastapi",
        "llguidance",
        "msgspec",
        "openai",
        "openai-harmony",
        "partial-json-parser",
        "pillow",
        "prometheus-client",
        "psutil",
        "py-cpuinfo",
        "pyzmq",
        "regex",
        "requests",
        "transformers==5.19.0",
        "uvloop",
    ),
)
LMCACHE = Peer(
    name="lmcache",
    version="0.5.6",
    bare=(),
    needs=(
        "aiofile",
        "aiofiles",
        "aiohttp",
        "blake3",
        "cachetools",
        "cryptography",
        "httpx",
        "msgspec",
        "numba",
        "opentelemetry-exporter-prometheus",
        "opentelemetry-sdk",
        "prometheus-client",
        "psutil",
        "py-cpuinfo",
        "pyyaml",
        "pyzmq",
        "redis",
        "requests",
        "sortedcontainers",
    ),
)
PEERS = {peer.name: peer for peer in (SGLANG, VLLM, LMCACHE)}


@dataclass(frozen=True)
class Prepared:
    """An environment: its interpreter, what is installed, and what is not with the reason."""

    python: Path
    installed: dict[str, str]
    missing: dict[str, str]


def prepare(
    folder: Path = DEFAULT_FOLDER,
    *,
    names: tuple[str, ...] = tuple(PEERS),
    progress: Progress | None = None,
) -> Prepared:
    """Make `folder` if it is missing, install the peers in `names`, and say what is there."""
    report = progress or _silent
    python = folder.absolute() / "bin" / "python"
    installed: dict[str, str] = {}
    missing = dict(NOT_PUBLISHED)
    for name in names:
        peer = PEERS[name]
        marker = folder / f".installed-{name}.json"
        versions = _read(marker)
        if versions.get(name) != peer.version:
            try:
                versions = _install(peer, folder, python, report)
            except (subprocess.SubprocessError, OSError) as error:
                missing[name] = _reason(error)
                report(f"{name} is not installed: {missing[name]}")
                continue
            marker.write_text(json.dumps(versions, indent=1), encoding="utf-8")
        installed[name] = versions[name]
    return Prepared(python=python, installed=installed, missing=missing)


def absent(folder: Path = DEFAULT_FOLDER, *, names: tuple[str, ...] = tuple(PEERS)) -> list[str]:
    """Return which of the peers in `names` `prepare` would have to download."""
    return [name for name in names if not _is_there(PEERS[name], folder)]


def _is_there(peer: Peer, folder: Path) -> bool:
    return _read(folder / f".installed-{peer.name}.json").get(peer.name) == peer.version


def _install(peer: Peer, folder: Path, python: Path, report: Progress) -> dict[str, str]:
    if not python.exists():
        report(f"making {folder}")
        _run([sys.executable, "-m", "venv", str(folder)])
    report(f"installing {peer.requirement}; the first peer takes minutes")
    _pip(python, *TORCH)
    _pip(python, *TORCH, *peer.needs)
    _pip(python, "--no-deps", peer.requirement, *peer.bare)
    listing = json.loads(_run([str(python), "-m", "pip", "list", "--format", "json"]))
    return {package["name"].lower(): package["version"] for package in listing}


def _pip(python: Path, *arguments: str) -> None:
    _run([str(python), "-m", "pip", "install", "--quiet", *arguments])


def _run(command: list[str]) -> str:
    done = subprocess.run(  # noqa: S603  # commands built from the constants above
        command, capture_output=True, text=True, check=True, timeout=INSTALL_TIMEOUT_S
    )
    return done.stdout


def _read(marker: Path) -> dict[str, str]:
    try:
        return json.loads(marker.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _reason(error: subprocess.SubprocessError | OSError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in str(error.stderr).splitlines() if line.startswith("ERROR")]
        return lines[-1] if lines else f"pip ended with status {error.returncode}"
    return str(error)


def _silent(_: str) -> None:
    return

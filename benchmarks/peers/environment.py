"""The virtual environment that peers are measured in, apart from quire's own.

    python benchmarks/peers/environment.py [sglang vllm lmcache]

Makes `.venv-peers` in the working directory (2.4 GB on a machine without a GPU; minutes) and installs each peer with its
dependencies left out, then only the packages that the imports of its cache modules ask for: the peers pin different
versions of most of their dependencies and could not be installed side by side otherwise. A second call takes no time.

mini-sglang and nano-vllm have no distribution in the package registry (November 2026), so they are not measured.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(".venv-peers")
TORCH = ("torch==2.13.0", "numpy==2.4.6")
"""Installed first and kept: an unpinned torch would pull gigabytes of GPU libraries."""


@dataclass(frozen=True)
class Peer:
    """A peer's distribution, what is installed bare beside it, and what its cache modules import."""

    version: str
    needs: str
    bare: tuple[str, ...] = ()


PEERS = {
    "sglang": Peer(
        "0.5.23",
        "anyio msgspec orjson packaging pillow psutil pybase64 pydantic pyzmq requests starlette tqdm xxhash",
    ),
    "vllm": Peer(
        "0.33.0",
        "aiohttp apache-tvm-ffi cachetools cbor2 cloudpickle fastapi llguidance msgspec openai openai-harmony "
        "partial-json-parser pillow prometheus-client psutil py-cpuinfo pyzmq regex requests transformers==5.19.0 uvloop",
        bare=("xgrammar",),  # its own dependencies include a GPU compiler of a gigabyte
    ),
    "lmcache": Peer(
        "0.5.6",
        "aiofile aiofiles aiohttp blake3 cachetools cryptography httpx msgspec numba opentelemetry-exporter-prometheus "
        "opentelemetry-sdk prometheus-client psutil py-cpuinfo pyyaml pyzmq redis requests sortedcontainers",
    ),
}


def python() -> Path:
    """Return the environment's interpreter."""
    return FOLDER.absolute() / "bin" / "python"


def lacks(name: str) -> str:
    """Return why a peer cannot be measured; an empty text where it can."""
    if _marker(name).exists() and _marker(name).read_text("utf-8") == PEERS[name].version:
        return ""
    return f"not installed: python benchmarks/peers/environment.py {name}"


def install(name: str) -> None:
    """Install a peer at its version, unless it is there."""
    if not lacks(name):
        return
    peer = PEERS[name]
    if not python().exists():
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
    pip = [str(python()), "-m", "pip", "install", "--quiet"]
    print(f"installing {name} {peer.version}; the first peer takes minutes", file=sys.stderr)
    subprocess.run([*pip, *TORCH], check=True)
    subprocess.run([*pip, *TORCH, *peer.needs.split()], check=True)
    subprocess.run([*pip, "--no-deps", f"{name}=={peer.version}", *peer.bare], check=True)
    _marker(name).write_text(peer.version, "utf-8")


def _marker(name: str) -> Path:
    return FOLDER / f".installed-{name}"


if __name__ == "__main__":
    for wanted in sys.argv[1:] or PEERS:
        install(wanted)

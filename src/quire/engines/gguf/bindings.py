"""Libraries of llama.cpp that come with installed Python bindings."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

PACKAGES = {"llama_cpp": "llama-cpp-python", "llama_cpp_py_sync": "llama-cpp-py-sync"}
"""Modules of bindings, the one that is tried first before others, and the packages that have them."""

DECLARATIONS = "_cffi_bindings.py"
"""The file of a binding that has the text of `llama.h`, beside its library."""

_TRIED = """
import sys
from pathlib import Path
from quire.engines.gguf.library import LlamaLibrary
from quire.errors import ConfigError
try:
    LlamaLibrary(Path(sys.argv[1]))
except ConfigError as error:
    print(error)
"""
_PATIENCE_S = 60.0


def installed(file: str) -> Iterator[tuple[str, Path, str]]:
    """Yield package, library and why it cannot be used, empty for nothing, of each binding; none is imported.

    file  the name of a library
    """
    for module, package in PACKAGES.items():
        spec = find_spec(module)
        for folder in (spec and spec.submodule_search_locations) or ():
            places = [Path(folder) / "lib" / file, Path(folder) / file]
            found = [each for each in places if each.is_file()]
            if found:
                yield package, found[0], _why_not(found[0])
            else:
                yield package, places[0], f"{folder} has no {file}"


def _why_not(path: Path) -> str:
    """Return why a library cannot be used; a process of its own loads it, as one that was loaded stays."""
    command = [sys.executable, "-c", _TRIED, str(path)]
    try:
        ran = subprocess.run(  # noqa: S603 - this interpreter
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=_PATIENCE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"loading {path} took more than {_PATIENCE_S:g} s"
    said, errors = (each.decode("utf-8", "replace") for each in (ran.stdout, ran.stderr))
    if ran.returncode:
        *_, last = ["no error was told", *errors.splitlines()]
        return f"the process that loaded {path} ended with code {ran.returncode}: {last}"
    return said.strip()

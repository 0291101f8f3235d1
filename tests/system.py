"""Servers, system libraries and real models that some tests need and a fresh machine lacks.

A test says what it needs: `@pytest.mark.system("redis-server")`. It is skipped where that is missing, with the
command that installs it; with `--require-system` it fails instead. `conftest.py` counts both.
"""

import shutil
import subprocess
import sys
from functools import cache, partial

import pytest

import real_models

MENDED_BY = "`make system` installs it, as root or through sudo"


def _on_path(*names: str) -> str | None:
    return next(filter(None, map(shutil.which, names)), None)


def redis_server() -> str | None:
    return _on_path("redis-server", "valkey-server")


def prometheus() -> str | None:
    return _on_path("prometheus")


def chromium() -> str | None:
    return _on_path("chromium", "chromium-browser", "google-chrome")


def openssl() -> str | None:
    return _on_path("openssl")


def compiler() -> str | None:
    return _on_path("g++")


@cache
def mooncake() -> str | None:
    """Where Mooncake's native module is, None where it cannot be loaded: it links to system libraries."""
    code = "import mooncake.store; print(mooncake.store.__file__)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    return loaded.stdout.strip() or None


@cache
def llama_cpp() -> str | None:
    """Where the library of llama.cpp is, None where none can be loaded."""
    from quire.engines.gguf.library import load
    from quire.errors import ConfigError

    try:
        return str(load().path)
    except ConfigError:
        return None


def real(name: str) -> str | None:
    return None if real_models.missing(name) else str(real_models.kept_at(name))


NEEDS = {
    "redis-server": (redis_server, "redis-server"),
    "prometheus": (prometheus, "prometheus"),
    "chromium": (chromium, "chromium"),
    "openssl": (openssl, "openssl"),
    "g++": (compiler, "g++"),
    "mooncake": (mooncake, "libibverbs1 libnuma1 libcurl4"),
    "llama.cpp": (llama_cpp, ""),
}
"""By name: what finds it, and Debian's packages that have it."""
NEEDS |= {name: (partial(real, name), "") for name in real_models.MODELS}


def missing(name: str) -> str | None:
    """Why a test that needs `name` cannot run here, None where it can."""
    find, packages = NEEDS[name]
    if find() is not None:
        return None
    if name in real_models.MODELS:
        return real_models.missing(name)
    if name == "llama.cpp":
        return "the library of llama.cpp is missing: `make llama` builds it"
    return f"{name} is missing: {MENDED_BY} (apt-get install {packages})"


def need(name: str) -> str:
    """The path of what a test's mark says it needs."""
    path = NEEDS[name][0]()
    if path is None:
        pytest.fail(f"{missing(name)}; the test lacks @pytest.mark.system({name!r})")
    return path

"""Extras of the package: their libraries, and the use of each."""

from importlib.util import find_spec
from typing import NamedTuple

from quire.errors import ConfigError

DISTRIBUTION = "quire-kv"

CLONE = "in a clone of quire"
"""The place of all installation: nothing is published."""

DISTRIBUTIONS = {
    "PIL": "pillow",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "prometheus_client": "prometheus-client",
    "zmq": "pyzmq",
}
"""The packages that are not called as what is imported."""


class Extra(NamedTuple):
    """An extra: all that it brings, as it is imported, and what it is for."""

    modules: tuple[str, ...]
    purpose: str


_CLI = ("xxhash", "typer", "rich")
_HF = (
    *(*_CLI, "torch", "transformers", "safetensors", "jinja2"),
    *("llvmlite", "llguidance", "peft", "PIL"),
)
_OBSERVE = ("prometheus_client", "zmq")
_WEB = ("starlette", "uvicorn", "httptools", "openai", "httpx")

EXTRAS = {
    "cli": Extra(_CLI, "the commands that run no model"),
    "hf": Extra(_HF, "PrefixCache, the engine, quire generate"),
    "gguf": Extra((*_HF, "gguf", "accelerate"), "the same for models in GGUF files"),
    "serve": Extra((*_HF, *_OBSERVE, *_WEB), "quire serve, quire demo and every other command"),
    "tiers": Extra(("xxhash",), "tiers for vLLM, SGLang or an engine of your own"),
    "redis": Extra(("xxhash", "redis"), "KV in Redis and Valkey"),
    "objects": Extra(("xxhash", "obstore", "boto3"), "KV in object stores"),
    "mooncake": Extra(("xxhash", "mooncake"), "KV in a Mooncake store"),
    "observe": Extra(_OBSERVE, "metrics for Prometheus, KV events of running engines"),
    "ray": Extra(("ray",), "sweeps and replicas on Ray"),
}

COMMANDS = {
    "bench passages": "quire-passages",
    "bench serve": "quire-sim",
    "calibrate": "quire-sim",
    "passages": "quire-passages",
    "curve": "quire-sim",
    "lint": "quire-sim",
    "plan": "quire-sim",
    "replay": "quire-sim",
    "route": "quire-router",
    "simulate": "quire-sim",
    "tap": "quire-sim",
    "trace": "quire-sim",
}
"""The commands that other packages bring, with the package of each."""


def require(extra: str, what: str) -> None:
    """Raise `ConfigError` unless all that an extra brings is installed; nothing is imported."""
    missing = [name for name in EXTRAS[extra].modules if find_spec(name) is None]
    if missing:
        raise ConfigError(lacking(what, " and ".join(missing), extra))


def lacking(what: str, module: str, extra: str) -> str:
    """Return the message for something that needs a library which is not installed."""
    return f"{what} needs {module}: {install(extra)}"


def lacking_package(what: str, package: str) -> str:
    """Return the message for something that another package of quire brings, which is not installed."""
    folder = package.removeprefix("quire-")
    return f"{what} comes with {package}, which is not installed: pip install ./{folder} {CLONE}"


def install(extra: str) -> str:
    """Return the command that installs an extra beside the quire that is there."""
    return f"pip install '.[{extra}]' {CLONE}"


def extra_of(module: str | None) -> str | None:
    """Return the smallest extra that brings a module; None for one that none brings."""
    name = (module or "").partition(".")[0]
    found = [extra for extra, brings in EXTRAS.items() if name in brings.modules]
    return min(found, key=lambda extra: len(EXTRAS[extra].modules), default=None)

"""Extras of the package: their libraries, and the use of each."""

from importlib.util import find_spec
from typing import NamedTuple

from quire.errors import ConfigError

DISTRIBUTION = "quire-kv"

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
_HF = ("xxhash", "torch", "transformers", "safetensors", "jinja2")
_RUN = tuple(dict.fromkeys((*_CLI, *_HF)))
_SERVE = (*_RUN, "llvmlite", "prometheus_client", "starlette", "uvicorn", "httptools")

EXTRAS = {
    "cli": Extra(_CLI, "the commands that run no model"),
    "demo": Extra(
        (*_SERVE, "openai", "httpx"), "all commands: demo, generate, serve, bench hf, too"
    ),
    "torch": Extra(("torch",), "block pools in tensors"),
    "hf": Extra(_HF, "PrefixCache, and its tiers in memory and on disk"),
    "tiers": Extra(("xxhash",), "tiers for an engine of your own"),
    "redis": Extra(("xxhash", "redis"), "KV in Redis and Valkey"),
    "objects": Extra(("xxhash", "obstore"), "KV in object stores"),
    "versions": Extra(("xxhash", "obstore", "boto3"), "purging old versions in S3"),
    "mooncake": Extra(("xxhash", "mooncake"), "KV in a Mooncake store"),
    "report": Extra((*_CLI, "matplotlib", "jinja2"), "--report: pages and pictures"),
    "zstd": Extra(("zstandard",), "traces in zstd"),
    "ray": Extra(("ray",), "sweeps on Ray"),
    "metrics": Extra(("prometheus_client",), "metrics for Prometheus"),
    "events": Extra(("zmq",), "KV events of running engines"),
    "engine": Extra((*_HF, "llvmlite"), "the engine at its full speed on a CPU"),
    "serve": Extra(_SERVE, "quire serve"),
    "route": Extra((*_CLI, "starlette", "uvicorn", "httptools", "httpx"), "quire route"),
    "replicas": Extra((*_SERVE, "zmq", "ray"), "quire serve --replicas"),
    "guided": Extra((*_HF, "llguidance"), "answers that match a JSON schema or a regex"),
    "images": Extra((*_RUN, "PIL"), "generate --image"),
    "lora": Extra((*_RUN, "peft"), "generate --lora"),
    "gguf": Extra((*_RUN, "gguf", "accelerate"), "models in GGUF files"),
}

COMMANDS = {
    "bench passages": "quire-passages",
    "bench serve": "quire-sim",
    "calibrate": "quire-sim",
    "passages": "quire-passages",
    "curve": "quire-sim",
    "plan": "quire-sim",
    "replay": "quire-sim",
    "route": "quire-router",
    "simulate": "quire-sim",
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
    return f"{what} comes with {package}, which is not installed: pip install {package}"


def install(extra: str) -> str:
    """Return the command that installs an extra beside the quire that is there."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def extra_of(module: str | None) -> str | None:
    """Return the smallest extra that brings a module; None for one that none brings."""
    name = (module or "").partition(".")[0]
    found = [extra for extra, brings in EXTRAS.items() if name in brings.modules]
    return min(found, key=lambda extra: len(EXTRAS[extra].modules), default=None)

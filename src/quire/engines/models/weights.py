"""The identity of KV: the contents of weights and adapters, never their names."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import file_digest, sha256
from pathlib import Path

import msgspec

from quire.config import user_cache
from quire.errors import ConfigError

WEIGHTS = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors"))
"""Endings of files that hold weights."""

CONFIGS = frozenset(("config.json", "adapter_config.json", "params.json"))
"""Files beside them that say what they mean; so do those whose names begin with `quant` or `hf_quant`."""

SETTLED_S = 2.0
"""A file that changed less than this ago is read again next time: its time might not show one more change."""

THREADS = 4


class ReadFile(msgspec.Struct, frozen=True):
    """A file as it was when it was read: what `stat` said of it, and its SHA-256."""

    stat: tuple[int, int, int, int]
    digest: str


class FileDigests:
    """SHA-256 of files, each read again only when size, time of change, or place has changed.

    `kept_at`  a JSON file that remembers them from one process to the next; None: nowhere
    """

    def __init__(self, kept_at: Path | None = None) -> None:
        self._kept_at = kept_at
        self._kept: dict[str, ReadFile] = {}
        if kept_at is not None:
            with suppress(OSError, msgspec.DecodeError):  # read anew then
                self._kept = msgspec.json.decode(kept_at.read_bytes(), type=dict[str, ReadFile])

    def of(self, files: Iterable[Path]) -> dict[str, str]:
        """Return the digests of files by name. Raises `ConfigError` for one that cannot be read."""
        paths = sorted(files)
        before = dict(self._kept)
        try:
            with ThreadPoolExecutor(THREADS) as pool:
                digests = list(pool.map(self._one, paths))
        except OSError as error:
            raise ConfigError(
                f"weights cannot be read, so nothing says what KV is of: {error}"
            ) from None
        if self._kept != before:
            self._keep()
        return {path.name: digest for path, digest in zip(paths, digests, strict=True)}

    def _one(self, path: Path) -> str:
        name = str(path.resolve())
        while True:
            stat = stat_of(path)
            known = self._kept.get(name)
            if known is not None and known.stat == stat:
                return known.digest
            with path.open("rb") as file:
                digest = file_digest(file, "sha256").hexdigest()
            if stat_of(path) == stat:
                break
        if time.time_ns() - max(stat[1:3]) > SETTLED_S * 1e9:
            self._kept[name] = ReadFile(stat, digest)
        return digest

    def _keep(self) -> None:
        if self._kept_at is None:
            return
        with suppress(OSError):  # then they are read again
            self._kept_at.parent.mkdir(parents=True, exist_ok=True)
            new = self._kept_at.with_suffix(f".{os.getpid()}")
            new.write_bytes(msgspec.json.encode(self._kept))
            new.replace(self._kept_at)


def stat_of(path: Path) -> tuple[int, int, int, int]:
    """Return size, times of change of content and of anything (ns), and the inode of a file."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def default_kept_at() -> Path:
    """Return where digests are kept: `quire/digests.json` in the user's cache directory."""
    return user_cache() / "digests.json"


def weight_files(place: Path) -> list[Path]:
    """Return the files of a checkpoint or adapter that decide what it computes.

    Raises `ConfigError` where there are no weights.
    """
    if place.is_file():
        return [place]
    files = sorted(place.iterdir()) if place.is_dir() else []
    if not any(each.suffix in WEIGHTS for each in files):
        raise ConfigError(
            f"no weights in {str(place)!r}, so nothing says what KV is of; name them in "
            '"kv_connector_extra_config": {"weights": "..."}, another name for each change of them'
        )
    return [each for each in files if _decides(each)]


def _decides(path: Path) -> bool:
    name = path.name
    return (
        path.suffix in WEIGHTS
        or path.suffix == ".py"
        or name in CONFIGS
        or (path.suffix == ".json" and name.startswith(("quant", "hf_quant")))
    )


def fingerprint(facts: Mapping[str, object]) -> str:
    """Return the digest of what decides what KV means: facts by name, as JSON says them."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return sha256(b"quire-vllm-1" + text.encode()).hexdigest()


class Adapters:
    """FileDigests of LoRA adapters by their number in vLLM, as they were when they were first used.

    vLLM keeps an adapter as it was loaded. So one whose files have changed since, and that is not said to be loaded
    anew for each request (`load_inplace`), has no digest: nobody can say which of the two computed.
    """

    def __init__(self, digests: FileDigests) -> None:
        self._digests = digests
        self._known: dict[int, tuple[tuple[tuple[int, int, int, int], ...], str]] = {}

    def digest(self, number: int, place: str, *, in_place: bool = False) -> str | None:
        """Return the digest of an adapter's contents; None where that is not certain."""
        try:
            files = weight_files(Path(place))
            stats = tuple(map(stat_of, files))
            known = self._known.get(number)
            if known is not None and known[0] == stats:
                return known[1]
            if known is not None and not in_place:
                return None
            digest = fingerprint(self._digests.of(files))
        except (ConfigError, OSError):
            return None
        self._known[number] = stats, digest
        return digest

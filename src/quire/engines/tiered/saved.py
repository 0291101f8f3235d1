"""A whole cache as a directory: the records of its blocks, and the texts that they are of.

    path/prefixes      what was cached, as msgpack: see `Manifest`
    path/records/...   a `quire.tiers.files.Files` directory

The texts are the prompts themselves, and the scopes with their salts: keep such a directory as you would keep those.
"""

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from quire.core.tokens import IntArray
from quire.engines.tiered.store import TieredStore
from quire.errors import ConfigError, QuireError, TierError
from quire.exchange.export import all_blocks, prefixes
from quire.media import MediaItem
from quire.scope import Scope
from quire.tiers.base import Outcome
from quire.tiers.files import Files
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

Over = Callable[[TierStack], TieredStore]
"""Makes a store of some cache over other tiers."""

PUT_TIMEOUT_S = 600.0
MAX_MANIFEST_BYTES = 1 << 32
_MOST_NAMED, _MOST_SHOWN = 4, 60


class SavedPrefix(msgspec.Struct, frozen=True):
    """A text as it is written: tokens as little-endian int32, and the rest as `Prefix` has it.

    `scope`: salt, lora, model and tenant, each text, bytes, an integer or nothing.
    """

    tokens: bytes
    scope: tuple[Any, Any, Any, Any]
    media: list[MediaItem]
    ends: list[int]


class Manifest(msgspec.Struct, frozen=True, tag="quire-saved-2"):
    """The description of a saved cache.

    `namespaces`  those of the parts, as hexadecimal digests
    `facts`       what decides them, by names that people know: weights, entries of the config
    """

    model: str
    block_size: int
    namespaces: list[str]
    prefixes: list[SavedPrefix]
    facts: dict[str, str]


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of loading a saved cache.

    `num_tokens` are in the cache now, of `num_saved_tokens` saved; `causes` counts the reasons for the others.
    """

    num_tokens: int
    num_saved_tokens: int
    causes: dict[str, int] = field(default_factory=dict[str, int])


def save_to(path: str | os.PathLike[str], over: Over, facts: dict[str, str]) -> int:
    """Write all that is cached into a directory, with facts of its model; return its records.

    A cache saved there before is replaced when the new one is complete. Raises `ConfigError` for
    a directory that holds anything else, and `TierError` where it cannot be written.
    """
    target = Path(path).absolute()
    if target.exists() and not _is_saved(target):
        raise ConfigError(f"{target} exists and is no saved cache; name another place")
    fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        fresh.mkdir(parents=True, mode=0o700)
        with TierStack([Files(fresh / "records")]) as stack:
            store = over(stack)
            count = _write_records(stack, store)
        (fresh / "prefixes").write_bytes(msgspec.msgpack.encode(_manifest(store, facts)))
        old = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        if target.exists():
            target.rename(old)
        fresh.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise TierError(f"cannot save to {target}: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return count


def load_saved(
    path: str | os.PathLike[str], over: Over, facts: Callable[[], dict[str, str]]
) -> Loaded:
    """Bring a saved cache into a manager and its pools, as far as they have room; that used last stays.

    Raises `ConfigError` for a directory that is no saved cache, and for one of another model, block size
    or layout. Records that are damaged are left out, with what follows them.
    """
    source = Path(path).absolute()
    manifest = _read(source)
    settings = StackSettings(
        read_only=True, promote=False, gate=False, load_timeout_s=60.0, lookup_timeout_s=60.0
    )
    num_tokens, num_saved, causes = 0, 0, Counter[str]()
    with TierStack([Files(source / "records")], settings) as stack:
        store = over(stack)
        _check_same(source, manifest, store, facts)
        own = {public: model for model, public in store.digests.public.items()}
        for prefix in manifest.prefixes:
            saved = Scope(*prefix.scope)
            scope = replace(saved, model=own.get(saved.model, saved.model))
            tokens = np.frombuffer(prefix.tokens, "<i4").astype(np.int32)
            num_saved += tokens.size
            for end in prefix.ends:
                text, media = _head(tokens, prefix.media, end * manifest.block_size)
                came = store.onboard(np.append(text, np.int32(0)), scope, media)
                num_tokens += sum(came.tokens.values())
                causes.update(came.causes)
    return Loaded(num_tokens, num_saved, dict(sorted(causes.items())))


def _write_records(stack: TierStack, store: TieredStore) -> int:
    blocks = list(all_blocks(store.manager))
    for chunk in store.chunks(blocks):
        keys, records = store.encode(chunk)
        outcomes = stack.tiers[0].put(keys, records, PUT_TIMEOUT_S)
        stack.give_back(records)
        kept = (Outcome.STORED, Outcome.PRESENT)
        failed = Counter(str(each) for each in outcomes if each not in kept)
        if failed:
            raise TierError(f"not all records could be written ({dict(failed)}); is there room?")
    return len(blocks)


def _head(
    tokens: IntArray, media: list[MediaItem], num_tokens: int
) -> tuple[IntArray, list[MediaItem]]:
    """Return the first tokens of a text, to the end of the media item that they end in."""
    inside = [item for item in media if item.start < num_tokens]
    stop = max([num_tokens, *(item.start + item.length for item in inside)])
    return tokens[:stop], inside


def _check_same(
    source: Path, manifest: Manifest, store: TieredStore, facts: Callable[[], dict[str, str]]
) -> None:
    is_same = manifest.model == store.namespaces[0].model
    if is_same and manifest.namespaces == _digests(store):
        return
    words: list[str] = []
    if manifest.block_size != store.manager.block_size:
        words += [f"blocks of {manifest.block_size} tokens, here {store.manager.block_size}"]
    differences = _differences(manifest.facts, facts())
    of_model = [each for each in differences if not each.startswith("dtype of ")]
    words += differences
    what = "another model" if of_model else "blocks of another layout"
    raise ConfigError(
        f"{source} holds {what} ({'; '.join(words) or 'of other layers'}), of which nothing would be found; load it "
        "into a cache that is made as the one that was saved"
    )


def _differences(saved: dict[str, str], here: dict[str, str]) -> list[str]:
    """Return in what two models differ, in words: how many weights, and each other fact."""
    names = [name for name in {**saved, **here} if saved.get(name) != here.get(name)]
    weights = [name for name in names if name.startswith("weight ")]
    others = [name for name in names if name not in weights]
    words: list[str] = []
    if weights:
        all_of = sum(name.startswith("weight ") for name in here)
        first = weights[0].removeprefix("weight ")
        words += [f"{len(weights)} of {all_of} weights differ, the first is {first}"]
    for name in others[:_MOST_NAMED]:
        one, two = (str(facts.get(name, "none"))[:_MOST_SHOWN] for facts in (saved, here))
        words += [f"{name} is {one}, here {two}"]
    more = len(others) - _MOST_NAMED
    return [*words, *([f"and {more} more"] if more > 0 else [])]


def _manifest(store: TieredStore, facts: dict[str, str]) -> Manifest:
    saved: list[SavedPrefix] = []
    for prefix in prefixes(store.manager):
        scope, tokens = store.digests.named(prefix.scope), prefix.tokens.astype("<i4").tobytes()
        names = (scope.salt, scope.lora, scope.model, scope.tenant)
        saved.append(SavedPrefix(tokens, names, prefix.media, prefix.ends))
    return Manifest(
        store.namespaces[0].model, store.manager.block_size, _digests(store), saved, facts
    )


def _digests(store: TieredStore) -> list[str]:
    return [namespace.digest.hex() for namespace in store.namespaces]


def _read(source: Path) -> Manifest:
    try:
        with (source / "prefixes").open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES)
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except (OSError, msgspec.DecodeError, QuireError) as error:
        raise ConfigError(f"{source} is no saved cache: {error}") from error
    for prefix in manifest.prefixes:
        try:
            Scope(*prefix.scope)
        except QuireError as error:
            raise ConfigError(f"{source} is no saved cache: {error}") from error
        whole = len(prefix.tokens) // 4 // max(manifest.block_size, 1)
        rising = prefix.ends == sorted(set(prefix.ends))
        if not prefix.ends or not rising or not 0 < prefix.ends[0] <= prefix.ends[-1] <= whole:
            raise ConfigError(
                f"{source} is no saved cache: a text of it ends at {prefix.ends[-3:]}"
            )
    return manifest


def _is_saved(path: Path) -> bool:
    return path.is_dir() and ((path / "prefixes").is_file() or not any(path.iterdir()))

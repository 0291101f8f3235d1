"""The records of a tier that a command means: the oldest, a scope's, a prefix's."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.tiers.base import ListedRecord, Tier
    from quire.tiers.contents.names import NameBook


def oldest(entries: "Sequence[ListedRecord]", keep_bytes: int) -> "list[ListedRecord]":
    """Return the records used longest ago, without which the others take at most `keep_bytes`."""
    if any(entry.age < 0 for entry in entries):
        raise ConfigError(
            "this tier does not know which records were used last, it makes room by itself; "
            "--all works here"
        )
    kept = 0
    by_use = sorted(entries, key=lambda entry: entry.age)
    for index, entry in enumerate(by_use):
        kept += entry.num_bytes
        if kept > keep_bytes:
            return by_use[index:]
    return []


def behind(names: "NameBook", scope: str | None, prefix: str | None) -> set[bytes]:
    """Return the keys of a scope, or of a block and all behind it."""
    from quire.exchange.hashing import tag_of
    from quire.tiers.format import record_key

    if not names.parents:
        raise ConfigError(
            "no names stand beside the records (names.jsonl), so that scopes and prefixes are not "
            "known: keys are digests; --to and --all work without"
        )
    start = _root(names, scope) if scope is not None else _block(names, prefix or "")
    blocks = _with_all_behind(names, start)
    return {
        record_key(digest, block, tag_of(block)) for digest in names.namespaces for block in blocks
    }


def prune_names(names: "NameBook", path: Path, tier: "Tier") -> None:
    """Forget the names of blocks that no record is left of, nor of any behind them."""
    from quire.tiers.contents.names import NameBook, write_names

    if not names.parents or names.num_foreign_lines:
        return
    known, is_all = names.named([entry.key for entry in tier.scan()])
    if not is_all:  # a record without a name may have one all the same
        return
    left = {block for _, block in known.values()}
    kept = set(left)
    for block in left:
        above = names.parents[block]
        while above in names.parents and above not in kept:
            kept.add(above)
            above = names.parents[above]
    fresh = NameBook()
    fresh.namespaces = names.namespaces
    fresh.parents = {block: parent for block, parent in names.parents.items() if block in kept}
    roots = set(fresh.parents.values())
    fresh.scopes = {root: label for root, label in names.scopes.items() if root in roots}
    write_names(fresh, path)


def _with_all_behind(names: "NameBook", start: bytes) -> set[bytes]:
    children: dict[bytes, list[bytes]] = {}
    for block, parent in names.parents.items():
        children.setdefault(parent, []).append(block)
    found, waiting = {start}, [start]
    while waiting:
        for block in children.get(waiting.pop(), ()):
            if block not in found:
                found.add(block)
                waiting.append(block)
    return found


def _root(names: "NameBook", scope: str) -> bytes:
    parents = dict.fromkeys(names.parents.values())
    roots = [parent for parent in parents if parent not in names.parents]
    found = [
        root
        for root in roots
        if names.scopes.get(root) == scope or (scope and root.hex().startswith(scope))
    ]
    if len(found) != 1:
        known = ", ".join(repr(names.scopes.get(root) or root.hex()[:12]) for root in roots)
        many = "no scope" if not found else f"{len(found)} scopes"
        raise ConfigError(f"{many} called {scope!r}; there are {known}")
    return found[0]


def _block(names: "NameBook", prefix: str) -> bytes:
    found = [block for block in names.parents if prefix and block.hex().startswith(prefix.lower())]
    if len(found) != 1:
        many = "no block's hash begins" if not found else f"{len(found)} blocks' hashes begin"
        raise ConfigError(
            f"{many} with {prefix!r}; quire inspect shows the beginnings that are enough"
        )
    return found[0]

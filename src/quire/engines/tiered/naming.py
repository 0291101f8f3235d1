"""Names of the keys in a tier's directory, written beside the records, for `quire inspect`."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

from quire.core import CacheManager, Scope
from quire.core.node import Node
from quire.errors import TierError
from quire.exchange import digests_of
from quire.exchange.hashing import tag_of, tenant_tag
from quire.scope import ScopePart
from quire.tiers.base import Tier
from quire.tiers.contents.names import (
    ChainName,
    Name,
    NameBook,
    NamesFile,
    NamespaceName,
    ScopeName,
)
from quire.tiers.format import Namespace
from quire.tiers.keys import TierKey
from quire.tiers.stack.lanes import Work

KEPT = 1 << 18
"""So many blocks are remembered as written; more cost lines that stand there twice, not memory."""

READ_BYTES = 4 << 20
"""A file of names up to this size is read when it is opened, so that little is written twice."""


Later: TypeAlias = Callable[[int, Work], None]
"""Calls a function, which does not raise, when the tier at this level is not waited for."""


class Naming:
    """Appends the namespaces, scopes and chains of blocks to the directories that tiers are in.

    Nothing depends on it, and nothing it does fails. Tokens and salts are not written: a block is
    a digest, a salt the first four bytes of one. Of tenants that a tier key hides nothing is written.
    """

    def __init__(
        self,
        tiers: Iterable[Tier],
        namespaces: Sequence[Namespace],
        later: Later,
        key: TierKey | None = None,
    ) -> None:
        self._key = key
        paths = enumerate(getattr(tier, "path", None) for tier in tiers)
        self._files = {at: NamesFile(path) for at, path in paths if isinstance(path, Path)}
        self._later = later
        self._written: dict[bytes, None] = {}
        self._namespaces: dict[bytes, Namespace] = {}
        for file in self._files.values():
            book = _read(file.path)
            self._written.update(dict.fromkeys(book.parents))
            for each in namespaces:
                if each.digest not in book.namespaces:
                    self._namespaces[each.digest] = each

    def forget(self, tag: bytes) -> None:
        """Let names of a tenant, by its tag, be written again: a purge takes them out of the files."""
        self._written = {digest: None for digest in self._written if tag_of(digest) != tag}
        for file in self._files.values():
            file.forget(tag)

    def of(self, manager: CacheManager, node: Node, scope: Scope) -> Callable[[], None]:
        """Return a function that writes down the new blocks from the root to the end of a node.

        Any thread may call it, once they are stored.
        """
        if not self._files or (self._key is not None and self._key.hides(tenant_tag(scope))):
            return lambda: None
        fresh: list[bytes] = []
        parent = digests_of(manager).root(scope)
        for each in reversed(node.path()):
            digests = digests_of(manager).of(each)
            first = len(digests)
            while first and digests[first - 1] not in self._written:
                first -= 1
            fresh[:0] = digests[first:]
            if first:
                parent = digests[first - 1]
                break
        if not fresh and not self._namespaces:
            return lambda: None
        names: list[Name] = []
        if fresh:
            names += [ScopeName(digests_of(manager).root(scope), scope_label(scope))]
            names += [ChainName(parent, fresh)]

        def write() -> None:
            namespaces = map(NamespaceName, self._namespaces.values())
            add = [*namespaces, *names]
            for level, file in self._files.items():
                self._later(level, partial(file.add, *add))
            self._namespaces = {}
            if len(self._written) + len(fresh) > KEPT:
                self._written = {}
            self._written.update(dict.fromkeys(fresh))

        return write


def scope_label(scope: Scope) -> str:
    """Return a scope for people; who may not know a salt learns no more than a short digest of it."""
    parts: list[str] = []
    if scope.lora is not None:
        parts.append(f"lora {_short(scope.lora)}")
    if scope.tenant is not None:
        parts.append(f"tenant #{tenant_tag(scope).hex()[:8]}")
    if scope.salt is not None:
        parts.append(f"salt #{sha256(repr(scope.salt).encode()).hexdigest()[:8]}")
    return ", ".join(parts) or "everyone"


def _short(part: ScopePart) -> str:
    text = part.hex() if isinstance(part, bytes) else str(part)
    return text if len(text) <= 24 else f"{text[:12]}..."


def _read(path: Path) -> NameBook:
    try:
        if path.stat().st_size <= READ_BYTES:
            return NameBook.read(path.parent)
    except (OSError, TierError):
        pass
    return NameBook()

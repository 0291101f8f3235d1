"""Keys that records of a tier are signed with, so that who has no key gets no record accepted.

A file of keys has one in each line, in hex: the first signs, all are read. So a key is changed by putting a
new one on top, and removing the old one when its records are of no more use. `#` begins a comment.

    4b1f...e0            signs and is read
    91c7...02            is read
    tenants 77aa...5d    keys what tells tenants apart in records' keys; never changed

A MAC says that a holder of the key made these bytes under this record key, model and layout. It does not say when:
whoever writes to a tier can still delete records, and put back one that was signed once.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NoReturn, Self

from quire.config import read_bytes
from quire.errors import ConfigError

SECRET_BYTES = 32
KEY_ID_BYTES = 8
MAC_BYTES = 32
TENANTS = "tenants"

_ID_PERSON, _MAC_PERSON, _NAME_PERSON = b"quire-key-id", b"quire-record-mac", b"quire-key-name"

_log = logging.getLogger(__name__)


class TierKey:
    """Secrets that records are signed and verified with: BLAKE2b, 32 bytes each.

    `write`    signs, and is read
    `read`     secrets of older records, which are read as well
    `tenants`  keys the tags that tell tenants apart in records' keys; empty without

    `repr` shows key ids alone, and nothing pickles it: other processes are given its file.
    Raises `ConfigError` for secrets of another length, or given twice.
    """

    __slots__ = ("_states", "tenants", "write_id")

    def __init__(self, write: bytes, read: Sequence[bytes] = (), tenants: bytes = b"") -> None:
        given = [write, *read, *([tenants] if tenants else [])]
        for number, secret in enumerate(given, 1):
            if not isinstance(secret, bytes) or len(secret) != SECRET_BYTES:  # pyright: ignore[reportUnnecessaryIsInstance]
                size = len(secret) if isinstance(secret, bytes) else type(secret).__name__  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(
                    f"a tier key has {SECRET_BYTES} bytes, number {number} is of {size}; "
                    "`quire cache key FILE` makes one"
                )
        if len(set(given)) < len(given):
            raise ConfigError("a tier key is given twice; every line of a key file has its own")
        self._states = {
            key_id(each): blake2b(key=each, digest_size=MAC_BYTES, person=_MAC_PERSON)
            for each in (write, *read)
        }
        self.write_id = key_id(write)
        self.tenants = tenants

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read the keys of a file; see the module. Raises `ConfigError`, which shows no secret."""
        file = Path(path).expanduser()
        secrets_, tenants = _parsed(read_bytes(file).decode("ascii", "replace"), str(file))
        if file.stat().st_mode & stat.S_IROTH:
            _log.warning(
                "the tier key of %s can be read by every user of this machine; chmod 600", file
            )
        return cls(secrets_[0], secrets_[1:], tenants)

    @property
    def ids(self) -> tuple[bytes, ...]:
        """Ids of the keys that are read, the one that signs first: 8 bytes each."""
        return tuple(self._states)

    def mac(self, key_id: bytes, *parts: memoryview) -> bytes | None:
        """Return the MAC of parts under the key of an id; None where it is none of these."""
        state = self._states.get(key_id)
        if state is None:
            return None
        state = state.copy()
        for part in parts:
            state.update(part)
        return state.digest()

    def tag(self, tenant_tag: bytes) -> bytes:
        """Return the tag of a tenant in records' keys: BLAKE2b keyed with `tenants`, 8 bytes; no tenant's stays."""
        if not self.hides(tenant_tag):
            return tenant_tag
        return blake2b(tenant_tag, key=self.tenants, digest_size=len(tenant_tag)).digest()

    def name(self, text: bytes, size: int) -> bytes:
        """Return so many bytes that name a tenant's content to holders of `tenants` alone."""
        return blake2b(text, key=self.tenants, digest_size=size, person=_NAME_PERSON).digest()

    def hides(self, tenant_tag: bytes) -> bool:
        """Return whether records' keys do not show this tag."""
        return bool(self.tenants) and any(tenant_tag)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TierKey):
            return NotImplemented
        return (self.ids, self.tenants) == (other.ids, other.tenants)

    def __hash__(self) -> int:
        return hash(self.ids)

    def __repr__(self) -> str:
        return f"TierKey({', '.join(each.hex() for each in self.ids)})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "a TierKey goes to no other process as bytes; hand over the path of its file, `key_file`"
        )


def stored_tag(tenant_tag: bytes, key: TierKey | None) -> bytes:
    """Return the tag of a tenant in the keys of records stored with a tier key, or None."""
    return tenant_tag if key is None else key.tag(tenant_tag)


def key_id(secret: bytes) -> bytes:
    """Return the name of a secret, which tells nothing of it: 8 bytes."""
    return blake2b(key=secret, digest_size=KEY_ID_BYTES, person=_ID_PERSON).digest()


def _parsed(text: str, name: str) -> tuple[list[bytes], bytes]:
    """Return the secrets of a key file, and the one for tenants. Errors quote lines by number only."""
    found: list[bytes] = []
    tenants: list[bytes] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        is_tenants = words[0] == TENANTS
        secret = _secret(words[1:] if is_tenants else words)
        if secret is None:
            raise ConfigError(
                f"line {number} of {name!r} is no tier key: a line is {2 * SECRET_BYTES} hex digits, or "
                f"{TENANTS!r} and {2 * SECRET_BYTES} hex digits; `quire cache key FILE` makes one"
            )
        (tenants if is_tenants else found).append(secret)
    if not found:
        raise ConfigError(f"{name!r} has no tier key; `quire cache key FILE` makes one")
    if len(tenants) > 1:
        raise ConfigError(f"{name!r} has {len(tenants)} lines of {TENANTS!r}; one is used for ever")
    if len({*found, *tenants}) < len(found) + len(tenants):
        raise ConfigError(f"{name!r} has a tier key twice; every line has its own")
    return found, b"".join(tenants)


def _secret(words: Sequence[str]) -> bytes | None:
    """Return the bytes of one word of hex digits; None for anything else."""
    if len(words) != 1 or len(words[0]) != 2 * SECRET_BYTES:
        return None
    try:
        return bytes.fromhex(words[0])
    except ValueError:
        return None


def new_secret() -> str:
    """Return a new secret, as a line of a key file."""
    return secrets.token_hex(SECRET_BYTES)

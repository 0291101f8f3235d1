"""API keys, the tenants they stand for, and the operator."""

import base64
import binascii
import hmac
import os
import re
import stat
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from quire.config import read_bytes
from quire.core import Scope
from quire.errors import ConfigError
from quire.web.errors import ApiError

KEY_ENV, OPERATOR_ENV = "QUIRE_API_KEY", "QUIRE_OPERATOR_KEY"
MIN_KEY = 8
LOCAL = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?", re.IGNORECASE)

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\sA-Z/?#@,*]+")

OPTION = re.compile(r"priority=(?P<priority>-?(?:100|\d{1,2}))|pin=(?P<pin>\d{1,9})")

OPERATOR = "the operator"
"""The operator's name beside those of tenants, which are one word each."""


class ApiKeys:
    """The keys of a server: digests and tenants; no key is kept, shown or logged.

    `tenants`    (name, key) pairs; several keys may stand for one tenant
    `operator`   the key for `/metrics`, `/v1/cache` and the page
    `exposed`    whether the server listens beyond loopback
    `priorities` the highest priority that a tenant may ask for, where it is not 0
    `pins`       tokens that a tenant's breakpoints may pin, where that is not 0
    `origins`    of other sites whose pages may ask as clients do, "*" being all; the operator's paths stay closed to them

    `names`      of the tenants; `in_order`: as they were given

    A server without keys serves whoever reaches it, and only on loopback. Raises `ConfigError`.
    """

    def __init__(
        self,
        tenants: Sequence[tuple[str, str]] = (),
        operator: str | None = None,
        *,
        exposed: bool = False,
        priorities: Mapping[str, int] | None = None,
        pins: Mapping[str, int] | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        keys = [*tenants, *([(OPERATOR, operator)] if operator else [])]
        for name, key in keys:
            if len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    f"the key of {name} has {len(key)} characters or some that a header cannot "
                    f"carry; use at least {MIN_KEY} of printable ASCII, without spaces"
                )
        self._owners = {_digest(key): name for name, key in keys}
        if len(self._owners) < len(keys):
            raise ConfigError("a key is given twice; each tenant and the operator have their own")
        if exposed and not tenants:
            raise ConfigError(
                f"a server beyond loopback needs keys: --keys FILE, or the environment's {KEY_ENV}"
            )
        for origin in origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--allow-origin is *, or an origin as browsers send it, https://HOST or http://HOST:PORT "
                    f"in lower case and without a path, got {origin[:80]!r}"
                )
        self.origins = frozenset(origins)
        self._exposed, self._has_operator = exposed, bool(operator)
        self._priorities, self.pins = dict(priorities or {}), dict(pins or {})
        self.in_order = tuple(dict.fromkeys(name for name, _ in tenants))
        self.names = frozenset(self.in_order)

    def tenant(self, headers: Mapping[str, str]) -> str | None:
        """Return the tenant of a request, None on a server without keys. Raises `ApiError` 401."""
        self._check_origin(headers, self.origins)
        if not self.names:
            return None
        owner = self._owner(headers)
        if owner not in self.names:
            raise _unknown("Bearer")
        return owner

    def check_priority(self, tenant: str | None, priority: int) -> None:
        """Raise `ApiError` for a priority above a tenant's; without keys any is taken."""
        if tenant is not None and priority > (most := self._priorities.get(tenant, 0)):
            raise ApiError(
                400,
                f"priority is {priority}; this key may ask for {most} at most: ask for less, or have the server's "
                "file of keys allow more",
                param="priority",
                code="priority_too_high",
            )

    def check_operator(self, headers: Mapping[str, str]) -> None:
        """Raise `ApiError` unless the operator asks, or anybody may: on loopback, without any key."""
        self._check_origin(headers)
        if self._has_operator and self._owner(headers) != OPERATOR:
            raise _unknown('Basic realm="quire"')
        if not self._has_operator and (self.names or self._exposed):
            raise ApiError(403, f"this needs the operator's key; start with {OPERATOR_ENV} set")

    def _owner(self, headers: Mapping[str, str]) -> str | None:
        """Return whose key a request has; all are compared, so that time tells nothing."""
        given = _digest(_key_of(headers))
        found = [name for known, name in self._owners.items() if hmac.compare_digest(known, given)]
        return found[0] if found else None

    def _check_origin(
        self, headers: Mapping[str, str], allowed: AbstractSet[str] = frozenset()
    ) -> None:
        """Raise `ApiError` for a request that another site's page makes a browser send, unless its origin is allowed."""
        host, origin = headers.get("host", ""), headers.get("origin")
        is_own = origin is None or origin.partition("://")[2] == host
        if not (is_own or {origin, "*"} & allowed):
            raise ApiError(403, f"the page of {origin!r:.80} may not ask this server")
        if not self._owners and not LOCAL.fullmatch(host):
            raise ApiError(403, f"this server is asked as localhost, not as {host[:80]!r}")


def read_keys(file: Path | None, *, exposed: bool, origins: Sequence[str] = ()) -> ApiKeys:
    """Return the keys of a file and of the environment. Raises `ConfigError`.

    A line of it is `NAME KEY`. Behind it, `priority=N` allows priorities up to N, and `pin=N` pins of N tokens.
    """
    tenants: list[tuple[str, str]] = []
    options: dict[str, dict[str, int]] = {"priority": {}, "pin": {}}
    lines = read_bytes(file).decode("utf-8", "replace").splitlines() if file is not None else ()
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        found = [each for word in words[2:] if (each := OPTION.fullmatch(word))]
        if len(words) < 2 or len(found) < len(words) - 2:
            raise ConfigError(
                f"line {number} of {str(file)!r} has {len(words)} words; a line is NAME KEY, and "
                "behind them priority=N with N from -100 to 100, or pin=N with N tokens"
            )
        tenants.append((words[0], words[1]))
        for each in found:
            name = each.lastgroup or ""
            options[name][words[0]] = int(each[name])
    if file is not None and not tenants:
        raise ConfigError(f"{str(file)!r} has no key; a line is NAME KEY")
    if own := os.environ.get(KEY_ENV):
        tenants.append(("default", own))
    operator = os.environ.get(OPERATOR_ENV) or None
    most, pins = options["priority"], options["pin"]
    return ApiKeys(tenants, operator, exposed=exposed, priorities=most, pins=pins, origins=origins)


def is_open_to_all(file: Path) -> bool:
    """Whether any user of this machine may read a file."""
    return file.is_file() and bool(file.stat().st_mode & stat.S_IROTH)


def scope_of(tenant: str | None, salt: str | None, lora: str | None = None) -> Scope:
    """Return the scope of a tenant's requests to a model or its adapter; no two of these have the same."""
    return Scope(salt=salt, tenant=tenant, lora=lora)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address. Raises `ConfigError` for an invalid one."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(f"--host is an IP address or localhost, got {host!r}") from None


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "surrogateescape")).digest()


def _key_of(headers: Mapping[str, str]) -> str:
    """Return the key of a request: a bearer's token, the password that a browser asks for, or Anthropic's header."""
    if (said := headers.get("authorization")) is None:
        return headers.get("x-api-key", "").strip()
    kind, _, given = said.partition(" ")
    if kind.lower() == "basic":
        try:
            return base64.b64decode(given, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return ""
    return given.strip() if kind.lower() == "bearer" else ""


def _unknown(challenge: str) -> ApiError:
    return ApiError(
        401,
        "the key is missing or not known; send it as Authorization: Bearer KEY, or as x-api-key: KEY",
        code="invalid_api_key",
        headers={"WWW-Authenticate": challenge},
    )

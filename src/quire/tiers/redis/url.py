"""Addresses of Redis servers: a URL becomes the words that redis-py makes a connection of."""

from __future__ import annotations

import os.path
from typing import Any, TypeAlias, cast
from urllib.parse import parse_qsl, urlsplit

from quire.errors import ConfigError
from quire.extras import lacking
from quire.tiers.addresses import described, is_word

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix")
FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS_OPTIONS = (*FILES, "ssl_cert_reqs", "ssl_check_hostname")

_SHAPE = (
    "write redis://user:password@host:port/db with a number for the port and the db, and in user and "
    "password / as %2F, # as %23, ? as %3F, @ as %40, % as %25"
)

Words: TypeAlias = dict[str, Any]
"""`connection_class` and what it is called with; among them the password: never shown."""


def parse_server(url: str) -> tuple[Words, bool]:
    """Return the connection options of a server's URL, and whether it is a node of a cluster.

    `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS, `redis+cluster://` and
    `rediss+cluster://` for a cluster by any of its nodes, `unix:///path?db=1`.

    TLS takes `?ssl_ca_certs=`, `ssl_certfile=`, `ssl_keyfile=` (paths), `ssl_cert_reqs=none` and `ssl_check_hostname=no`, named
    as redis-py names them; what the system trusts is trusted beside `ssl_ca_certs`. Raises `ConfigError`, whose message has no password.
    """
    try:
        from redis import connection  # noqa: PLC0415 - an extra
    except ImportError:
        raise ConfigError(lacking("the Redis tier", "redis", "redis")) from None
    if not isinstance(url, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"a Redis tier is opened by one URL, as 'redis://localhost:6379', got {type(url).__name__}"
        )
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise ConfigError(f"a Redis URL begins with one of {', '.join(SCHEMES)} and ://")
    is_cluster = scheme.endswith("+cluster")
    plain = f"{scheme.removesuffix('+cluster')}://{rest}"
    try:
        words: Words = cast("Any", connection).parse_url(plain)
        parts = urlsplit(plain)
        port = parts.port
    except ValueError:
        # What is wrong in it may be a part of the password, so nothing of it is shown.
        raise ConfigError(f"a Redis URL that cannot be read: {_SHAPE}") from None
    if parts.fragment or "@" in parts.query or ("@" in parts.path and parts.netloc):
        raise ConfigError(f"a Redis URL with a # or @ behind its server: {_SHAPE}")
    if port == 0:
        raise ConfigError("port 0 of a Redis URL is no server's; leave it out for 6379")
    path_of_db = parts.path.strip("/")
    db = words.get("db", 0)
    if scheme == "unix":
        if not words.get("path"):
            raise ConfigError("a unix:// URL names a socket: unix:///run/redis.sock")
    elif path_of_db and (not path_of_db.isdigit() or int(path_of_db) != db):
        raise ConfigError(f"the path of a Redis URL is a database number: {_SHAPE}")
    if db < 0 or (is_cluster and db):
        raise ConfigError(f"database {db}: it is 0 in a cluster, and never negative")
    if "username" in words and "password" not in words:
        raise ConfigError("a user without a password: write user:password@host, or :password@host")
    # Their names as written: redis-py takes a password there, too, where logs and process lists show it.
    names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True) if name != "db"]
    _check_options(scheme, {name: words.get(name, "") for name in names})
    if scheme.startswith("rediss"):
        # Before version 6 of redis-py names were not checked unless that was asked for.
        is_checked = words.get("ssl_cert_reqs") != "none"
        words["ssl_check_hostname"] = is_checked and words.get("ssl_check_hostname", True)
    return {"connection_class": connection.Connection, "db": 0, "protocol": 2} | words, is_cluster


def place_of(words: Words) -> str:
    """Return where a server is, for people."""
    return words.get("path") or f"{words.get('host', 'localhost')}:{words.get('port', 6379)}"


def _check_options(scheme: str, options: Words) -> None:
    for name, value in options.items():
        if name not in TLS_OPTIONS or not scheme.startswith("rediss"):
            raise ConfigError(
                f"unknown option {name!r} in a {scheme}:// URL; rediss:// takes {', '.join(TLS_OPTIONS)}"
            )
        if name in FILES and not os.path.isfile(value):  # noqa: PTH113 - Path.is_file raises, with the value, for one too long
            seen = repr(value) if is_word(value, 255) else "what is given"
            raise ConfigError(f"certificates that cannot be read: {name}={seen} is no file")
    requirement = options.get("ssl_cert_reqs", "required")
    if requirement not in ("required", "none"):
        seen = described("ssl_cert_reqs", requirement)
        raise ConfigError(f"ssl_cert_reqs is 'required' or 'none', not {seen}")

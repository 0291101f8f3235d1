"""Addresses of Redis servers, and logins: a URL becomes connections."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from quire.errors import ConfigError, TierError
from quire.extras import lacking
from quire.tiers.redis.exchange import exchange
from quire.tiers.redis.resp import Failure, Link, RedisRequest, Reply, command

SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster", "unix")
OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs", "ssl_check_hostname")

RECEIVE_BYTES = 1 << 20
SEND_BYTES = 1 << 18
"""Asked of the kernel for a socket's two directions. On loopback, less to receive doubles the time of a GET of 64 KiB, and
more to send that of a SET of 1 MiB: what waits to be sent leaves the processor's cache."""


class Endpoint(msgspec.Struct, frozen=True):
    """A host and a port; or, where `path` is not empty, a Unix socket."""

    host: str
    port: int
    path: str = ""

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


class ServerAddress(msgspec.Struct, frozen=True):
    """A server or a cluster, as a URL says it.

    `endpoint`    of the server, or of any node of a cluster
    `tls`         what secures and checks the connection; None for plain TCP
    """

    endpoint: Endpoint
    is_cluster: bool
    username: str | None
    password: str | None
    db: int
    tls: ssl.SSLContext | None

    def connect(self, endpoint: Endpoint, deadline: float) -> Link:
        """Return a new connection, secured and logged in.

        Raises `TimeoutError`, `OSError`, and `TierError` where the server refuses the login.
        """
        try:
            connected = _open(endpoint, deadline)
        except ValueError as error:
            # A cluster may say anything; names that cannot be ones are refused by the resolver's encoding.
            raise TierError(f"{endpoint!r:.200} is no address: {error}") from None
        try:
            if self.tls is not None:
                connected.settimeout(_remaining(deadline))
                connected = self.tls.wrap_socket(connected, server_hostname=endpoint.host)
            link = Link(connected)
            self._log_in(link, endpoint, deadline)
        except BaseException:
            connected.close()
            raise
        return link

    def _log_in(self, link: Link, endpoint: Endpoint, deadline: float) -> None:
        steps: list[tuple[str, tuple[bytes, ...]]] = []
        if self.password is not None:
            names = () if self.username is None else (self.username.encode(),)
            who = "the password" if self.username is None else f"user {self.username!r}"
            steps.append((who, (b"AUTH", *names, self.password.encode())))
        if self.db:
            steps.append((f"database {self.db}", (b"SELECT", b"%d" % self.db)))
        for what, words in steps:
            replies: list[Reply] = []
            exchange([link], [RedisRequest((command(*words),), (str,))], deadline, replies)
            if isinstance(replies[0], Failure):
                raise TierError(f"{endpoint} refuses {what}: {replies[0].text}")


def parse_server(url: str) -> ServerAddress:
    """Return the address in a URL.

    `redis://[user:password@]host[:port][/db]`, `rediss://` for TLS, `redis+cluster://` and
    `rediss+cluster://` for a cluster by any of its nodes, `unix:///path?db=1`.

    TLS takes `?ssl_ca_certs=`, `ssl_certfile=`, `ssl_keyfile=` (paths), `ssl_cert_reqs=none` and `ssl_check_hostname=no`, named
    as redis-py names them. Raises `ConfigError`, whose message has no password.
    """
    try:
        from redis.connection import (  # noqa: PLC0415 - an extra
            parse_url,  # pyright: ignore[reportUnknownVariableType]
        )
    except ImportError:
        raise ConfigError(lacking("the Redis tier", "redis", "redis")) from None
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        raise ConfigError(f"a Redis URL begins with one of {', '.join(SCHEMES)}, not {scheme!r}")
    is_cluster = scheme.endswith("+cluster")
    plain = f"{scheme.removesuffix('+cluster')}://{rest}"
    try:
        words = cast("Callable[[str], dict[str, Any]]", parse_url)(plain)
        path_of_db = urlsplit(plain).path.strip("/")
    except ValueError as error:
        raise ConfigError(f"a Redis URL that cannot be read: {error}") from None
    words.pop("connection_class", None)
    endpoint = Endpoint(
        words.pop("host", "localhost"), words.pop("port", 6379), words.pop("path", "")
    )
    username, password = words.pop("username", None), words.pop("password", None)
    db = words.pop("db", 0)
    if scheme == "unix":
        if not endpoint.path:
            raise ConfigError("a unix:// URL names a socket: unix:///run/redis.sock")
    elif path_of_db and (not path_of_db.isdigit() or int(path_of_db) != db):
        raise ConfigError(f"the path of a Redis URL is a database number, not {path_of_db!r}")
    if db < 0 or (is_cluster and db):
        raise ConfigError(f"database {db}: it is 0 in a cluster, and never negative")
    if username is not None and password is None:
        raise ConfigError(f"user {username!r} without a password; write user:password@host")
    for name in words:
        if name not in OPTIONS or not scheme.startswith("rediss"):
            raise ConfigError(
                f"unknown option {name!r} in a {scheme}:// URL; rediss:// takes {', '.join(OPTIONS)}"
            )
    tls = _tls(words) if scheme.startswith("rediss") else None
    return ServerAddress(endpoint, is_cluster, username, password, db, tls)


def _tls(options: dict[str, Any]) -> ssl.SSLContext:
    requirement = options.get("ssl_cert_reqs", "required")
    if requirement not in ("required", "none"):
        raise ConfigError(f"ssl_cert_reqs is 'required' or 'none', not {requirement!r}")
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if "ssl_certfile" in options:
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except OSError as error:
        raise ConfigError(f"certificates that cannot be read: {error}") from None
    if requirement == "none" or not options.get("ssl_check_hostname", True):
        context.check_hostname = False
    if requirement == "none":
        context.verify_mode = ssl.CERT_NONE
    return context


def _open(endpoint: Endpoint, deadline: float) -> socket.socket:
    """Return a connected socket. Looking up a name has the time limit of the system's resolver."""
    if endpoint.path:
        candidates = [(socket.AF_UNIX, endpoint.path)]
    else:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        candidates = [(family, address) for family, _, _, _, address in found]
    failure = OSError(f"{endpoint} has no address")
    for family, address in candidates:
        fresh = socket.socket(family, socket.SOCK_STREAM)
        try:
            fresh.settimeout(_remaining(deadline))
            if family != socket.AF_UNIX:
                fresh.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                fresh.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            fresh.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
            fresh.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
            fresh.connect(address)
        except TimeoutError:
            fresh.close()
            raise
        except OSError as error:
            fresh.close()
            failure = error
        else:
            return fresh
    raise failure


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError
    return remaining

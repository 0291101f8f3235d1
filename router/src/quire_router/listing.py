"""The list of upstreams, which may change while a proxy runs: a file that is watched, names that DNS resolves."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import urlsplit

from quire.config import read_bytes
from quire.errors import ConfigError
from quire_router.upstreams import Upstream

DNS = "dns+http://"
"""The beginning of an upstream that stands for every address of a name."""

RESOLVE_S = 5.0
"""Seconds between two questions to DNS for one name."""

logger = logging.getLogger("uvicorn.error")  # which uvicorn prints

Resolve: TypeAlias = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host."""


class Listed(NamedTuple):
    """An upstream of the list: its URL, and where it publishes events (None: nowhere)."""

    url: str
    follow: str | None = None


class UpstreamList:
    """Upstreams that are given, and those of a file.

    An upstream `dns+http://HOST:PORT` stands for each address of the host. If the file or a name cannot be read, the
    last list that was read stays, and `failure` says why. Raises `ConfigError` for a list that is invalid at first.

    `file`     a line is URL or URL FOLLOW; `#` begins a comment
    `has_events`  whether each upstream has a FOLLOW
    `clock`    seconds that never step back
    """

    def __init__(
        self,
        given: Sequence[Listed],
        file: Path | None = None,
        *,
        resolve: Resolve | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure = ""
        self._given, self._file = [*given], file
        self._resolve, self._clock = resolve or _addresses, clock
        self._text: bytes | None = None
        self._of_file: list[Listed] = []
        self._resolved: dict[str, tuple[float, list[str]]] = {}
        if file is not None:
            self._text = read_bytes(file)
            self._of_file = listed(self._text, str(file))
        self.has_events = any(each.follow for each in self._all())
        self._check(self._all())

    @property
    def changes(self) -> bool:
        """Whether it may change."""
        return self._file is not None or any(each.url.startswith(DNS) for each in self._given)

    @property
    def fixed(self) -> list[Listed]:
        """The upstreams that no name in DNS stands for."""
        return [each for each in self._all() if not each.url.startswith(DNS)]

    async def now(self) -> list[Listed]:
        """Return the upstreams that there are now, each once."""
        failures: list[str] = []
        if self._file is not None:
            try:
                text = await asyncio.to_thread(read_bytes, self._file)
                if text != self._text:
                    found = listed(text, str(self._file))
                    if not found:
                        raise ConfigError(f"{str(self._file)!r} has no upstream")  # noqa: TRY301 - as others
                    self._check([*self._given, *found])
                    self._text, self._of_file = text, found
            except (OSError, ConfigError) as error:
                failures.append(str(error))
        found = dict[str, Listed]()
        for each in self._all():
            for one in await self._expanded(each, failures):
                found.setdefault(Upstream(one.url).name, one)
        said = "; ".join(failures)
        if said and said != self.failure:
            logger.warning("the list of upstreams stays as it was: %s", said)
        self.failure = said
        return [*found.values()]

    def _all(self) -> list[Listed]:
        return [*self._given, *self._of_file]

    def _check(self, upstreams: list[Listed]) -> None:
        """Raise `ConfigError` for an upstream that is none, or whose events are or are not followed as those of others."""
        names: set[str] = set()
        for url, follow in upstreams:
            name = Upstream(url.removeprefix("dns+") if url.startswith(DNS) else url).name
            if name in names:
                raise ConfigError(f"each upstream is given once, got {url!r} again")
            names.add(name)
            if url.startswith(DNS) and follow is not None:
                raise ConfigError(
                    f"{url} has many servers, and one FOLLOW is of one server: list each"
                )
            if (follow is not None) != self.has_events:
                raise ConfigError(
                    f"{url} has {'no' if follow is None else 'a'} FOLLOW; give one for each upstream, or none"
                )

    async def _expanded(self, each: Listed, failures: list[str]) -> list[Listed]:
        """Return an upstream, or one for each address of its name."""
        if not each.url.startswith(DNS):
            return [each]
        parts, now = urlsplit(each.url.removeprefix("dns+")), self._clock()
        host, port = parts.hostname or "", parts.port or 80
        asked_s, addresses = self._resolved.get(each.url, (-RESOLVE_S, []))
        if now - asked_s >= RESOLVE_S or not addresses:
            try:
                addresses = await self._resolve(host, port)
            except (OSError, UnicodeError) as error:
                failures.append(f"{host} has no address: {error}")
            self._resolved[each.url] = now, addresses
        path = parts.path.rstrip("/")
        hosts = [f"[{one}]" if ":" in one else one for one in addresses]
        return [Listed(f"http://{one}:{port}{path}") for one in hosts]


def listed(text: bytes, source: str) -> list[Listed]:
    """Return the upstreams of a list's text. Raises `ConfigError` with the line."""
    found: list[Listed] = []
    for number, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        words = line.partition("#")[0].split()
        if len(words) > 2:
            raise ConfigError(
                f"line {number} of {source!r} has {len(words)} words; a line is URL or URL FOLLOW"
            )
        if words:
            found.append(Listed(*words))
    return found


async def _addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host, sorted. Raises `OSError`."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({str(each[4][0]) for each in found})

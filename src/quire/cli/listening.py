"""The address that a server of the command line listens at, and the page of its requests."""

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quire.errors import ConfigError
from quire.extras import lacking_package
from quire.plugins import load_offered

if TYPE_CHECKING:
    from quire.web.keys import ApiKeys


def listen(host: str, port: int, slow_s: float) -> tuple[socket.socket, str]:
    """Return a listening socket and its URL.

    A connection whose client takes nothing for `slow_s` is cut, where the system can.
    Its connections send at once: else the second part of an answer waits for the other side to confirm the first, which
    takes up to 40 ms. asyncio says so only to sockets that name their protocol.

    Raises `OSError` with the address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        made = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        error.filename = f"{host}:{port}"
        raise
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # else what is closed keeps what nobody takes
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * slow_s))
    return made, f"http://{f'[{host}]' if ':' in host else host}:{made.getsockname()[1]}"


def is_local(endpoint: str) -> bool:
    """Whether only this machine reaches an endpoint of events; one that is none is for the publisher to refuse."""
    scheme, _, address = endpoint.partition("://")
    host = address.rpartition(":")[0].strip("[]")
    return scheme != "tcp" or host == "localhost" or host.startswith("127.") or host == "::1"


def with_page(name: str, keys: "ApiKeys", most: int) -> Callable[[Any], Any]:
    """Return what puts the page of `quire tap` around an application.

    Raises `ConfigError` if the package that brings it is not installed.

    `name`  of the server, on the page
    `most`  bytes of a body that is compared
    """
    around = load_offered("quire.tap", "page")
    if around is None:
        raise ConfigError(lacking_package("--tap", "quire-sim"))
    return lambda app: around(app, name, keys, most)

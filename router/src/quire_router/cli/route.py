"""`quire route`: one address for several servers that speak OpenAI's protocol."""

import gc
import signal
import sys
import time
from itertools import repeat
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from quire.cli import options, output
from quire.cli.listening import listen, with_page
from quire.config import parse_bytes
from quire.errors import ConfigError

PREFIX_BLOCKS = 1 << 20
"""Blocks of prompts that are remembered."""

SLOW_S = 600.0
"""Seconds in which a body has to arrive, a client has to take what it is sent, and a server has to go on."""


def route(
    *,
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            help="A server, http://HOST:PORT; once for each.",
            show_default=False,
        ),
    ] = None,
    upstreams: Annotated[
        Path | None,
        typer.Option(
            "--watch",
            help="A file that is read again each second: a line for each server, URL or URL FOLLOW.",
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
    follow: Annotated[
        list[str] | None,
        typer.Option(
            help="Where that server publishes KV events: tcp://HOST:PORT[,tcp://HOST:REPLAY_PORT].",
            show_default=False,
        ),
    ] = None,
    router: options.Router = "prefix",
    load_limit: options.LoadLimit = 1.25,
    retries: Annotated[
        int, typer.Option(min=0, max=9, help="Upstreams that see a request beside the first one.")
    ] = 1,
    hung_after: Annotated[
        float,
        typer.Option(
            min=1,
            help="Seconds for which an upstream may say nothing, /health included, before its requests end.",
        ),
    ] = 15.0,
    session_header: Annotated[
        str, typer.Option(help="The header that names a conversation.", metavar="NAME")
    ] = "x-session-id",
    host: options.Host = "127.0.0.1",
    port: options.Port = 8080,
    keys: options.Keys = None,
    allow_origin: options.AllowOrigin = None,
    limits: Annotated[
        Path | None,
        typer.Option(
            help="Limits by key: a file of lines NAME rpm=N tpm=N running=N waiting=N; *: each other key.",
            show_default=False,
            metavar="FILE",
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send a span of each request there, by OTLP: http://HOST:4318/v1/traces.",
            show_default=False,
            metavar="URL",
        ),
    ] = None,
    mend: options.Mends = None,
    tap: options.Tap = False,
    max_body: options.MaxBody = "64MiB",
    as_json: options.AsJson = False,
) -> None:
    """Pass requests on to the server that holds most of their prompt and is not too busy.

    Give --follow as often as --upstream, in the same order, and what is cached is known from the servers; else it is
    supposed from what they were sent. Servers may start later, and go: a request that one fails before it
    answers goes to another, once. dns+http://HOST:PORT is every address of a name. At /v1/upstreams is who is well,
    at /metrics how they do. --mend RULE changes requests on their way, --mend URL=RULE those to one upstream. Beyond loopback there have to be keys: from --keys, or one in QUIRE_API_KEY; they are
    passed on.

    [bold]Examples[/bold]

      quire route --upstream http://127.0.0.1:8000 --upstream http://127.0.0.1:8001
      quire route --upstream http://a:8000 --follow tcp://a:5557
      quire route --upstream http://a:8000 --upstream http://b:8000 --router session
      quire route --upstream http://a:8000 --mend drop-lines --tap
    """
    import uvicorn

    from quire.routing import router_named
    from quire.web.clients import UVICORN
    from quire.web.cors import with_cors
    from quire.web.keys import is_loopback, read_keys
    from quire_router.listing import Listed, UpstreamList
    from quire_router.mending import UpstreamMends
    from quire_router.prefixes import SentPrefixes, ToldPrefixes
    from quire_router.proxy import Proxy, ProxyLimits
    from quire_router.rates import RateLimits, read_limits
    from quire_router.spans import exported_to

    known = read_keys(keys, exposed=not is_loopback(host), origins=allow_origin or ())
    chosen = router_named(router, load_limit=load_limit)
    given = upstream or []
    if follow and len(follow) != len(given):
        raise ConfigError(
            f"{len(follow)} --follow for {len(given)} upstreams; give one for each, or none"
        )
    if not given and upstreams is None:
        raise ConfigError("no upstream is given; use --upstream http://HOST:PORT, or --watch FILE")
    listing = UpstreamList([*map(Listed, given, follow or repeat(None))], upstreams)
    limit = parse_bytes(max_body)
    spans = None if otlp_traces_endpoint is None else exported_to(otlp_traces_endpoint)
    rates = None if limits is None else RateLimits(read_limits(limits, known), time.monotonic)
    listening, url = listen(host, port, SLOW_S)
    kind = ToldPrefixes if listing.has_events else SentPrefixes
    prefixes = kind(PREFIX_BLOCKS)
    bounds = ProxyLimits(
        retries=retries,
        hung_s=hung_after,
        slow_s=SLOW_S,
        max_body=limit,
        session_header=session_header,
    )
    proxy = Proxy(listing, chosen, prefixes, known, bounds)
    proxy.rates, proxy.spans = rates, spans
    names = [each.name for each in proxy.upstreams]
    proxy.mends = UpstreamMends(mend or (), None if listing.changes else names)
    app: Any = proxy.app()
    if tap:
        app = with_page("quire route", known, limit)(app)
    if as_json:
        output.print_json({"url": url, "upstreams": names, "router": router})
    else:
        output.stdout().print(f"{len(names)} upstreams at {url}/v1", highlight=False)
    sys.stdout.flush()
    config = uvicorn.Config(with_cors(app, known.origins), **UVICORN)
    for each in (signal.SIGINT, signal.SIGTERM):  # uvicorn sends itself what ended it, at the end
        signal.signal(each, _end)
    gc.freeze()  # collections pass over what stays until the end
    try:
        uvicorn.Server(config).run(sockets=[listening])
    finally:
        prefixes.close()
        if spans is not None:
            spans.close()


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)

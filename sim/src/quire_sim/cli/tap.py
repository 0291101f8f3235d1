"""`quire tap`: a relay before a server, which shows what each request found in the cache."""

import signal
import sys
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli import options, output
from quire.cli.files import check_writable
from quire.cli.listening import listen
from quire.config import parse_bytes
from quire.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from quire_sim.tap.watching import Seen

SLOW_S = 600.0
"""Seconds in which a client has to take what it is sent."""

STYLES = {"rewrite": "red", "compaction": "magenta", "cold": "yellow", "refused": "red"}


def tap(
    *,
    upstream: Annotated[
        list[str],
        typer.Option(help="A server, http://HOST:PORT; once for each.", show_default=False),
    ],
    host: options.Host = "127.0.0.1",
    port: options.Port = 8090,
    log: Annotated[
        Path | None,
        typer.Option(
            help="Append requests and answers to this file, one a line, without credentials.",
            show_default=False,
        ),
    ] = None,
    log_limit: Annotated[
        str,
        typer.Option(help="Size at which that file becomes FILE.1, and a new one begins."),
    ] = "1GiB",
    private: Annotated[bool, typer.Option(help="Show no text of prompts.")] = False,
    mend: options.Mends = None,
    max_body: options.MaxBody = "64MiB",
    as_json: options.AsJson = False,
) -> None:
    """Pass requests on to one server, and show the hits of each and where its prompt changes.

    Bytes pass unchanged, in both directions, unless --mend says otherwise: OpenAI's and Anthropic's APIs, llama-server, vLLM, and any other path.
    Each prompt gets a line here and on the page at /tap, which only this machine may open. Larger bodies than
    --max-body pass unread. There is one upstream, and its URL has no /v1. quire's own reading of the recorded file: [bold]quire trace info FILE[/bold].

    [bold]Examples[/bold]

      quire tap --upstream http://127.0.0.1:8000
      quire tap --upstream https://api.openai.com --log requests.jsonl
      quire tap --upstream https://api.anthropic.com --port 9000 --private
      quire tap --upstream http://127.0.0.1:8000 --mend drop-lines --mend sort-tools
    """
    import uvicorn

    from quire.web.clients import UVICORN
    from quire.web.mends import Mends
    from quire_sim.tap.app import Tap
    from quire_sim.tap.page import PAGE
    from quire_sim.tap.records import RecordFile

    if len(upstream) > 1:
        raise ConfigError(
            f"quire tap relays to one server, got {len(upstream)} of --upstream; quire route takes several"
        )
    check_writable(log)
    most, limit = parse_bytes(max_body), parse_bytes(log_limit)
    console = output.stdout()
    file = None if log is None else RecordFile(log, limit)
    made = Tap(
        upstream[0],
        most=most,
        file=file,
        show=None if as_json else lambda seen: _show(console, seen),
        is_private=private,
        mends=Mends(mend or ()),
    )
    listening, url = listen(host, port, SLOW_S)
    if as_json:
        output.print_json({"url": url, "upstream": made.relay.upstream, "page": url + PAGE})
    else:
        console.print(f"{made.relay.upstream} at {url}, its requests at {url}{PAGE}")
    sys.stdout.flush()
    settings: dict[str, Any] = UVICORN | {"date_header": False, "log_level": "critical"}
    for each in (signal.SIGINT, signal.SIGTERM):  # uvicorn sends itself what ended it, at the end
        signal.signal(each, _end)
    try:
        uvicorn.Server(uvicorn.Config(made.app(), **settings)).run(sockets=[listening])
    finally:
        if file is not None:
            file.close()


def _end(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _show(console: "Console", seen: "Seen") -> None:
    """Print the line of a request, and where it parts from an earlier one."""
    from rich.text import Text

    moment = datetime.fromtimestamp(seen.time_s).astimezone().strftime("%H:%M:%S")
    style = STYLES.get(seen.kind, "green")
    line = Text.assemble(
        (f"{moment} ", "dim"), f"#{seen.number:<4} ", (f"{seen.kind:<15} ", style), _counts(seen)
    )
    console.print(line, soft_wrap=True)
    for each in seen.mends:
        console.print(Text(f"             {each.rule} in {each.path}", "dim"), soft_wrap=True)
        _show_both(console, each.before, each.after)
    if seen.path:
        where = f"             parts from #{seen.nearest} in {seen.path}, character {seen.at:,}"
        lost = f", {seen.lost_tokens:,} tokens behind it are equal" if seen.lost_tokens else ""
        console.print(Text(where + lost, "dim"), soft_wrap=True)
    _show_both(console, seen.earlier, seen.this)


def _show_both(console: "Console", one: str, other: str) -> None:
    """Print both sides of a difference, unless texts are private."""
    from rich.text import Text

    if one or other:
        for mark, text in (("-", one), ("+", other)):
            said = f"               {mark} {text!r}"
            console.print(Text(said, "red" if mark == "-" else "green"), soft_wrap=True)


def _counts(seen: "Seen") -> str:
    words = [seen.model or seen.url]
    if seen.prompt_tokens is not None:
        words.append(f"{seen.prompt_tokens:,} tokens")
        cached = seen.cached_tokens
        if cached is None:
            words.append("reuse not told")
        else:
            share = 100 * cached / max(seen.prompt_tokens, 1)
            words.append(f"{cached:,} reused ({share:.0f} %)")
    elif seen.kind != "unread":
        words.append("no usage told")
    if seen.unused_tokens:
        words.append(f"{seen.unused_tokens:,} equal and not found")
    if seen.first_s is not None:
        words.append(f"first byte {output.milliseconds(seen.first_s)} ms")
    if seen.end != "whole":
        words.append(seen.end)
    if not 200 <= seen.status < 300:
        words.append(f"status {seen.status}" if seen.status else "no answer")
    return ", ".join(words)

"""`quire watch`: what the cache of a running engine does, from its events."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quire.cli import options, output
from quire.errors import ConfigError
from quire.extras import require

if TYPE_CHECKING:
    from quire.exchange.wire import EventBatch
    from quire.observe.activity import Activity
    from quire.observe.zmq import Subscriber

FACTORS = (0.25, 0.5, 1, 2, 4)
NUM_HOT = 5
WAIT_S = 0.25


def watch(
    endpoint: Annotated[
        str, typer.Argument(help="An engine's endpoint of KV events: tcp://HOST:PORT.")
    ],
    *,
    replay: Annotated[
        str | None,
        typer.Option(
            help="Endpoint for replays of missed batches; none: no replays.",
            show_default="the next port",
        ),
    ] = None,
    topic: Annotated[str, typer.Option(help="Topic prefix of the messages.")] = "",
    seconds: Annotated[
        float | None, typer.Option("--for", min=0, help="Seconds.", show_default="until Ctrl-C")
    ] = None,
    batches: Annotated[
        int | None, typer.Option(min=1, help="Batches of events.", show_default="no limit")
    ] = None,
    record: options.RecordTo = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the cache activity of a running engine: quire serve --events, vLLM, SGLang, Dynamo.

    Events tell what is stored and removed, not what is asked: a request that found all of its blocks is not seen, so
    the engine's own hit rate is higher. Tokens of prompts travel in clear, and are shown; a recording has none.

    [bold]Examples[/bold]

      quire watch tcp://127.0.0.1:5557
      quire watch tcp://127.0.0.1:5557 --for 60 --json
      quire watch tcp://127.0.0.1:5557 --record events.jsonl
    """
    require("observe", "quire watch")
    from quire.observe.zmq import Subscriber, beside

    if record is not None and record.exists():
        raise ConfigError(f"{str(record)!r} exists; --record writes a new file")
    console, consumer = output.stdout(), _Recorded(record)
    asked = beside(endpoint) if replay is None else None if replay == "none" else replay
    until = None if seconds is None else time.monotonic() + seconds
    with Subscriber(endpoint, consumer, replay=asked, topic=topic) as events:

        def known() -> dict[str, Any]:
            return _document(endpoint, events, consumer.activity)

        def follow(tell: Callable[[], None]) -> None:
            while until is None or time.monotonic() < until:
                left = WAIT_S if until is None else min(WAIT_S, max(until - time.monotonic(), 0))
                events.poll(left)
                tell()
                if batches is not None and consumer.num_batches >= batches:
                    return

        try:
            if as_json or not sys.stdout.isatty():
                follow(lambda: None)
            else:
                with Live(console=console, refresh_per_second=4, transient=True) as live:
                    follow(lambda: live.update(_picture(known())))
        except KeyboardInterrupt:
            if as_json:
                raise
        consumer.activity.end()
        document = known()
        output.answer(document, lambda known: console.print(_picture(known)), as_json=as_json)


class _Recorded:
    """The activity of the watched caches, and the file that batches are appended to."""

    def __init__(self, path: Path | None) -> None:
        from quire.observe.activity import Activity

        self.activity, self._path = Activity(), path
        self.num_batches = 0

    def begin(self, batches: "Sequence[EventBatch]") -> None:
        self.activity.begin(batches)

    def receive(self, batch: "EventBatch") -> None:
        from quire.observe.event_log import save_batch

        self.num_batches += 1
        self.activity.receive(batch)
        if self._path is not None:
            save_batch(self._path, batch)


def _document(endpoint: str, events: "Subscriber", activity: "Activity") -> dict[str, Any]:
    """Return all that is known as one document."""
    from quire.observe.follower import count_of

    following, mirror, what_if = events.following, activity.mirror, activity.what_if()
    next_number = following.next_number
    return {
        "endpoint": endpoint,
        "degraded": events.is_degraded,
        "next_batch": None if next_number is None else count_of(next_number),
        "gaps": following.num_gaps,
        "restarts": following.num_restarts,
        "unreadable": following.num_unreadable,
        "cached_blocks": [
            {"group": group, "medium": medium, "blocks": len(copies)}
            for (group, medium), copies in mirror.num_copies.items()
        ],
        "groups": {
            index: {"block_size": each.block_size, "kind": each.kind, "window": each.window}
            for index, each in mirror.groups.items()
        },
        "peak_blocks": activity.peak_blocks,
        "requests_seen": activity.num_requests,
        "hit_rate_seen": round(activity.hit_rate, 4),
        "stored_blocks": activity.num_stored,
        "removed_blocks": activity.num_removed,
        "stored_again_blocks": activity.num_again,
        "cleared": activity.num_cleared,
        "hottest": [
            {"tokens": each.num_tokens, "uses": each.num_uses, "last_tokens": each.last_tokens}
            for each in activity.hottest(NUM_HOT)
        ],
        "what_if": None
        if what_if is None
        else {str(by): round(what_if.at(what_if.capacity_blocks * by), 4) for by in FACTORS},
    }


def _picture(known: dict[str, Any]) -> Group:
    """Return the same for people."""
    state = (
        Text("degraded: some events are missing", "yellow")
        if known["degraded"]
        else Text("followed", "green")
    )
    table = Table(box=None, show_header=False, pad_edge=False)
    for each in known["cached_blocks"]:
        group = known["groups"].get(each["group"], {})
        said = f"{each['blocks']:,} blocks of {group.get('block_size', '?')} tokens"
        table.add_row(
            "cached", f"{said} on {each['medium']}, group {each['group']} {group.get('kind') or ''}"
        )
    again = known["stored_again_blocks"]
    table.add_row(
        "churn",
        f"{known['stored_blocks']:,} stored, {known['removed_blocks']:,} removed, {again:,} of them stored again",
    )
    table.add_row(
        "hit rate",
        f"{known['hit_rate_seen']:.1%} of the prompt tokens of {known['requests_seen']:,} requests that stored something",
    )
    if known["what_if"] is not None:
        told = ", ".join(f"{by}x {rate:.0%}" for by, rate in known["what_if"].items())
        table.add_row(
            "what if", f"{told} with so many times the {known['peak_blocks']:,} blocks of the peak"
        )
    for each in known["hottest"]:
        ids = " ".join(map(str, each["last_tokens"]))
        table.add_row(
            "hot",
            f"{each['tokens']:,} tokens, {each['uses']:,} went on from there; they end with {ids}",
        )
    head = Text.assemble(f"{known['endpoint']}  batch {known['next_batch'] or 0:,}  ", state)
    return Group(head, table)

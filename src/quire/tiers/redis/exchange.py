"""Many commands and their replies over one connection to a server, or over several in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from quire.tiers.redis.resp import Failure, Link, RedisRequest, Reply, Rubbish, Value

WINDOW_BYTES = 1 << 20
"""Bytes asked for and not answered yet, over all connections of a call; one command on each may exceed them.

Larger values are got one at a time from each: a server with several megabytes to answer over one connection
gives half the bytes per second.
"""

WINDOW_COMMANDS = 256
"""The same in commands: their lines, and the lines of their answers, fit into any socket's buffers."""


def exchange(
    links: Sequence[Link], requests: Sequence[RedisRequest], deadline: float, replies: list[Reply]
) -> None:
    """Send commands ahead of their replies, each over the next link in turn; append the replies, in order.

    Neither side ever waits for the other to read: answers that are under way are bounded by `WINDOW_BYTES`
    and `WINDOW_COMMANDS`. What is sent is not: a server takes the next value while it stores one. It ends early where a link `is_spent`; then others may have replies to come.

    Over several links a server writes to one while another is read. One thread is enough for that, and
    in Python it is faster than several.
    """
    sizes = [len(each.into or b"") for each in requests]
    total, width = len(requests), len(links)
    sent = under_way = 0

    def send_ahead(answered: int) -> None:
        """Fill the window where less than half of it is under way, or a link has nothing to answer."""
        nonlocal sent, under_way
        is_low = under_way < WINDOW_BYTES // 2 and sent - answered < WINDOW_COMMANDS // 2
        if not is_low and sent >= answered + width:
            return
        first, last = sent, min(total, answered + WINDOW_COMMANDS)
        while sent < last and (sent < answered + width or under_way + sizes[sent] <= WINDOW_BYTES):
            under_way += sizes[sent]
            sent += 1
        for start in range(first, min(sent, first + width)):
            links[start % width].send(requests[start:sent:width], deadline)

    send_ahead(0)
    for index, (request, link) in enumerate(zip(requests, cycle(links), strict=False)):
        reply = link.read(request.into, deadline)
        if not isinstance(reply, request.expects) and not isinstance(reply, Failure):
            raise Rubbish(f"an answer of another kind than the command's: {reply!r:.80}")
        replies.append(reply)
        if link.is_spent:
            return
        if sent < total:
            under_way -= sizes[index]
            # The server works on the next value while this one is looked at.
            send_ahead(index + 1)
        if request.arrived is not None and isinstance(reply, Value):
            request.arrived(reply)

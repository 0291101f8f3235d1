"""The last requests: the hits that the server told, and each prompt beside an earlier one."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import msgspec

from quire.web.mend_rules import MendDifference
from quire_sim.logs import LoggedRequest
from quire_sim.logs.entries import request_of
from quire_sim.logs.records import LogRecord
from quire_sim.logs.rows import TokenUsage
from quire_sim.tap.kinds import Beside, RecentPrompts
from quire_sim.tap.observing import Exchange

CHARS_PER_TOKEN = 4.0
"""Characters of a token, where the server told no tokens."""

SLACK = 128
"""Tokens by which a server may find less than what is equal: incomplete blocks, steps, templates."""


class Seen(msgspec.Struct):
    """A request as the terminal and the page show it.

    `kind`          that of `Beside`, or `unread` for one whose body is no prompt of a known API
    `cached_tokens` read from the cache by the server's own word; None: it told nothing
    `equal_tokens`  at the prompt's start that the nearest earlier prompt has too, estimated by characters
    `lost_tokens`   that both have behind their first difference, estimated: found again once that is mended
    `unused_tokens` that are equal at the start and that the server did not find: evicted, expired, or elsewhere
    `mends`         how the request was changed on its way: rule, place and both texts of each difference
    `path`, `at`    the first difference: its section and character; `earlier` and `this` are the two texts
    """

    number: int
    time_s: float
    url: str
    kind: str
    model: str = ""
    tenant: str = ""
    status: int = 0
    end: str = "whole"
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    first_s: float | None = None
    duration_s: float = 0.0
    nearest: int | None = None
    equal_tokens: int = 0
    lost_tokens: int = 0
    unused_tokens: int = 0
    path: str = ""
    at: int = 0
    earlier: str = ""
    this: str = ""
    mends: list[MendDifference] = []


class Watch:
    """The last requests and the sums of all; used by one thread.

    `is_private`  whether texts of prompts are left out
    """

    def __init__(self, *, most: int = 200, is_private: bool = False) -> None:
        self.recent: deque[Seen] = deque(maxlen=most)
        self.kinds: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()
        self.mends: Counter[str] = Counter()
        self._prompts = RecentPrompts()
        self._is_private = is_private

    def add(self, exchange: Exchange, fields: dict[str, Any]) -> Seen:
        """Return what a request found; `fields` are those of its record."""
        seen = Seen(
            self.sums["requests"] + 1,
            exchange.sent_s,
            exchange.path,
            "unread",
            status=exchange.status,
            end=exchange.end,
            first_s=exchange.first_s,
            duration_s=exchange.duration_s,
            mends=[
                each if not self._is_private else each._replace(before="", after="")
                for each in exchange.differences
            ],
        )
        request = _request(fields, seen.number)
        if request is not None:
            self._read(seen, request, exchange.usage)
        self.sums["requests"] += 1
        self.kinds[seen.kind] += 1
        self.mends.update({each.rule for each in seen.mends})
        self.sums["lost_tokens"] += seen.lost_tokens
        self.sums["unused_tokens"] += seen.unused_tokens
        if seen.cached_tokens is not None and seen.prompt_tokens:
            self.sums["prompt_tokens"] += seen.prompt_tokens
            self.sums["cached_tokens"] += seen.cached_tokens
        self.recent.append(seen)
        return seen

    def document(self) -> dict[str, Any]:
        """Return all of it as the page reads it."""
        requests = [*self.recent][::-1]
        counts = {"sums": dict(self.sums), "kinds": dict(self.kinds), "mends": dict(self.mends)}
        return counts | {"requests": requests}

    def _read(self, seen: Seen, request: LoggedRequest, told: tuple[int, int, int] | None) -> None:
        usage = request.usage
        if told is not None:
            usage = TokenUsage(told[0], told[1], output_tokens=told[2])
        seen.model, seen.tenant = request.model, request.tenant
        seen.prompt_tokens, seen.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        seen.output_tokens = usage.output_tokens
        if not 200 <= seen.status < 300:
            seen.kind = "refused"  # the server computed nothing: later prompts cannot find it
            return
        beside = self._prompts.add(request)
        seen.kind = beside.kind
        seen.nearest = beside.nearest
        rate = 1 / CHARS_PER_TOKEN
        if usage.prompt_tokens and beside.num_chars:
            rate = usage.prompt_tokens / beside.num_chars
        seen.equal_tokens = round(rate * beside.num_equal)
        self._lose(seen, beside, rate)

    def _lose(self, seen: Seen, beside: Beside, rate: float) -> None:
        difference = beside.difference
        if difference is not None:
            seen.lost_tokens = round(rate * difference.num_equal_behind)
            seen.path, seen.at = difference.path, difference.at
            if not self._is_private:
                seen.earlier, seen.this = difference.earlier, difference.this
        if seen.cached_tokens is not None:
            unused = seen.equal_tokens - seen.cached_tokens
            seen.unused_tokens = unused if unused > max(SLACK, seen.equal_tokens // 10) else 0


def _request(fields: dict[str, Any], row: int) -> LoggedRequest | None:
    """Return the request of a record; None if its body is no prompt."""
    try:
        plain: Any = msgspec.json.decode(msgspec.json.encode(fields))
        if not isinstance(plain.get("request"), dict):
            return None
        return request_of(LogRecord(row, plain))
    except (ValueError, TypeError, RecursionError):
        return None

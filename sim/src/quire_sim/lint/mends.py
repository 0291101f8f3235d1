"""Mends of a log: what each rewrite of its bodies saves, by replaying the log through the same cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from quire_sim.lint import rewrites
from quire_sim.lint.rewrites import Body, ChangingParts
from quire_sim.lint.warming import warm_first
from quire_sim.logs import Api, LoggedRequest, sections_of


class Mend(NamedTuple):
    """A rewrite of bodies: its name, the causes that it ends, and whether answers may change.

    `is_timing`  whether it changes when requests are sent, and no body
    """

    name: str
    causes: tuple[str, ...]
    title: str
    rewrite: Callable[[Body, Api, ChangingParts], Body]
    changes_meaning: bool = False
    is_timing: bool = False


MENDS = (
    Mend("cache-key", ("other-machine",), "set prompt_cache_key, one for each conversation", rewrites.set_cache_key),
    Mend("line-ends", ("line-ends",), "write LF for CR LF", rewrites.normalise("line-ends")),
    Mend("blanks", ("whitespace",), "write single blanks, and none at the ends of lines", rewrites.normalise("whitespace")),
    Mend("nfc", ("unicode",), "normalise texts to NFC", rewrites.normalise("unicode")),
    Mend("sort-keys", ("key-order",), "sort the keys of JSON", rewrites.sort_keys),
    Mend("sort-tools", ("tool-order",), "sort tools by name", rewrites.sort_tools),
    Mend("sort-passages", ("passage-order",), "sort passages; answers may change", rewrites.sort_passages, True),
    Mend("split-off", ("moved-block",), "send the block or message that moves as the last message", rewrites.split_off),
    Mend("move-lines", ("time", "identifier", "counter", "user-data", "header-line"), "move lines that change to the end of the last user message", rewrites.move_lines),
    Mend("breakpoints", ("no-breakpoint", "behind-breakpoint"), "place breakpoints behind the system prompt and the last message", rewrites.place_breakpoints),
    Mend("warm-first", ("at-once",), "send one of several requests first, the others once its answer begins", rewrites.as_it_is, is_timing=True),
)  # fmt: skip
"""All mends, in the order in which they are applied together."""


class MendedHits(msgspec.Struct):
    """The hits of a log in a cache, in tokens, and the price of its input, in input tokens."""

    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0
    price: float = 0.0


class MendGain(msgspec.Struct):
    """A mend and what it changes: requests that it rewrites, and hits with it alone.

    `seconds` of prefill by the timing model, and `cost` in the currency of `--price`; None: not asked for
    """

    name: str
    title: str
    changes_meaning: bool
    requests: int
    after: MendedHits
    seconds: float | None = None
    cost: float | None = None


class MendReport(msgspec.Struct):
    """The hits of a log as it is, with each mend alone, and with several together.

    Together are those that keep the meaning and do not find less alone.
    """

    before: MendedHits
    together: MendedHits
    seconds: tuple[float, float] | None = None
    cost: tuple[float, float] | None = None
    mends: list[MendGain] = []

    @property
    def worse(self) -> set[str]:
        """Names of mends that find less alone."""
        found = self.before.hit_tokens
        return {each.name for each in self.mends if each.after.hit_tokens < found}


def mends_for(causes: Iterable[str], names: Sequence[str] = ()) -> list[Mend]:
    """Return the mends of some causes; those of `names` alone, if there are any."""
    known = set(causes)
    return [
        each for each in MENDS if known & set(each.causes) and (not names or each.name in names)
    ]


def mended(request: LoggedRequest, mends: Sequence[Mend], learned: ChangingParts) -> LoggedRequest:
    """Return a request with a rewritten body; the request itself if nothing changes."""
    if not request.body or request.api in {"text", "usage"}:
        return request
    body = request.body
    for mend in mends:
        body = mend.rewrite(body, request.api, learned)
    if body == request.body and [*body] == [*request.body] and _same(body, request.body):
        return request
    key = str(body.get("prompt_cache_key") or "")
    sections = sections_of(body, request.api)
    return msgspec.structs.replace(request, body=body, sections=sections, cache_key=key)


def mend_report(
    log: Iterable[LoggedRequest],
    mends: Sequence[Mend],
    learned: ChangingParts,
    hits: Callable[[Iterator[LoggedRequest]], MendedHits],
) -> MendReport:
    """Return what mends save; `hits` replays requests through an empty cache."""

    def replayed(chosen: Sequence[Mend]) -> tuple[MendedHits, int]:
        changed = 0

        def requests() -> Iterator[LoggedRequest]:
            nonlocal changed
            for request in log:
                found = mended(request, chosen, learned) if chosen else request
                changed += found is not request
                yield found

        def timed() -> Iterator[LoggedRequest]:
            nonlocal changed
            for request, wait_s in warm_first(requests()):
                changed += wait_s > 0
                yield request

        is_timed = any(mend.is_timing for mend in chosen)
        return hits(timed() if is_timed else requests()), changed

    before, _ = replayed(())
    report = MendReport(before, before)
    for mend in mends:
        after, changed = replayed((mend,))
        if changed:
            gain = MendGain(mend.name, mend.title, mend.changes_meaning, changed, after)
            report.mends.append(gain)
    chosen = [mend for mend in mends if not mend.changes_meaning and mend.name not in report.worse]
    report.together = replayed(chosen)[0] if chosen else before
    return report


def _same(one: Body, other: Body) -> bool:
    """Whether two equal bodies have the keys of their tools in the same order, too."""
    return all(repr(one.get(name)) == repr(other.get(name)) for name in ("tools", "functions"))

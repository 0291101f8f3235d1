"""The part of `quire lint` that shows what a server's cache finds."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console

from quire.config import parse_bytes
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire_sim.caches import CacheOptions, CacheReport, ExactTokens, Prediction, TextPieces
    from quire_sim.lint import LintReport
    from quire_sim.lint.joined import JoinedLosses
    from quire_sim.logs import LogFile, LoggedRequest

SHOWN = 5
"""Differences from the server's own counts on the screen."""


def capacity_of(kv_tokens: int | None, kv_memory: str | None, model: str | None) -> int | None:
    """Return the capacity of a cache in tokens; None: no limit. Raises `ConfigError`."""
    if kv_memory is None:
        return kv_tokens
    if kv_tokens is not None:
        raise ConfigError("--kv-memory and --kv-tokens both say the capacity: give one of them")
    if model is None:
        raise ConfigError(
            "--kv-memory needs --model, whose bytes per token it divides by; or give --kv-tokens"
        )
    from quire_sim.hardware import model_named

    per_token = model_named(model).kv.per_token
    tokens = parse_bytes(kv_memory) // max(per_token, 1)
    if tokens < 1:
        raise ConfigError(
            f"--kv-memory {kv_memory} holds no token of {per_token:,} bytes; give more"
        )
    return tokens


def noted(
    requests: "Iterable[LoggedRequest]", say: Callable[[int], object]
) -> "Iterator[LoggedRequest]":
    """Yield requests, and say now and then how many they were."""
    from quire_sim.lint.linting import EVERY

    for count, request in enumerate(requests):
        if not count % EVERY:
            say(count)
        yield request


class AskedCache(NamedTuple):
    """The cache of a server that a log is sent through: its options, and the line whose hit is shown.

    `has_curve` asks caches of half the capacity, twice, four and eight times of it as well.
    """

    server: str
    options: "CacheOptions"
    row: int | None = None
    has_curve: bool = False


def found_in(
    log: "LogFile",
    requests: "Iterable[LoggedRequest]",
    asked: AskedCache,
    prompts: "TextPieces | ExactTokens",
    *,
    joined: "JoinedLosses",
    report: "LintReport",
) -> "CacheReport":
    """Return the requests of a log in the cache of a server, and join its losses to a report.

    With a curve, the log is read again for each capacity. Raises `ConfigError`, `TraceError`.
    """
    import msgspec

    from quire_sim.caches import cache_of, cache_report, predictions
    from quire_sim.lint.joined import least_of

    def joining() -> "Iterator[Prediction]":
        least = least_of(report)
        for each in predictions(requests, cache_of(asked.server, asked.options), prompts.prompt):
            joined.find(each.hit, least)
            yield each

    found = cache_report(asked.server, joining(), asked.row)
    joined.join(report, found)
    capacity = asked.options.capacity_tokens
    if asked.has_curve and capacity is not None:
        found.curve[capacity] = found.hit_rate
        for factor in (0.5, 2, 4, 8):
            size = round(capacity * factor)
            options = msgspec.structs.replace(asked.options, capacity_tokens=size)
            again = predictions(log, cache_of(asked.server, options), prompts.prompt)
            found.curve[size] = cache_report(asked.server, again).hit_rate
    return found


def show_hits(console: Console, report: "CacheReport") -> None:
    """Print what the line that was asked for finds in a cache."""
    from quire_sim.caches import DIFFERENCES, REASONS

    for each in report.asked:
        hit = each.hit
        told = "" if each.told_hit_tokens is None else f"; the server told {each.told_hit_tokens:,}"
        differs = f", {DIFFERENCES[each.differs]}" if each.differs else ""
        console.print(
            f"The cache of {report.server} finds {hit.hit_tokens:,} of {hit.prompt_tokens:,} tokens, and earlier "
            f"prompts have {hit.seen_tokens:,}: {REASONS[hit.why]}{told}{differs}\n",
            highlight=False,
        )


def show_cache(console: Console, report: "CacheReport") -> None:
    """Print what a server's cache finds beside its causes, and how the server's own counts differ."""
    from quire_sim.caches import DIFFERENCES

    about = "about " * report.is_estimated
    whole = max(report.prompt_tokens, 1)
    console.print(f"In the cache of {report.server}:", highlight=False)
    console.print(
        f"  earlier prompts begin with {about}{report.seen_tokens / whole:.1%} of {report.prompt_tokens:,} prompt tokens",
        highlight=False,
    )
    if report.server in {"openai", "anthropic"}:
        console.print(
            f"  prompts cost {about}{report.cost / whole:.1%} of the price without a cache, writing included",
            highlight=False,
        )
    for ttl, tokens in sorted(report.written.items()):
        console.print(f"  {about}{tokens:,} tokens are written for {ttl:,} s")
    for size in sorted(report.curve):
        console.print(
            f"  a capacity of {size:,} tokens finds {report.curve[size]:.1%}", highlight=False
        )
    if report.points_off is not None:
        more = "more" if report.points_off < 0 else "less"
        told = report.told_hit_tokens / report.told_of_tokens
        console.print(
            f"  the server told {told:.1%} for {report.told:,} requests: {report.equal:,} equal, "
            f"of all tokens {abs(report.points_off):.1f} points {more}",
            highlight=False,
        )
        for name, count in sorted(report.differences.items(), key=lambda pair: -pair[1]):
            console.print(f"    {count:,}: {DIFFERENCES[name]}", highlight=False)
        for each in [each for each in report.shown if each.differs != "estimated"][:SHOWN]:
            hit = each.hit
            console.print(
                f"    line {hit.row:,}: predicted {hit.hit_tokens:,}, told {each.told_hit_tokens:,} "
                f"of {hit.prompt_tokens:,}",
                style="bright_black",
                highlight=False,
            )
    console.print()

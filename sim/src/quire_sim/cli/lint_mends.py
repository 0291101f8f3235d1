"""The part of `quire lint` that shows what mends save, and writes the mended log."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Column
from rich.text import Text

from quire.cli.output import CACHED
from quire.cli.tables import plain_table
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire_sim.caches import CacheOptions, ExactTokens, TextPieces
    from quire_sim.hardware import ModelTimes
    from quire_sim.lint import LintReport
    from quire_sim.lint.mends import Mend, MendedHits, MendReport
    from quire_sim.lint.rewrites import ChangingParts
    from quire_sim.logs import LogFile, LoggedRequest
    from quire_sim.rendering import PromptRenderer

MOST_REQUESTS = 20_000
"""Requests of a log that is replayed for every mend without being asked."""


class Replaying(NamedTuple):
    """The cache that requests are replayed through: that of a server, or one without limits."""

    server: str | None
    options: "CacheOptions"
    prompts: "TextPieces | ExactTokens"
    renderer: "PromptRenderer | None"
    chars_per_token: float
    times: "ModelTimes | None" = None


def chosen_mends(report: "LintReport", lost: set[str], names: list[str]) -> "list[Mend]":
    """Return the mends of a report's causes and a cache's reasons. Raises `ConfigError` for a wrong name."""
    from quire_sim.lint.mends import MENDS, mends_for

    known = [each.name for each in MENDS]
    for name in names:
        if name not in known:
            raise ConfigError(f"--mend {name!r} is no mend; they are {', '.join(known)}")
    return mends_for({share.cause for share in report.causes} | lost, names)


def mends_of(
    log: "LogFile",
    mends: "list[Mend]",
    learned: "ChangingParts",
    how: Replaying,
    price: float | None,
) -> "MendReport":
    """Return what mends save in a log, by replaying it for each."""
    from quire_sim.lint.mends import mend_report

    seconds: list[float] = []

    def hits(requests: "Iterator[LoggedRequest]") -> "MendedHits":
        found, spent = _hits(requests, how)
        seconds.append(spent)
        return found

    report = mend_report(log, mends, learned, hits)
    if price is not None:
        report.cost = _cost(report.before, price), _cost(report.together, price)
        for each in report.mends:
            each.cost = _cost(each.after, price)
    if how.times is not None:
        report.seconds = seconds[0], seconds[-1]
        names = [mend.name for mend in mends]
        for each in report.mends:
            each.seconds = seconds[1 + names.index(each.name)]
    return report


def _cost(found: "MendedHits", price: float) -> float:
    return found.price * price / 1e6


def _hits(requests: "Iterator[LoggedRequest]", how: Replaying) -> "tuple[MendedHits, float]":
    """Return the hits of requests in an empty cache, and the seconds of their prefill."""
    from quire_sim.caches import cache_of, predictions, read_rules
    from quire_sim.caches.rules import rules_of
    from quire_sim.lint.mends import MendedHits

    found, seconds = MendedHits(), 0.0

    def count(size: float, hit: float, price: float) -> None:
        nonlocal seconds
        found.prompt_tokens += size
        found.hit_tokens += hit
        found.price += price
        if how.times is not None and size > hit:
            seconds += how.times.step_s([(max(round(size - hit), 1), round(hit))])

    if how.server is None:
        for size, hit in _unlimited(requests, how):
            count(size, hit, size - hit)
        return found, seconds
    rules = (
        rules_of(how.server, read_rules(how.options.rules))
        if how.server in {"openai", "anthropic"}
        else None
    )
    models: list[str] = []

    def noted() -> "Iterator[LoggedRequest]":
        for request in requests:
            if request.sections:
                models.append(request.model)
            yield request

    for each in predictions(noted(), cache_of(how.server, how.options), how.prompts.prompt):
        hit = each.hit
        price = float(hit.prompt_tokens - hit.hit_tokens)
        if rules is not None:
            of_model = rules.of(models[hit.number] if hit.number < len(models) else "")
            price += hit.hit_tokens * of_model.read
            price += sum(
                tokens * (of_model.write_price(ttl) - 1) for ttl, tokens in hit.written.items()
            )
        count(hit.prompt_tokens, hit.hit_tokens, price)
    return found, seconds


def _unlimited(
    requests: "Iterator[LoggedRequest]", how: Replaying
) -> "Iterator[tuple[float, float]]":
    """Yield tokens and hits of each prompt in a cache without limits."""
    from quire_sim.lint.exact import ExactPrompts
    from quire_sim.lint.nearest import PromptTrie

    trie = PromptTrie(compares=False) if how.renderer is None else ExactPrompts(how.renderer)
    factor = how.chars_per_token if how.renderer is None else 1
    for request in requests:
        if request.sections:
            try:
                found = trie.add(request)
            except ConfigError:  # not rendered: counted by the report
                continue
            yield found.size / factor, found.hit / factor


def show_mends(console: Console, report: "MendReport", *, is_estimated: bool) -> None:
    """Print what mends save, alone and together."""
    if not report.mends:
        return
    about = "about " * is_estimated
    has_time, has_cost = report.seconds is not None, report.cost is not None
    more = ["prefill"] * has_time + ["cost"] * has_cost
    table = plain_table(
        Column("mend"), "requests", "hit tokens", "hit rate", *more, Column("what it does")
    )

    def row(
        name: str,
        requests: str,
        found: "MendedHits",
        what: str,
        spent: tuple[float | None, float | None],
    ) -> None:
        rate = found.hit_tokens / max(found.prompt_tokens, 1)
        cells = [name, requests, f"{found.hit_tokens:,.0f}", f"{rate:.1%}"]
        cells += [f"{spent[0] or 0:,.2f} s"] * has_time + [f"{spent[1] or 0:,.4f}"] * has_cost
        table.add_row(*cells, Text(what))

    seconds, cost = report.seconds or (None, None), report.cost or (None, None)
    row("none", "", report.before, "", (seconds[0], cost[0]))
    for each in report.mends:
        row(each.name, f"{each.requests:,}", each.after, each.title, (each.seconds, each.cost))
    row(
        "together",
        "",
        report.together,
        "all that keep the meaning and do not find less",
        (seconds[1], cost[1]),
    )
    now, then = (
        each.hit_tokens / max(each.prompt_tokens, 1) for each in (report.before, report.together)
    )
    is_written = any(each.name != "warm-first" for each in report.mends)
    written = "; --apply FILE writes the log with these mends" * is_written
    console.print(Text.assemble("Mended, the cache finds ", (f"{about}{then:.1%}", CACHED), f" in place of {now:.1%}{written}"), soft_wrap=True)  # fmt: skip
    console.print(table)
    console.print()


def apply_mends(
    log: "LogFile", path: Path, mends: "list[Mend]", learned: "ChangingParts", names: list[str]
) -> str:
    """Write the mended log, and return a sentence. Mends that change the meaning have to be named. Raises `ConfigError`."""
    from quire_sim.lint.applying import write_mended

    if path.resolve() == log.path.resolve():
        raise ConfigError(f"--apply {path} is the log itself; name another file")
    timed = [mend.name for mend in mends if mend.is_timing]
    if timed and timed == names:
        raise ConfigError(
            f"--mend {timed[0]} changes when requests are sent, which no log says: there is nothing to --apply"
        )
    chosen = [mend for mend in mends if not mend.is_timing and (names or not mend.changes_meaning)]
    changed = write_mended(log, path, chosen, learned)
    what = ", ".join(mend.name for mend in chosen) or "no mend"
    left = [mend.name for mend in mends if mend not in chosen and not mend.is_timing]
    kept = (
        f"; {', '.join(left)} may change answers and is left out, --mend names it" if left else ""
    )
    return f"{path}: {changed:,} requests changed by {what}{kept}"


def times_for(model: str | None, gpu: str | None) -> Any:
    """Return the times of a model on an accelerator; None without one. Raises `ConfigError`."""
    if gpu is None:
        return None
    if model is None:
        raise ConfigError("--gpu needs --model, whose prefill it takes the time of")
    from quire_sim.hardware import EngineTimes, accelerator_named, model_named

    return EngineTimes(model_named(model), accelerator_named(gpu), 1)

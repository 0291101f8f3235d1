"""The parts of `quire lint` that print a report, and one request."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column
from rich.text import Text

from quire.cli.output import CACHED
from quire.cli.tables import plain_table
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire_sim.lint import LintReport, Loss
    from quire_sim.logs import LogFile
    from quire_sim.rendering import PromptRenderer

SHOWN = 5
"""Causes on the screen."""


def show(console: Console, report: "LintReport", *, private: bool) -> None:
    """Print a report on one screen."""
    from quire_sim.lint.joined import cause_named

    about = "about " * report.is_estimated
    whole = max(report.prompt_tokens, 1)
    console.print()
    console.print(Text.assemble((report.source, "bold"), f": {report.requests:,} requests ({report.format}), "
                                f"{about}{report.prompt_tokens:,.0f} prompt tokens"), soft_wrap=True)  # fmt: skip
    if report.without_prompt:
        console.print(f"  {report.without_prompt:,} have counts and no prompt")
    if report.told_prompt_tokens:
        told = (report.told_cached_tokens or 0) / report.told_prompt_tokens
        console.print(
            f"  cached by the server's own count: {told:.1%} of {report.told_prompt_tokens:,} tokens"
        )
    if not report.requests:
        return
    now, then = report.hit_tokens / whole, (report.hit_tokens + report.lost_tokens) / whole
    cache = f"the cache of {report.server}" if report.server else "a prefix cache without limits"
    console.print(Text.assemble(f"  {cache} finds ", (f"{about}{now:.1%}", CACHED), " now, and ",
                                (f"{about}{then:.1%}", CACHED), " if all below is mended"))  # fmt: skip
    if report.rounding_tokens:
        console.print(f"  {about}{report.rounding_tokens:,.0f} tokens ({report.rounding_tokens / whole:.1%}) "
                      "are the rest of a block or step, and last tokens: always computed", highlight=False)  # fmt: skip
    if not report.causes:
        console.print("  Nothing breaks the cache: all that prompts repeat is found.\n")
        return
    lost = f"{about}tokens lost"
    table = plain_table(Column("cause"), "requests", lost, "of all", Column("place"))
    first = [share for share in report.causes if share.requests]
    for share in first[:SHOWN]:
        place = max(share.paths, key=lambda path: share.paths[path])
        more = f" and {len(share.paths) - 1:,} more" if len(share.paths) > 1 else ""
        table.add_row(
            cause_named(share.cause).title,
            f"{share.requests:,}",
            f"{share.tokens:,.0f}",
            f"{share.share:.1%}",
            place + more,
        )
    console.print(table)
    for share in first[:SHOWN]:
        if share.example is not None:
            console.print()
            console.print(Text(cause_named(share.cause).title, "bold"))
            _show_loss(console, share.example, private=private)
            if advice := cause_named(share.cause).advice:
                console.print(Text(f"  {advice}"))
            for each in share.example.behind:
                then = f"  Once that is mended: {cause_named(each.cause).title} in {each.path} costs {about}{each.tokens:,.0f} tokens"
                console.print(Text(then + " of these.", "bright_black"), soft_wrap=True)
    if len(first) > SHOWN:
        rest = sum(share.tokens for share in first[SHOWN:])
        console.print(
            f"\n{len(first) - SHOWN} more causes lose {about}{rest:,.0f} tokens; --json has them"
        )
    how = "exact, by the model's tokenizer and chat template"
    if report.is_estimated:
        how = f"estimated: {report.chars_per_token:.2f} characters each; --model counts exactly"
    console.print(Text(f"\n  tokens are {how}", "bright_black"))
    console.print()


def _show_loss(console: Console, loss: "Loss", *, private: bool) -> None:
    at = f", character {loss.at:,}" if loss.before or loss.at else ""
    after = f" after line {loss.earlier_row:,}" if loss.earlier_row else ""
    where = f"  {loss.path}{at}: line {loss.row:,}{after}"
    console.print(Text(where, "bright_black"))
    if private or not (loss.old or loss.new):
        return
    before = loss.before.rpartition("\n")[2]
    for mark, text, style in (("-", loss.old, "red"), ("+", loss.new, "green")):
        console.print(
            Text.assemble(f"  {mark} {_shown(before)}", (_shown(text), style)), soft_wrap=True
        )


def _shown(text: str) -> str:
    """Return a text on one line, its blanks visible."""
    return text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t")


def show_request(
    console: Console,
    log: "LogFile",
    report: "LintReport",
    row: int,
    renderer: "PromptRenderer | None" = None,
    *,
    private: bool,
) -> None:
    """Print the sections of a request, and where it parts from an earlier one. Raises `ConfigError`."""
    found = next((each for each in log if each.row == row), None)
    if found is None:
        raise ConfigError(f"--request {row}: line {row} of the log has no request that can be read")
    console.print()
    head = "tokens, about" if renderer is None else "tokens"
    table = plain_table(Column("section"), Column("role"), head, Column("begins"))
    for section in found.sections:
        begins = "" if private else _shown(section.text[:48])
        size = (len(section.text) + len(section.media)) / report.chars_per_token
        if renderer is not None:
            size = renderer.count(section.text)
        table.add_row(Text(section.path), section.role, f"{size:,.0f}", Text(begins))
    console.print(table)
    if renderer is not None:
        console.print(f"  with the chat template: {len(renderer.ids(found)):,} tokens")
    if not report.losses:
        console.print("  It loses nothing: an earlier prompt begins with all that it repeats.\n")
    about = "about " * report.is_estimated
    for loss in report.losses:
        console.print()
        console.print(Text(f"{loss.cause}: {about}{loss.tokens:,.0f} tokens lost", "bold"))
        _show_loss(console, loss, private=private)
    console.print()

"""`quire lint`: the lines of a request log's prompts that break the prefix cache."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from quire.cli.files import check_writable, write_text
from quire.cli.options import AsJson, Mends
from quire.cli.output import CACHED, print_json, progress, stderr, stdout
from quire.cli.tables import plain_table
from quire.errors import ConfigError
from quire_sim.cli.lint_caches import capacity_of, found_in, show_cache, show_hits
from quire_sim.cli.lint_mends import (
    MOST_REQUESTS,
    Replaying,
    apply_mends,
    chosen_mends,
    mends_of,
    show_mends,
    times_for,
)

if TYPE_CHECKING:
    from quire_sim.caches import ExactTokens, TextPieces
    from quire_sim.lint import LintReport, Loss
    from quire_sim.logs import LogFile
    from quire_sim.rendering import PromptRenderer

SHOWN = 5
"""Causes on the screen."""


def lint(
    log: Annotated[Path, typer.Argument(help="A request log.", show_default=False)],
    *,
    log_format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="The format of the file, if its content leaves it open.",
            show_default="found out",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A model: a local folder or file, or a name.",
            show_default="estimate",
        ),
    ] = None,
    request: Annotated[
        int | None,
        typer.Option(min=1, help="Show the request in this line of the log.", show_default=False),
    ] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="Exit with 1 if at least this share of the prompt tokens is lost: 5%.",
            show_default=False,
        ),
    ] = None,
    report_to: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Write it as a page (.html) or picture (.svg), too, whichever the command has.",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            help="Show what this cache finds: quire, vllm, sglang, llama.cpp, openai, anthropic.",
            show_default=False,
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens that the cache of the server holds.", show_default="all"),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="Memory for cached K and V.", show_default=False),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens per block.", show_default="16")
    ] = None,
    curve: Annotated[
        bool, typer.Option("--curve", help="Show the hit rates of half to 8 times the capacity.")
    ] = False,
    rules: Annotated[
        Path | None,
        typer.Option(help="A file of providers' rules.", show_default="those of quire"),
    ] = None,
    hashed: Annotated[
        Path | None,
        typer.Option(
            "--hashed",
            help="Write the log without its text, for others: FILE.jsonl.gz.",
            show_default=False,
        ),
    ] = None,
    mend: Mends = None,
    apply: Annotated[
        Path | None,
        typer.Option(help="Write the mended log to this file.", show_default=False),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="An accelerator: h100, mi300x, cpu, ...; or a .json file of yours.",
            show_default=False,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Price of a million input tokens.", show_default=False),
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Show no text of prompts.")] = False,
    as_json: AsJson = False,
) -> None:
    """The lines that break the prefix cache of your requests, and the tokens that they cost.

    Reads bodies of OpenAI's and Anthropic's APIs, exports, sessions of coding agents, and others. Each
    prompt is compared with the nearest earlier one, as by a cache without limits. Nothing leaves the machine.
    With --model, tokens are counted exactly, by its tokenizer and chat template, and --gpu tells seconds of prefill.

    [bold]Examples[/bold]

      quire lint requests.jsonl
      quire lint requests.jsonl --model models/qwen3
      quire lint requests.jsonl --request 17
      quire lint requests.jsonl --report requests.html
      quire lint requests.jsonl --hashed for-others.jsonl.gz
      quire lint requests.jsonl --fail-on 5% --private
      quire lint requests.jsonl --server vllm --kv-tokens 200000
      quire lint requests.jsonl --server anthropic --rules rules.toml
      quire lint requests.jsonl --apply mended.jsonl
      quire lint requests.jsonl --json
    """
    import msgspec

    from quire_sim.caches import CacheOptions, cache_of
    from quire_sim.lint import lint_log
    from quire_sim.lint.hashing import HashedRows
    from quire_sim.lint.linting import hide_words
    from quire_sim.lint.picture import LintPicture
    from quire_sim.lint.rewrites import ChangingParts
    from quire_sim.lint.texts import BYTES_PER_TOKEN
    from quire_sim.logs import open_log

    check_writable(report_to, ".html")
    check_writable(hashed)
    check_writable(apply)

    limit = None if fail_on is None else _share(fail_on)
    options = CacheOptions(
        capacity_of(kv_tokens, kv_memory, model),
        block_size,
        rules=None if rules is None else str(rules),
    )
    if server is None and options != CacheOptions():
        raise ConfigError(
            "--kv-tokens, --kv-memory, --block-size and --rules belong to --server; name one"
        )
    if curve and options.capacity_tokens is None:
        raise ConfigError("--curve is by capacity: give --server with --kv-tokens or --kv-memory")
    if server is not None:
        cache_of(server, options)  # wrong options are told before the log is read
    times = times_for(model, gpu)
    opened = open_log(log, format=log_format)
    learned = ChangingParts()
    with progress(f"reading {log.name}") as say:
        renderer = None if model is None else _renderer(model, server)
        picture = LintPicture(1.0 if renderer else BYTES_PER_TOKEN)
        rows = HashedRows()
        watchers = [picture.add] * bool(report_to) + [rows.add] * bool(hashed)
        report = lint_log(
            opened,
            renderer=renderer,
            watchers=watchers,
            learned=learned,
            keep=lambda loss: request is None or loss.row == request,
            on_progress=lambda count: say(f"{log.name}: {count:,} requests"),
        )
    if private:
        hide_words(report)
    cache = None
    if server is not None:
        cache = found_in(
            opened, server, options, _prompts(renderer, report), row=request, has_curve=curve
        )
    mends, saved = [], None
    if (
        opened.format != "hashed"
        and report.requests
        and (mend or apply or report.requests <= MOST_REQUESTS)
    ):
        mends = chosen_mends(report, set(cache.lost) if cache else set(), mend or [])
        how = Replaying(
            server, options, _prompts(renderer, report), renderer, report.chars_per_token, times
        )
        if mends and request is None:
            saved = mends_of(opened, mends, learned, how, price)
    if request is not None:
        show_request(stdout(), opened, report, request, renderer, private=private)
        if cache is not None:
            show_hits(stdout(), cache)
    elif as_json:
        told = {} if cache is None else {"cache": msgspec.to_builtins(cache)}
        if saved is not None:
            told["mending"] = msgspec.to_builtins(saved)
        print_json(msgspec.to_builtins(report) | told)
    else:
        show(stdout(), report, private=private)
        if cache is not None:
            show_cache(stdout(), cache)
        if saved is not None:
            show_mends(stdout(), saved, is_estimated=report.is_estimated)
    if apply is not None:
        said = apply_mends(opened, apply, mends, learned, mend or [])
        stderr().print(said, markup=False, highlight=False)
    if hashed is not None:
        rows.save(report, hashed)
        stderr().print(f"log without text written to {hashed}", markup=False, highlight=False)
    if report_to is not None:
        from quire_sim.report.linted import lint_html

        write_text(report_to, lint_html(report, picture, saved, private=private))
        stderr().print(f"report written to {report_to}", markup=False, highlight=False)
    for sentence in report.unread:
        stderr().print(f"{log.name}: {sentence}", markup=False, highlight=False)
    if (
        limit is not None
        and report.prompt_tokens
        and report.lost_tokens / report.prompt_tokens >= limit
    ):
        raise typer.Exit(1)


def _prompts(renderer: "PromptRenderer | None", report: "LintReport") -> "TextPieces | ExactTokens":
    from quire_sim.caches import ExactTokens, TextPieces

    return TextPieces(report.chars_per_token) if renderer is None else ExactTokens(renderer)


def _renderer(model: str, server: str | None) -> "PromptRenderer":
    from quire.cli.models import load_tokenizer
    from quire_sim.rendering import PromptRenderer

    return PromptRenderer(load_tokenizer(model), has_unused_tools=server == "vllm")


def show(console: Console, report: "LintReport", *, private: bool) -> None:
    """Print a report on one screen."""
    from quire_sim.lint import CAUSES

    by_name = {cause.name: cause for cause in CAUSES}
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
    console.print(Text.assemble("  a prefix cache without limits finds ", (f"{about}{now:.1%}", CACHED), " now, and ",
                                (f"{about}{then:.1%}", CACHED), " if all below is mended"))  # fmt: skip
    if not report.causes:
        console.print("  Nothing breaks the cache: no prompt repeats text behind a difference.\n")
        return
    lost = f"{about}tokens lost"
    table = plain_table(Column("cause"), "requests", lost, "of all", Column("place"))
    first = [share for share in report.causes if share.requests]
    for share in first[:SHOWN]:
        place = max(share.paths, key=lambda path: share.paths[path])
        more = f" and {len(share.paths) - 1:,} more" if len(share.paths) > 1 else ""
        table.add_row(
            by_name[share.cause].title,
            f"{share.requests:,}",
            f"{share.tokens:,.0f}",
            f"{share.share:.1%}",
            place + more,
        )
    console.print(table)
    for share in first[:SHOWN]:
        if share.example is not None:
            console.print()
            console.print(Text(by_name[share.cause].title, "bold"))
            _show_loss(console, share.example, private=private)
            console.print(Text(f"  {by_name[share.cause].advice}"))
            for each in share.example.behind:
                then = f"  Once that is mended: {by_name[each.cause].title} in {each.path} costs {about}{each.tokens:,.0f} tokens"
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
    where = (
        f"  {loss.path}, character {loss.at:,}: line {loss.row:,} after line {loss.earlier_row:,}"
    )
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


def _share(text: str) -> float:
    """Read a share like 5%. Raises `ConfigError`."""
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not text.strip().endswith("%") or not 0 < share <= 1:
        raise ConfigError(
            f"--fail-on {text!r} is no share of the prompt tokens: give one above 0% and up to 100%, like 5%"
        )
    return share

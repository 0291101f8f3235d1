"""`quire lint`: the lines of a request log's prompts that break the prefix cache."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quire.cli.files import check_writable, write_text
from quire.cli.options import AsJson, Mends
from quire.cli.output import print_json, progress, stderr, stdout
from quire.errors import ConfigError
from quire_sim.cli.lint_caches import (
    AskedCache,
    capacity_of,
    found_in,
    noted,
    show_cache,
    show_hits,
)
from quire_sim.cli.lint_mends import (
    MOST_REQUESTS,
    Replaying,
    apply_mends,
    chosen_mends,
    mends_of,
    show_mends,
    times_for,
)
from quire_sim.cli.lint_shown import show, show_request

if TYPE_CHECKING:
    from quire_sim.caches import ExactTokens, TextPieces
    from quire_sim.lint import LintReport
    from quire_sim.rendering import PromptRenderer


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
    from quire_sim.lint.hashing import HashedRows
    from quire_sim.lint.joined import JoinedLosses
    from quire_sim.lint.linting import LogLinting
    from quire_sim.lint.picture import LintPicture
    from quire_sim.lint.reports import hide_words
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
    if server is not None and opened.format == "hashed":
        raise ConfigError(
            f"{log} has no text, so no cache of {server} can be asked; leave --server out"
        )
    learned = ChangingParts()
    with progress(f"reading {log.name}") as say:
        renderer = None if model is None else _renderer(model, server)
        picture = LintPicture(1.0 if renderer else BYTES_PER_TOKEN)
        rows = HashedRows()
        joined = JoinedLosses()
        watchers = [picture.add] * bool(report_to) + [rows.add] * bool(hashed)
        watchers += [joined.add] * (server is not None)
        linting = LogLinting(opened, renderer=renderer, watchers=watchers, learned=learned)
        report, cache = linting.report, None
        requests = linting.requests(
            lambda loss: server is not None or request in {None, loss.row},
            lambda count: say(f"{log.name}: {count:,} requests"),
        )
        if server is None or renderer is None:
            for _ in requests:
                pass
        if server is not None:
            if renderer is None:  # pieces of text are as long as the whole log says
                requests = noted(opened, lambda count: say(f"{log.name}: {count:,} in the cache"))
            asked = AskedCache(server, options, request, has_curve=curve)
            prompts = _prompts(renderer, report, server)
            cache = found_in(opened, requests, asked, prompts, joined=joined, report=report)
            report.losses = [each for each in report.losses if request in {None, each.row}]
    if private:
        hide_words(report)
    mends, saved = [], None
    if (
        opened.format != "hashed"
        and report.requests
        and (mend or apply or report.requests <= MOST_REQUESTS)
    ):
        mends = chosen_mends(report, set(cache.lost) if cache else set(), mend or [])
        how = Replaying(
            server,
            options,
            _prompts(renderer, report, server),
            renderer,
            report.chars_per_token,
            times,
        )
        if mends and request is None:
            saved = mends_of(opened, mends, learned, how, price)
            mends = [each for each in mends if mend or each.name not in saved.worse]
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


def _prompts(
    renderer: "PromptRenderer | None", report: "LintReport", server: str | None
) -> "TextPieces | ExactTokens":
    from quire_sim.caches import ExactTokens, TextPieces

    if renderer is not None:
        return ExactTokens(renderer)
    return TextPieces(report.chars_per_token, has_schema=server == "openai")


def _renderer(model: str, server: str | None) -> "PromptRenderer":
    from quire.cli.models import load_tokenizer
    from quire_sim.rendering import PromptRenderer

    return PromptRenderer(load_tokenizer(model), has_unused_tools=server == "vllm")


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

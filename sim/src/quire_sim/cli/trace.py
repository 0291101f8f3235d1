"""`quire trace`: facts of a trace, and conversion to quire's own format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from quire.cli.files import check_writable
from quire.cli.options import AsJson, BlockSize, Seed
from quire.cli.output import BAR_WIDTH, CACHED, print_json, progress, stdout
from quire.cli.tables import facts_table, plain_table
from quire.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_sim.trace.facts import Distances, TraceFacts

BESIDE_BAR = 18
"""Columns that a table takes beside its first column and its bars."""

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")

Source = Annotated[Path, typer.Argument(help="A trace: plain, .gz or .zst.", show_default=False)]
Target = Annotated[
    Path, typer.Argument(help="The file to write: .gz, .zst, or plain.", show_default=False)
]
FormatName = Annotated[
    str | None,
    typer.Option(
        "--format",
        help="The format of the file, if its content leaves it open.",
        show_default=False,
    ),
]
FileBlockSize = Annotated[
    int | None,
    typer.Option(
        "--trace-block-size",
        help="Tokens per block of the file, where the file does not say it and its rows leave it open.",
        show_default=False,
    ),
]
TokenizerPath = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="Of conversations: a tokenizer.json or its folder.",
        show_default="every byte is a token",
    ),
]


@app.callback()
def traces() -> None:
    """Traces of requests: look into one, convert one, make one up.

    Reads the formats of Mooncake and of the Bailian traces, run-length JSON Lines, quire's own,
    logs of KV events, and conversations, each plain, gzip or zstd. docs/traces.md describes them.

    [bold]Examples[/bold]

      quire trace info conversation.jsonl.gz
      quire trace convert conversation.jsonl.gz conversation.quire.jsonl.gz
      quire trace make chat chats.jsonl.gz --num-requests 10000 --seed 1
    """


@app.command("info")
def info(
    file: Source,
    format_name: FormatName = None,
    trace_block_size: FileBlockSize = None,
    tokenizer: TokenizerPath = None,
    seed: Seed = 0,
    *,
    as_json: AsJson = False,
) -> None:
    """Describe a trace: sizes, sessions, possible reuse, reuse distances.

    The ceiling is the hit rate of a cache without limit. A distance in blocks is the
    size of the smallest LRU cache that still has the block when it is used again.

    [bold]Examples[/bold]

      quire trace info conversation.jsonl.gz
      quire trace info agent.jsonl --trace-block-size 16
      quire trace info conversation.jsonl.gz --json
    """
    from quire_sim.trace import open_trace
    from quire_sim.trace.facts import describe

    with progress(f"reading {file.name}") as begin:
        trace = open_trace(
            file, format=format_name, block_size=trace_block_size, tokenizer=tokenizer, seed=seed
        )
        facts = describe(trace, lambda count: begin(f"{file.name}: {count:,} requests"))
    if as_json:
        from msgspec import to_builtins

        print_json(to_builtins(facts))
        return
    show(stdout(), facts)


@app.command("convert")
def convert(
    source: Source,
    target: Target,
    *,
    format_name: FormatName = None,
    trace_block_size: FileBlockSize = None,
    tokenizer: TokenizerPath = None,
    seed: Seed = 0,
    to_block_size: Annotated[
        int | None,
        typer.Option(help="Write larger blocks: a multiple of the trace's.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a trace in quire's own format: checked, compact, ids dense and chained.

    Ids that were not chained are replaced by those of whole prefixes; rows without a prompt
    are left out.

    [bold]Examples[/bold]

      quire trace convert conversation.jsonl.gz conversation.quire.jsonl.zst
      quire trace convert agent.jsonl coarse.jsonl.gz --to-block-size 64
      quire trace convert sharegpt.json chats.jsonl.gz --tokenizer ./my-model
    """
    from quire_sim.cli.inputs import check_names_blocks
    from quire_sim.trace import open_trace, save_trace, with_block_size

    check_writable(target)

    with progress(f"converting {source.name}"):
        trace = open_trace(
            source, format=format_name, block_size=trace_block_size, tokenizer=tokenizer, seed=seed
        )
        check_names_blocks(trace)
        wanted = with_block_size(trace, to_block_size or trace.block_size)
        count = save_trace(wanted, target)
    written = {
        "source": str(source),
        "format": trace.format,
        "target": str(target),
        "block_size": wanted.block_size,
        "requests": count,
    }
    _tell(written, f"{count:,} requests", as_json=as_json)


@app.command("make")
def make(
    kind: Annotated[
        str, typer.Argument(help="chat, agent, rag, few-shot, scan or mix.", show_default=False)
    ],
    target: Target,
    *,
    num_requests: Annotated[int, typer.Option(min=0, help="Number of requests.")] = 10_000,
    seed: Seed = 0,
    rate: Annotated[
        float | None, typer.Option(help="Expected requests per second.", show_default="2")
    ] = None,
    block_size: BlockSize = 16,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="NAME=NUMBER: another number than the default, see --json; may be given again.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make up traffic and write it as a trace: the same seed gives the same bytes.

    chat: turns under a few system prompts. agent: tools, then calls and results.
    rag: popular documents before a question. few-shot: the same examples before
    every input. scan: long texts that come once. mix: all of them.
    sim/src/quire_sim/workload/settings.py has every distribution and default.

    [bold]Examples[/bold]

      quire trace make chat chats.jsonl.gz --num-requests 10000 --seed 1
      quire trace make mix traffic.jsonl.gz --rate 20 --set chat.turns=8
      quire trace make rag documents.jsonl --set documents=500 --set skew=1.2 --json
    """
    from quire_sim.trace import save_trace
    from quire_sim.workload import Workload, numbers_of, parts_named
    from quire_sim.workload.settings import REQUESTS_PER_S

    check_writable(target)
    workload = Workload(
        parts_named(kind, dict(_number(text) for text in change or [])),
        num_requests,
        seed,
        requests_per_s=REQUESTS_PER_S if rate is None else rate,
        block_size=block_size,
    )
    with progress(f"making {num_requests:,} requests"):
        save_trace(workload, target)
    total = sum(part.share for part in workload.parts.values())
    made = {
        "target": str(target),
        "requests": num_requests,
        "seed": seed,
        "requests_per_s": workload.requests_per_s,
        "block_size": block_size,
        "parts": {
            name: {"share": part.share / total} | numbers_of(part.kind)
            for name, part in workload.parts.items()
        },
    }
    _tell(made, f"{num_requests:,} requests of {workload.source},", as_json=as_json)


def _tell(written: dict[str, Any], what: str, *, as_json: bool) -> None:
    """Print the contents of a written trace."""
    target = written["target"]
    num_bytes = Path(target).expanduser().stat().st_size
    if as_json:
        print_json(written | {"bytes": num_bytes})
        return
    line = f"{target}: {what} in blocks of {written['block_size']} tokens, {num_bytes:,} bytes"
    stdout().print(line, markup=False, soft_wrap=True)


def _number(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number)
    except ValueError:
        raise ConfigError(f"--set takes NAME=NUMBER, for instance turns=8, got {text!r}") from None


def show(console: Console, facts: TraceFacts) -> None:
    """Draw the facts of a trace."""
    console.print()
    console.print(facts_table(_facts(facts)))
    heads = ("mean", *(name for name in facts.prompt_length if name != "mean"))
    lengths = plain_table(Column("tokens"), *heads)
    for name, found in (("prompt", facts.prompt_length), ("output", facts.output_length)):
        lengths.add_row(name, *(f"{found[head]:,.0f}" for head in heads))
    console.print()
    console.print(lengths)
    if not facts.reuse_blocks.percentiles:
        console.print("No block is used twice: nothing to keep.")
        return
    _draw(console, "blocks between uses", facts.reuse_blocks, _count)
    _draw(console, "time between uses", facts.reuse_seconds, _duration)
    console.print()


def _facts(facts: TraceFacts) -> list[tuple[str, Any]]:
    rows = f"{facts.requests:,} in {_duration(facts.span_s)}"
    if facts.without_prompt:
        rows += f", and {facts.without_prompt:,} rows without a prompt"
    table: list[tuple[str, Any]] = [
        ("trace", Text(f"{facts.source}, {facts.format}, blocks of {facts.block_size} tokens")),
        ("requests", rows),
        ("tokens", f"{facts.prompt_tokens:,} in prompts, {facts.output_tokens:,} generated"),
        ("blocks", f"{facts.references:,} to {facts.unique_blocks:,} different ones"),
        ("footprint", f"{facts.footprint_tokens:,} tokens of room keep every block"),
        ("ceiling", Text(f"{facts.ceiling:.2%} of the prompt tokens came before", CACHED)),
    ]
    if facts.sessions:
        table.append(("sessions", f"{facts.sessions:,}"))
    if facts.violations:
        renamed = f"{facts.violations:,} references followed another block than at first: "
        table.append(("ids", f"{renamed}blocks are named by content, and were renamed by prefix"))
    table += [("note" if not place else "", note) for place, note in enumerate(facts.notes)]
    return table


def _draw(console: Console, title: str, found: Distances, name: Callable[[float], str]) -> None:
    largest = max(share for _, share in found.histogram)
    table = plain_table(title, "reuses", Column())
    room = min(BAR_WIDTH, max(console.width - len(title) - BESIDE_BAR, 4))
    for end, share in found.histogram:
        width = round(room * share / largest)
        table.add_row(f"up to {name(end)}", f"{share:.1%}", Text("█" * width, CACHED))
    console.print()
    console.print(table)
    values = (f"{key} {name(value)}" for key, value in found.percentiles.items())
    console.print(f"  {', '.join(values)}")


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _duration(seconds: float) -> str:
    """Return a duration for people: 0.4 s, 42 s, 12 min, 3.5 h, 2.1 days."""
    for unit, size, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:,.3g} days"

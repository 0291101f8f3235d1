"""`quire plan`: users per device, and the gain from more memory."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.table import Column
from rich.text import Text

from quire.cli import options, output
from quire.cli.files import check_writable, write_text
from quire.cli.tables import facts_table, plain_table
from quire.config import format_bytes, parse_bytes
from quire.errors import ConfigError
from quire_sim.cli.inputs import opened
from quire_sim.cli.timing import timing_of, within

if TYPE_CHECKING:
    from quire_sim.plan import Budget, DeploymentPlan, Worth

WEIGHTS, RESERVE = "magenta", "yellow"
_TOKENS = re.compile(r"(\d+)\s*([km]?)(?:i?t(?:okens)?)?", re.IGNORECASE)
HIT_WIDTH = 20


def plan(
    *,
    model: options.Model,
    gpu: options.Gpu,
    num_gpus: options.NumGpus = 1,
    context: Annotated[str, typer.Option(help="Tokens of a user's sequence.")] = "8k",
    tiers: options.Below = "",
    trace: Annotated[Path | None, typer.Option(help="A trace file.", show_default=False)] = None,
    dtype: options.MaybeDtype = None,
    kv_dtype: options.KvDtype = None,
    block_size: options.BlockSize = 16,
    new_tokens: Annotated[str, typer.Option(help="Tokens a turn adds to a cached prefix.")] = "256",
    mfu: options.Mfu = None,
    measured: options.Measured = None,
    utilization: options.Utilization = 0.9,
    max_num_batched_tokens: options.MaxBatchedTokens = 8192,
    max_num_seqs: options.MaxNumSeqs = 256,
    reserve: Annotated[
        str | None,
        typer.Option(help="Room to compute in, all devices; else estimated.", show_default=False),
    ] = None,
    report: options.ReportTo = None,
    as_json: options.AsJson = False,
) -> None:
    """Estimate how many users fit, and the gain from more memory.

    Counts blocks beside weights and room to compute in, compares fetching with
    recomputing for each tier, and with a trace says what each 64 GiB of memory
    below the device is worth: hits (exact, LRU), seconds, time to first token.

    [bold]Examples[/bold]

      quire plan --model llama-3.1-8b --gpu h100
      quire plan --model deepseek-v3 --gpu h200 --num-gpus 8 --context 32k
      quire plan --model qwen3-32b --gpu h100 --trace trace.jsonl.gz
          --below host=256GiB@50GB/s,disk=2TiB@6GB/s
      quire plan --model ./my-model/config.json --gpu l4 --dtype int4 --json
      quire plan --model quire-tiny --gpu cpu --measured 512=40ms,4096=0.5s
    """
    import msgspec

    from quire_sim.hardware import EngineTimes, accelerator_named, model_named
    from quire_sim.hardware.tiers import parse_tiers
    from quire_sim.plan import Placement
    from quire_sim.plan import plan as make_plan

    check_writable(report, ".html", ".svg")
    placement = Placement(
        model=model_named(model).stored_as(dtype, kv_dtype),
        accelerator=accelerator_named(gpu),
        num_gpus=num_gpus,
        utilization=utilization,
        reserve_bytes=None if reserve is None else parse_bytes(reserve),
        block_size=block_size,
        step_tokens=max_num_batched_tokens,
        max_sequences=max_num_seqs,
    )
    sheets = EngineTimes(placement.model, placement.accelerator, num_gpus)
    with output.progress("reading the trace" if trace else "planning"):
        made = make_plan(
            placement,
            parse_tokens(context),
            parse_tiers(tiers),
            trace=None if trace is None else opened(trace, None),
            new_tokens=parse_tokens(new_tokens),
            timing=timing_of(sheets, mfu, measured),
        )
    if report is not None:
        write_text(report, report_of(made, report.suffix))
    if as_json:
        output.print_json(msgspec.to_builtins(made))
    else:
        output.stdout().print(picture(made))


def parse_tokens(text: str) -> int:
    """Return a number of tokens: `8k` is 8,192, `1m` is 1,048,576. Raises `ConfigError`."""
    match = _TOKENS.fullmatch(text.strip().replace(",", "").replace("_", ""))
    if match is None or len(match[1]) > 12:
        raise ConfigError(f"{text!r} is no number of tokens; write for example 8192, 8k or 1m")
    tokens = int(match[1]) << {"": 0, "k": 10, "m": 20}[match[2].lower()]
    if tokens < 1:
        raise ConfigError(f"{text!r} is {tokens} tokens; it is at least 1")
    return tokens


def picture(made: "DeploymentPlan") -> Group:
    """Return a plan drawn for people."""
    parts: list[Any] = [Text(), _head(made), Text(), _memory(made.memory), Text()]
    parts += [_tier_table(made)]
    if made.worth and made.trace:
        parts += [_trace_line(made), _worth_table(made)]
    parts += [_block_table(made), _advice(made), Text()]
    return Group(*parts)


def report_of(made: "DeploymentPlan", ending: str) -> str:
    """Return a plan's picture as a page (".html") or as ".svg"."""
    import io

    console = Console(record=True, width=110, file=io.StringIO(), highlight=False)
    console.print(picture(made))
    title = f"{made.model} on {made.num_gpus} x {made.accelerator}"
    return console.export_html() if ending == ".html" else console.export_svg(title=title)


def short_tokens(tokens: int) -> str:
    """Return a number of tokens for people: 8k, 1M, 1,000."""
    if tokens >= 1 << 20 and tokens % (1 << 20) == 0:
        return f"{tokens >> 20}M"
    return f"{tokens >> 10}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


def _head(made: "DeploymentPlan") -> Text:
    size = f"{_count(made.params)} parameters"
    if made.active_params < made.params:
        size += f", {_count(made.active_params)} active"
    return Text.assemble(
        (made.model, "bold"), f" ({size}) on ", (f"{made.num_gpus} x {made.accelerator}", "bold")
    )


def _memory(memory: "Budget") -> Any:
    parts = (
        ("weights", memory.weight_bytes, WEIGHTS),
        ("to compute in", memory.reserve_bytes, RESERVE),
        ("K and V", memory.kv_bytes, output.CACHED),
    )
    *before, _ = (
        max(1, round(output.BAR_WIDTH * size / memory.usable_bytes)) for _, size, _ in parts
    )
    said = Text(" + ").join(
        Text(f"{format_bytes(size)} {name}", style) for name, size, style in parts
    )
    said.append(f" = {format_bytes(memory.usable_bytes)} usable")
    styles = [style for _, _, style in parts]
    facts: list[tuple[str, Any]] = [
        ("memory", output.bar((*before, output.BAR_WIDTH - sum(before)), "█▒▓", styles)),
        ("", said),
    ]
    if memory.block_bytes:
        size = f"{format_bytes(memory.block_bytes)} each"
        facts.append(("blocks", f"{memory.num_blocks:,} of {memory.block_size} tokens, {size}"))
    each = f"{short_tokens(memory.context)} tokens each"
    user = f"{format_bytes(memory.sequence_bytes)} a user"
    counts = (f"{short_tokens(tokens)}: {users:,}" for tokens, users in memory.users_by_context)
    alone = f"the longest alone: {memory.longest_tokens:,} tokens"
    facts.append(("users", f"{memory.users:,} with {each} ({user})"))
    facts.append(("", f"{', '.join(counts)}; {alone}"))
    facts.append(("staging", f"{format_bytes(memory.staging_bytes)} beside vLLM, for tiers"))
    if not memory.users:
        facts.append(("", Text(f"none fits; it takes --num-gpus {memory.num_gpus_needed}", "red")))
    if memory.kv_copies > 1:
        copies = f"{memory.kv_copies:g} times: fewer KV heads than devices"
        facts.append(("", f"K and V are stored {copies}"))
    return facts_table(facts)


def _tier_table(made: "DeploymentPlan") -> Any:
    from quire_sim.plan.planning import MAX_BATCH

    speed, context = made.speed, short_tokens(made.memory.context)
    new = made.tiers[0].crossover.new_tokens
    heads = ("size", "GB/s", "users", f"{context} from it, ms")
    table = plain_table(Column("tier"), *heads, Column("fetching wins"))
    for tier in made.tiers:
        verdict = tier.crossover.verdict
        if verdict[-1].isdigit():
            verdict += " tokens"
        table.add_row(
            tier.name,
            format_bytes(tier.capacity_bytes),
            f"{tier.bandwidth / 1e9:g}",
            f"{tier.sequences:,}",
            output.milliseconds(tier.fetched_s),
            verdict,
        )
    users = "all users" if made.memory.users <= MAX_BATCH else f"{MAX_BATCH:,} users"
    line = Text(
        f"{context} and {new:,} new tokens take {output.milliseconds(speed.prefill_s)} ms from nothing and "
        f"{output.milliseconds(speed.turn_s)} ms from the device; for {context}, a tier of less than "
        f"{speed.break_even_bandwidth / 1e9:.2g} GB/s loses to recomputing. Decoding for {users}: "
        f"{output.milliseconds(speed.decode_step_s)} ms a step, {speed.tokens_per_s:,.0f} tokens/s."
    )
    assumed = Text(
        f"Times by {speed.basis}; off by {within(speed.error)} where that was found.\n",
        "bright_black",
    )
    return Group(Text("Fetch or recompute", "bold"), table, line, assumed)


def _trace_line(made: "DeploymentPlan") -> Text:
    trace = made.trace
    assert trace is not None
    busy = made.worth[0].prefill_gpu_s
    line = (
        f"{Path(trace.source).name}: {trace.num_requests:,} requests, "
        f"{_count(trace.prompt_tokens)} prompt tokens, {format_bytes(trace.unique_bytes)} of "
        f"different K and V, at best {trace.ceiling:.1%} hits"
    )
    if trace.duration_s:
        load = busy / (trace.duration_s * made.num_gpus)
        line += f"; its prefills alone load the devices to {load:.0%}"
    text = Text(line)
    if trace.too_long:
        text.append(
            f"\n{trace.too_long:.0%} of its prompts are longer than the model's context", "red"
        )
    return text


def _worth_table(made: "DeploymentPlan") -> Any:
    below = Column("memory below", justify="right", no_wrap=True)
    hits = Column("token hit", no_wrap=True)
    table = plain_table(below, hits, "hit %", "saved GPU s", "saved %", "TTFT ms")
    for row in made.worth:
        saved = row.saved_gpu_s, 100 * row.saved_gpu_s / made.worth[0].prefill_gpu_s
        cells = (f"{number:,.0f}" if row.below else "" for number in saved)
        hit = f"{row.token_hit * 100:.1f}"
        table.add_row(_below(row), _hit_bar(row), hit, *cells, output.milliseconds(row.ttft_s))
    return Group(Text("What memory below the device buys on this trace", "bold"), table)


def _below(row: "Worth") -> str:
    """Name the memory of a row; a further tier is added to the whole of those above."""
    named = [f"{name} {format_bytes(size).replace('.0 ', ' ')}" for name, size in row.below.items()]
    return ("+ " if len(named) > 1 else "") + named[-1] if named else "none"


def _hit_bar(row: "Worth") -> Text:
    device = round(HIT_WIDTH * row.device_hit)
    below = max(0, round(HIT_WIDTH * row.token_hit) - device)
    widths = device, below, HIT_WIDTH - device - below
    return output.bar(widths, "█▓░", (output.ACTIVE, output.CACHED, output.FREE))


def _block_table(made: "DeploymentPlan") -> Any:
    table = plain_table("tokens", "bytes", "token hit %", "lost %", "blocks a user", "naming ms")
    for each in made.blocks.choices:
        chosen = each.block_size == made.blocks.recommended
        table.add_row(
            f"{each.block_size:,}",
            format_bytes(each.block_bytes),
            "" if each.token_hit is None else f"{each.token_hit * 100:.2f}",
            f"{each.lost * 100:.2f}",
            f"{each.blocks_per_prompt:,}",
            f"{each.hash_ms:.2f}",
            style="bold" if chosen else None,
        )
    return Group(Text("Block size", "bold"), table)


def _advice(made: "DeploymentPlan") -> Text:
    text = Text.assemble("use ", (f"--block-size {made.blocks.recommended}", "bold"), ": ")
    return text.append("; ".join(made.blocks.reasons))


def _count(number: int) -> str:
    return output.in_units(number, ((10**12, " T"), (10**9, " B"), (10**6, " M"), (10**3, " k")))

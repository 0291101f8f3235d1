"""`quire demo`: conversations under one long system prompt, with and without what is cached."""

import time
from contextlib import nullcontext
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column
from rich.text import Text

from quire.cli import options, output
from quire.cli.comparison import NUM_SAMPLES, Call, DemoSize, SideBySide, compare, settle_threads
from quire.cli.files import check_new, check_writable
from quire.cli.models import TINY, load, source_of
from quire.cli.tables import facts_table, plain_table
from quire.cli.talks import SAMPLED_QUESTION
from quire.cli.tiers import TierFile, TierKeyFile, TierLines, opened
from quire.config import format_bytes, parse_bytes
from quire.errors import ConfigError
from quire.extras import require

SMALL = 50_000_000
"""Models of fewer parameters may be faster on one thread; it is tried."""


class DemoEngine(StrEnum):
    """Through what the demo talks with a model."""

    server = "server"
    transformers = "transformers"


CAPTION = "without, with quire: milliseconds to the first new token"


def demo(
    *,
    model: options.Model = TINY,
    engine: Annotated[
        DemoEngine, typer.Option(help="quire serve, or generate of transformers.")
    ] = DemoEngine.server,
    as_json: options.AsJson = False,
    kv_memory: Annotated[
        str | None,
        typer.Option(help=options.KV_MEMORY, show_default="64MiB, or 1GiB with a model of yours"),
    ] = None,
    block_size: options.BlockSize = 16,
    tier: TierLines = None,
    tier_file: TierFile = None,
    tier_key_file: TierKeyFile = None,
    seed: options.Seed = 0,
    save: options.SaveTo = None,
    record: options.RecordTo = None,
    dtype: options.Dtype = "float32",
    num_conversations: Annotated[int, typer.Option(help="Number of conversations.")] = 5,
    num_turns: Annotated[int, typer.Option(help="Questions per conversation.")] = 3,
    system_tokens: Annotated[int, typer.Option(help="Length of the system prompt.")] = 3000,
    max_new_tokens: options.MaxNewTokens = 64,
) -> None:
    """Compare conversations under one long system prompt with and without the cache.

    A server is started; five people talk with the model in turn, through the
    client of OpenAI; each prompt is the whole conversation so far. At the end,
    four replies are drawn from one prompt. Each prompt is asked twice: apart
    from all that is cached, and with it. The table shows what was reused and
    the time to the first new token; the new text is compared, and a difference
    is exit code 1. With --engine transformers there is no server, and the two
    are plain generate, and generate with quire.

    [bold]Examples[/bold]

      quire demo
      quire demo --json
      quire demo --model ./my-model --kv-memory 2GiB
      quire demo --engine transformers --save run.json && quire inspect run.json
      quire demo --engine transformers --record talks.jsonl && quire replay talks.jsonl
    """
    size = DemoSize(num_conversations, num_turns, system_tokens, max_new_tokens, seed)
    size.check()
    capacity = kv_memory or ("64MiB" if model == TINY else "1GiB")
    parse_bytes(capacity)
    check_writable(save)
    check_new(record)
    if engine is DemoEngine.server:
        given = {"--save": save, "--record": record}
        if taken := [name for name, value in given.items() if value is not None]:
            raise ConfigError(f"{taken[0]} is for --engine transformers")
        source_of(model)
        words = ["--model", model, "--kv-memory", capacity, "--block-size", str(block_size)]
        words += ["--dtype", dtype, *(word for line in tier or () for word in ("--tier", line))]
        words += [] if tier_file is None else ["--tier-file", str(tier_file)]
        words += [] if tier_key_file is None else ["--tier-key-file", str(tier_key_file)]
        found: dict[str, Any] = _served(words, size, model) | {"model": model, "dtype": dtype}
        found["pool"]["num_bytes"] = parse_bytes(capacity)
    else:
        with (
            opened(tier, tier_file, tier_key_file) as stack,
            output.progress(f"loading {model}", total=num_conversations * num_turns + 1) as say,
        ):
            started = time.perf_counter()
            loaded, tokenizer = load(model, dtype)
            from quire.engines.hf import PrefixCache

            if loaded.device.type == "cpu" and loaded.num_parameters() < SMALL:
                settle_threads(loaded)
            recorder = output.recording(record, block_size)
            cache = PrefixCache(
                loaded, capacity, block_size, watchers=[recorder] if recorder else [], tiers=stack
            )
            pair = SideBySide(loaded, tokenizer, cache, size)
            with recorder or nullcontext():
                setup_s = time.perf_counter() - started
                found = (
                    compare(pair, size, say) | {"setup_seconds": setup_s} | machine(model, loaded)
                )
            snapshot = cache.snapshot()
            cache.close()
        if save is not None:
            output.save_snapshot(save, snapshot, text_is_bytes=model == TINY)
    output.answer(found, lambda found: show(output.stdout(), found), as_json=as_json)
    if not found["outputs_identical"]:
        output.stderr().print("error: the outputs differ; quire is wrong here", style="bold red")
        raise typer.Exit(1)


def _served(words: list[str], size: DemoSize, model: str) -> dict[str, Any]:
    """Run the demo against a server of these options."""
    require("serve", "a demo of the server")
    from quire.cli.served_demo import ServedSides

    started = time.perf_counter()
    steps = size.num_conversations * size.num_turns + 1
    with output.progress(f"starting quire serve with {model}", total=steps) as say:
        with ServedSides(words, size) as pair:
            setup_s = time.perf_counter() - started
            output.stderr().print(f"quire serve at {pair.url}/v1, its page at {pair.url}")
            found = compare(pair, size, say)
        device = f"quire serve at {pair.url}, its page there too while it ran"
        return found | {"setup_seconds": setup_s, "device": device, "compared": "as texts"}


def machine(name: str, model: Any) -> dict[str, Any]:
    """Return the model and the machine of the demo."""
    import torch

    threads = torch.get_num_threads()
    device = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    if model.device.type == "cuda":
        device = torch.cuda.get_device_name(model.device)
    return {
        "model": name,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "device": device,
        "threads": threads,
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the table of turns, then what they come to."""
    turns = found["turns"]
    people = {call["conversation"] for call in turns}
    size = f"{found['parameters'] / 1e6:.1f} M parameters, " if "parameters" in found else ""
    console.print(
        Text.assemble(
            "\n",
            (f"{len(people)} conversations", "bold"),
            f" on {found['model']} ({size}{found['dtype']}), {found['device']}\n",
            "Each prompt is the whole conversation; all share one long system prompt.",
        )
    )
    turn, drawn, same = (Column(name, no_wrap=True) for name in ("turn", "", "same"))
    heads = (turn, "prompt", "reused", drawn, "without", "with", "speed-up", same)
    table = plain_table(*heads, caption=CAPTION, caption_justify="left", collapse_padding=True)
    last = turns[0]["turn"]
    for call in (*turns, found["sample"]):
        if call["turn"] != last:
            table.add_section()
        table.add_row(*_cells(call))
        last = call["turn"]
    console.print(table)
    console.print(facts_table(_facts(found)))
    console.print()
    console.print(Text("conversation A", "bold"))
    for call in turns:
        if call["conversation"] == "A":
            reply = " ".join(call["replies"][0].split())
            console.print(Text.assemble(f"- {call['question']}\n", (f"  {reply}", "italic")))
    console.print(Text(SAMPLED_QUESTION + " (four samples)", "bold"))
    for reply in found["sample"]["replies"]:
        console.print(Text.assemble("- ", (" ".join(reply.split()), "italic")))
    console.print()


def _cells(call: Call) -> list[Text | str]:
    share, speedup = call["cached_tokens"] / call["prompt_tokens"], call["speedup"]
    filled = round(8 * share)
    drawn = output.bar((filled, 8 - filled), "█░", ("cyan", "bright_black"))
    gain = "bold green" if speedup >= 10 else "green" if speedup >= 1.5 else "dim"
    label = f"{call['conversation']}{call['turn']}"
    return [
        f"{NUM_SAMPLES} samples" if call["conversation"] == "samples" else label,
        f"{call['prompt_tokens']:,}",
        f"{call['cached_tokens']:,}",
        drawn.append(f" {share:4.0%}"),
        output.milliseconds(call["ttft_before_ms"] / 1e3),
        output.milliseconds(call["ttft_after_ms"] / 1e3),
        Text(output.times(speedup), gain),
        Text("yes", "green") if call["identical"] else Text("NO", "bold red"),
    ]


def _facts(found: dict[str, Any]) -> list[tuple[str, Any]]:
    turns, pool, warm = found["turns"], found["pool"], found["median_over_turns_with_cached_tokens"]
    how = found.get("compared", "token by token")
    identical = Text(f"yes: {len(turns)} greedy replies and {NUM_SAMPLES} samples, {how}", "green")
    if not found["outputs_identical"]:
        wrong = sum(not call["identical"] for call in (*turns, found["sample"]))
        identical = Text(f"NO: {wrong} of {len(turns) + 1} calls gave other tokens", "bold red")
    prompt, reused = found["prompt_tokens"], found["reused_tokens"]
    saved = f"{reused:,} of {prompt:,} prompt tokens ({found['hit_rate']:.1%}); {prompt - reused:,} computed"
    facts: list[tuple[str, Any]] = [("outputs identical", identical), ("prefill saved", saved)]
    num_warm = sum(call["cached_tokens"] >= warm for call in turns)
    if num_warm:
        cold, fast = (
            output.milliseconds(found[f"ttft_ms_{each}_median"] / 1e3) for each in ("cold", "warm")
        )
        gain = output.times(found["ttft_speedup_median"]), "bold green"
        at_least = f"{warm:,}+" if warm > 1 else "any"
        facts += [
            ("first token", Text.assemble(f"{cold} ms without, {fast} ms with quire: ", gain)),
            ("", f"medians over {num_warm} turns with {at_least} tokens cached"),
        ]
    before, after = found["calls_ms_before"] / 1e3, found["calls_ms_after"] / 1e3
    took = f"{before:.1f} s without, {after:.1f} s with quire: {output.times(before / after)}"
    drawn = Text.assemble(output.pool_bar(pool), f" {format_bytes(pool['num_bytes'])}")
    return [
        *facts,
        ("all calls", took),
        ("block pool", drawn),
        ("", output.pool_counts(pool)),
    ]

"""`quire demo`: conversations of a real assistant under one system prompt, with and without what is cached."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from string import ascii_uppercase
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Column
from rich.text import Text

from quire.cli import options, output
from quire.cli.assistant import ASSISTANT
from quire.cli.chat import message
from quire.cli.models import TINY, source_of
from quire.cli.tables import facts_table, plain_table
from quire.cli.talks import REAL_TALKS, TINY_TALKS, Talks
from quire.config import format_bytes, parse_bytes
from quire.errors import ConfigError
from quire.extras import require

if TYPE_CHECKING:
    from quire.cli.served_demo import Call, DemoServer

NUM_CONVERSATIONS, NUM_TURNS = 3, 3
CAPTION = "without, with quire: milliseconds to the first new token"
DIFFERENT = "error: replies differ: two tokens are as likely as each other, or quire is wrong here"


def demo(
    *,
    model: options.MaybeModel = None,
    as_json: options.AsJson = False,
    kv_memory: options.KvMemory = "256MiB",
    dtype: options.Dtype = "float32",
    stay: Annotated[
        bool, typer.Option("--stay", help="Keep the server and its page until Ctrl-C.")
    ] = False,
) -> None:
    """Talk with a real assistant, with and without the cache.

    A server is started, and customers of a shop talk with SmolLM2-135M-Instruct
    in turn; each prompt is the whole conversation so far, under one system
    prompt. Each is asked twice, with what is cached and computed anew. The
    table shows what was reused and the time to the first new token; replies
    that differ are exit code 1. Where the package of SmolLM2 is missing, the
    small model that comes with quire answers questions about Python.

    [bold]Examples[/bold]

      quire demo
      quire demo --json
      quire demo --stay
      quire demo --model ./my-model --kv-memory 2GiB
    """
    num_bytes = parse_bytes(kv_memory)
    require("serve", "a demo of the server")
    model = _chosen(model)
    talks = TINY_TALKS if model == TINY else REAL_TALKS
    from quire.cli.served_demo import DemoServer, figures

    words = ["--model", model, "--kv-memory", kv_memory, "--dtype", dtype]
    console = Console(quiet=True) if as_json else output.stdout()
    began = time.perf_counter()
    with ExitStack() as running:
        with output.progress(f"starting quire serve --model {model}"):
            server = running.enter_context(DemoServer(words))
            server.warm_up()
        started = time.perf_counter()
        output.stderr().print(f"quire serve --model {model}: its page is {server.url} while the demo runs\n")  # fmt: skip
        turns = list(_talk(server, talks, console))
        facts = {"model": model, "dtype": dtype, "url": server.url}
        times = {"setup_seconds": started - began, "seconds": time.perf_counter() - started}
        found: dict[str, Any] = figures(turns) | facts | times | server.state()
        found["pool"]["num_bytes"] = num_bytes
        output.answer(found, lambda found: show(console, found), as_json=as_json)
        if stay:
            output.stderr().print(f"The server stays at {server.url} until Ctrl-C.")
            with suppress(KeyboardInterrupt):
                threading.Event().wait()
    if not found["outputs_identical"]:
        output.stderr().print(DIFFERENT, style="bold red")
        raise typer.Exit(1)


def _chosen(model: str | None) -> str:
    """Return the model that was asked for, else the assistant, else the small one."""
    if model is not None:
        source_of(model)
        return model
    try:
        with output.progress(f"preparing {ASSISTANT}"):
            source_of(ASSISTANT)
    except ConfigError as error:
        output.stderr().print(f"{TINY} answers instead of a real assistant: {error}", markup=False)
        return TINY
    return ASSISTANT


def _talk(server: "DemoServer", talks: Talks, console: Console) -> Iterator["Call"]:
    """Ask all questions, those of one turn after each other, and print each reply as it comes."""
    from quire.cli.served_demo import call

    people = [asked[:NUM_TURNS] for asked in talks.questions[:NUM_CONVERSATIONS]]
    histories = [[message("system", talks.system)] for _ in people]
    for turn, questions in enumerate(zip(*people, strict=True), 1):
        for label, talk, question in zip(ascii_uppercase, histories, questions, strict=False):
            console.print(Text.assemble((f"{label}{turn} ", "cyan"), (question, "bold")))
            talk.append(message("user", question))
            with output.progress(f"{label}{turn}: with quire"):
                after = server.ask(talk, is_reusing=True)
            console.print(Padding(Text(after.text, "italic"), (0, 0, 0, 3)))
            with output.progress(f"{label}{turn}: the same without quire"):
                before = server.ask(talk, is_reusing=False)
            with_quire, without = (output.milliseconds(each.ttft_s) for each in (after, before))
            told = f"first token after {with_quire} ms, without quire after {without} ms"
            console.print(Padding(Text(told, "dim"), (0, 0, 0, 3)))
            talk.append(message("assistant", after.text))
            yield call(label, turn, before, after, question)


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the table of turns, then what they come to."""
    turns = found["turns"]
    people = {call["conversation"] for call in turns}
    head = f" with {found['model']} ({found['dtype']}); all share one long system prompt."
    console.print(Text.assemble("\n", (f"{len(people)} conversations", "bold"), head))
    turn, drawn, same = (Column(name, no_wrap=True) for name in ("turn", "", "same"))
    heads = (turn, "prompt", "reused", drawn, "without", "with", "speed-up", same)
    table = plain_table(*heads, caption=CAPTION, caption_justify="left", collapse_padding=True)
    for call in turns:
        if call["turn"] != turns[0]["turn"] and call["conversation"] == "A":
            table.add_section()
        table.add_row(*_cells(call))
    console.print(table)
    console.print(facts_table(_facts(found)))
    console.print()


def _cells(call: "Call") -> list[Text | str]:
    share, speedup = call["cached_tokens"] / call["prompt_tokens"], call["speedup"]
    filled = round(8 * share)
    drawn = output.bar((filled, 8 - filled), "█░", ("cyan", "bright_black"))
    gain = "bold green" if speedup >= 10 else "green" if speedup >= 1.5 else "dim"
    return [
        f"{call['conversation']}{call['turn']}",
        f"{call['prompt_tokens']:,}",
        f"{call['cached_tokens']:,}",
        drawn.append(f" {share:4.0%}"),
        output.milliseconds(call["ttft_before_ms"] / 1e3),
        output.milliseconds(call["ttft_after_ms"] / 1e3),
        Text(output.times(speedup), gain),
        Text("yes", "green") if call["identical"] else Text("NO", "bold red"),
    ]


def _facts(found: dict[str, Any]) -> list[tuple[str, Any]]:
    turns, pool, ms = found["turns"], found["pool"], output.milliseconds
    wrong = sum(not call["identical"] for call in turns)
    identical = Text(f"yes: {len(turns)} replies, as texts", "green")
    if wrong:
        identical = Text(f"NO: {wrong} of {len(turns)} replies differ", "bold red")
    saved = f"{found['reused_tokens']:,} of {found['prompt_tokens']:,} prompt tokens "
    saved += f"({found['hit_rate']:.1%}); {found['computed_tokens']:,} computed"
    first = f"{ms(found['ttft_ms_cold_median'] / 1e3)} ms without, "
    first += f"{ms(found['ttft_ms_warm_median'] / 1e3)} ms with quire: "
    gain = output.times(found["ttft_speedup_median"])
    before, after = found["calls_ms_before"] / 1e3, found["calls_ms_after"] / 1e3
    took = f"{before:.1f} s without, {after:.1f} s with quire: {output.times(before / after)}"
    drawn = Text.assemble(output.pool_bar(pool), f" {format_bytes(pool['num_bytes'])}")
    return [
        ("outputs identical", identical),
        ("prefill saved", saved),
        ("first token", Text.assemble(first, (gain, "bold green"))),
        ("", "medians over the turns after the first"),
        ("all calls", took),
        ("block pool", drawn),
        ("", output.pool_counts(pool)),
    ]

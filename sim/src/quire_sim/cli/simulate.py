"""`quire simulate`: latencies and throughput of a service under the load of a trace."""

from itertools import islice
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Column
from rich.text import Text

from quire.cli import options
from quire.cli.output import BAR_WIDTH, HEIGHTS, print_json, progress, stderr, stdout
from quire.cli.tables import facts_table, plain_table
from quire.errors import ConfigError
from quire_sim.cli.inputs import blocks_that_hold, opened
from quire_sim.cli.recorded import compare, duration
from quire_sim.cli.timing import basis_of, off_by, timing_of, within

if TYPE_CHECKING:
    from quire_sim.serving import Cluster, Load, Objective, Served, ServingResult

SHOWN_STEPS = 100
"""Progress is shown so many times."""

MAX_SHARES = 8
"""Replicas that are listed one by one, at most."""

FIRST, RUNNING, WAITING = "cyan", "green", "yellow"


def simulate(
    *,
    context: typer.Context,
    trace: Annotated[Path | None, typer.Option(help="A trace file.", show_default=False)] = None,
    recorded: Annotated[
        Path | None,
        typer.Option(
            help="A recorded run of an engine, or a result of a benchmark, simulated beside measured; its "
            "own settings count. Of a result, --model, --gpu and limits may be said.",
            show_default=False,
        ),
    ] = None,
    model: options.Model = "llama-3.1-8b",
    gpu: options.Gpu = "h100",
    num_gpus: options.NumGpus = 1,
    dtype: options.MaybeDtype = None,
    kv_dtype: options.KvDtype = None,
    replicas: Annotated[int, typer.Option(help="Replicas behind the router.")] = 1,
    router: options.Router = "prefix",
    load_limit: options.LoadLimit = 1.25,
    policy: Annotated[str, typer.Option(help="Eviction policy of each replica.")] = "lru",
    arrivals: Annotated[
        str, typer.Option(help="trace, poisson:RATE, closed:USERS or closed:USERS:THINK_SECONDS.")
    ] = "trace",
    speed: Annotated[
        float, typer.Option(help="Factor by which the trace's times are sped up.")
    ] = 1.0,
    seed: options.Seed = 0,
    duration: Annotated[
        float | None, typer.Option(help="Seconds after which no request arrives.")
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=0, help="Number of requests.", show_default="all of the trace")
    ] = None,
    block_size: options.MaybeBlockSize = None,
    utilization: options.Utilization = 0.9,
    kv_memory: options.MaybeKvMemory = None,
    tiers: options.Below = "",
    scheduler: Annotated[
        str,
        typer.Option(help="first-come, as vLLM's, or quire: that of quire's engine, slower."),
    ] = "first-come",
    async_scheduling: Annotated[
        bool,
        typer.Option("--async-scheduling", help="Plan each step while the one before it runs."),
    ] = False,
    max_num_batched_tokens: options.MaxBatchedTokens = 8192,
    max_num_seqs: options.MaxNumSeqs = 256,
    mfu: options.Mfu = None,
    measured: options.Measured = None,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Seconds to the first token that are still good.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Seconds per further token that are still good.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Times to tokens, throughput and hit rate of a service under a trace.

    Replicas batch continuously over the real cache manager, by vLLM's rules; data
    sheets of the accelerator, or measurements, say how long steps take. Equal input
    gives an equal result.

    [bold]Examples[/bold]

      quire simulate --trace trace.jsonl.gz --replicas 4
      quire simulate --trace trace.jsonl.gz --model qwen3-32b --gpu h200 --num-gpus 2
      quire simulate --trace trace.jsonl.gz --arrivals poisson:3 --slo-ttft 2
      quire simulate --trace trace.jsonl.gz --arrivals closed:64:10 --duration 600
      quire simulate --trace trace.jsonl.gz --below host=256GiB@50GB/s --json
      quire simulate --trace trace.jsonl.gz --measured steps.jsonl.gz
      quire simulate --recorded run.jsonl.gz
    """
    from quire.routing import router_named
    from quire_sim.hardware import EngineTimes, accelerator_named, model_named
    from quire_sim.hardware.tiers import parse_tiers
    from quire_sim.plan import Placement, blocks_that_fit
    from quire_sim.serving import (
        Cluster,
        Load,
        Objective,
        ReplicaLimits,
        parse_arrivals,
    )

    if recorded is not None:
        compare(recorded, measured, context, as_json=as_json)
        return
    if trace is None:
        raise ConfigError("there is nothing to play: name a --trace, or a --recorded run")
    facts = model_named(model).stored_as(dtype, kv_dtype)
    sheets = EngineTimes(facts, accelerator_named(gpu), num_gpus)
    timing = timing_of(sheets, mfu, measured)
    chosen = router_named(router, load_limit=load_limit)
    arriving = parse_arrivals(arrivals, speed=speed, seed=seed)
    if speed != 1 and arrivals != "trace":
        raise ConfigError(f"--speed {speed:g} changes the times of a trace, not {arrivals}")
    has_objective = slo_ttft is not None or slo_tpot is not None
    objective = Objective(slo_ttft, slo_tpot) if has_objective else None
    below = tuple(parse_tiers(tiers))
    source = opened(trace, block_size, hits=False)
    size = source.block_size
    block_bytes = max(facts.kv.per_token, 1) * size
    placement = Placement(
        model=facts,
        accelerator=sheets.accelerator,
        num_gpus=num_gpus,
        utilization=utilization,
        block_size=size,
        step_tokens=max_num_batched_tokens,
        max_sequences=max_num_seqs,
    )
    if kv_memory is None:
        num_blocks = blocks_that_fit(placement)
    else:
        num_blocks = blocks_that_hold(kv_memory, size, facts, "--kv-memory")
    limits = ReplicaLimits(
        num_blocks,
        size,
        policy,
        max_num_batched_tokens,
        max_num_seqs,
        plans_ahead=int(async_scheduling),
    )
    cluster = Cluster(limits, timing, replicas, below, block_bytes, scheduler)
    with progress("reading", SHOWN_STEPS) as say:
        say(f"reading {trace.name}")
        load = Load(list(islice(source, num_requests)), arriving, duration_s=duration)
        result = _run(cluster, load, chosen, objective, say)
    settings = {
        "trace": str(trace),
        "model": facts.name,
        "gpu": sheets.accelerator.name,
        "num_gpus": num_gpus,
        "router": router,
        "policy": policy,
        "scheduler": scheduler,
        "arrivals": str(arriving),
        "num_blocks": num_blocks,
        "block_size": size,
        "times_by": timing.basis,
        "times_off_by": off_by(timing),
    }
    if as_json:
        print_json(settings | msgspec.to_builtins(result))
        if result.overloaded:
            stderr().print(result.overloaded, style="yellow", markup=False, highlight=False)
        return
    _show(settings, result)


def _run(
    cluster: "Cluster", load: "Load", router: Any, objective: "Objective | None", say: Any
) -> "ServingResult":
    from quire_sim.serving import simulate

    total = len(load.requests)  # pyright: ignore[reportArgumentType]
    every = max(total // SHOWN_STEPS, 1)
    done = 0

    def tell(served: "Served") -> None:
        nonlocal done
        done += 1
        if not done % every:
            say(f"{done:,} of {total:,} requests, {served.finished_s:,.0f} s of virtual time")

    return simulate(cluster, load, router, objective=objective, observers=[tell])


def _show(settings: dict[str, Any], result: "ServingResult") -> None:
    console = stdout()
    kv, gpus = settings["num_blocks"] * settings["block_size"], settings["num_gpus"]
    devices = f"{result.num_replicas} x {f'{gpus} x ' * (gpus > 1)}{settings['gpu']}"
    console.print(
        f"\n[bold]{settings['model']}[/bold] on {devices}, KV for {kv:,} tokens "
        f"each; {settings['arrivals']}, router {settings['router']}, policy {settings['policy']}, "
        f"scheduler {settings['scheduler']}; times by {settings['times_by']}; "
        f"{basis_of(settings['times_off_by'])}\n"
    )
    if not result.num_requests:
        console.print("No requests, so nothing to report.\n")
        return
    console.print(durations(result, settings["times_off_by"]))
    console.print(facts(result))
    console.print(histogram(result, console.width))
    console.print(queues(result, console.width))
    if result.overloaded:
        console.print(f"[yellow]{result.overloaded}[/yellow]\n")


def durations(result: "ServingResult", errors: dict[str, Any] | None) -> Any:
    """Return the table of users' waiting times, with the errors of their means where they are known."""
    known = errors or {}
    heads = ("mean", "p50", "p90", "p99", "max")
    table = plain_table(Column("seen by users", no_wrap=True), *heads, "off by")
    for name, spread, figure in (
        ("first token, TTFT", result.ttft_s, "ttft_mean"),
        ("of it in the queue", result.waited_s, "ttft_mean"),
        ("further tokens, TPOT", result.tpot_s, "tpot_mean"),
        ("whole request, E2E", result.e2e_s, "makespan"),
    ):
        if spread is not None:
            cells = (duration(getattr(spread, head)) for head in heads)
            table.add_row(name, *cells, within(known.get(figure, known.get("step"))))
    return table


def facts(result: "ServingResult") -> Any:
    """Return throughput, goodput, hits and internal counts."""
    rate = (
        f"{result.requests_per_s:.3g} requests/s, {result.output_tokens_per_s:,.0f} output "
        f"tokens/s, {result.total_tokens_per_s:,.0f} tokens/s with prompts"
    )
    found = {"throughput": rate}
    if result.goodput is not None:
        found["goodput"] = (
            f"{result.goodput.requests_per_s:.3g} requests/s: {result.goodput.share:.1%} of "
            f"{result.num_requests:,} were fast enough"
        )
    found["hit rate"] = f"{result.hit_rate:.1%} of {result.prompt_tokens:,} prompt tokens"
    for tier in result.tiers:
        moved = f"{tier.fetched_blocks:,} blocks; {tier.demoted_blocks:,} went down"
        found[f"from {tier.name}"] = moved
    busy = ", ".join(f"{share:.0%}" for share in result.utilisation[:MAX_SHARES])
    found["busy"] = busy + ", ..." * (len(result.utilisation) > MAX_SHARES)
    again = f"{result.preemptions:,}, {result.recomputed_tokens:,} tokens computed again"
    found["preemptions"] = again
    found["took"] = f"{result.makespan_s:,.1f} s of virtual time, {result.num_steps:,} steps"
    return facts_table(found.items())


def histogram(result: "ServingResult", width: int) -> Text:
    """Draw how times to the first token are spread, in `width` columns."""
    counts, edges = result.ttft_histogram.counts, result.ttft_histogram.edges
    most = max(counts)
    room = max(1, min(BAR_WIDTH, width - 22 - len(f"{most:,}")))
    text = Text("\ntime to the first token\n", no_wrap=True)
    for count, low, high in zip(counts, edges[:-1], edges[1:], strict=True):
        filled = -(-room * count // most)
        text.append(f"{duration(low):>9} - {duration(high):<9}", "bright_black")
        text.append("█" * filled, FIRST)
        text.append(f" {count:,}\n")
    return text


def queues(result: "ServingResult", width: int) -> Text:
    """Draw how many requests wait and run, over time, in `width` columns."""
    line = result.timeline
    room = max(1, width - 20)
    text = Text(f"requests over {result.makespan_s:,.0f} s, and the most\n", no_wrap=True)
    for name, counts, style in (
        ("waiting", line.waiting, WAITING),
        ("running", line.running, RUNNING),
    ):
        each = -(-len(counts) // room) or 1
        highest = [max(counts[start : start + each]) for start in range(0, len(counts), each)]
        most = max(counts, default=0.0)
        text.append(f"{name:>9} ", "bright_black")
        for count in highest:
            text.append(HEIGHTS[ceil(count / (most or 1) * (len(HEIGHTS) - 1))], style)
        text.append(f" {most:,.3g}\n")
    return text

"""`quire simulate`: what users would see of a service under the load of a trace."""

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from quire.cli import options
from quire.cli.inputs import blocks_that_hold, opened
from quire.cli.output import print_json, progress, stderr, stdout
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.sim.hardware import Roofline
    from quire.sim.serving import Cluster, Load, Objective, Served, ServingResult

SHOWN_STEPS = 100
"""Progress is shown so many times."""


def simulate(
    *,
    trace: Annotated[Path, typer.Option(help="A trace file.", show_default=False)],
    model: options.Model = "llama-3.1-8b",
    gpu: options.Gpu = "h100",
    num_gpus: options.NumGpus = 1,
    replicas: Annotated[int, typer.Option(help="Replicas behind the router.")] = 1,
    router: Annotated[str, typer.Option(help="round-robin, least-loaded or prefix.")] = "prefix",
    load_limit: Annotated[
        float, typer.Option(help="The prefix router's limit: times a replica's even share.")
    ] = 1.25,
    policy: Annotated[str, typer.Option(help="What each replica evicts first.")] = "lru",
    arrivals: Annotated[
        str, typer.Option(help="trace, poisson:RATE, closed:USERS or closed:USERS:THINK_SECONDS.")
    ] = "trace",
    speed: Annotated[float, typer.Option(help="Play the trace's times so much faster.")] = 1.0,
    seed: options.Seed = 0,
    duration: Annotated[
        float | None, typer.Option(help="Nothing arrives after so many seconds.")
    ] = None,
    num_requests: Annotated[
        int | None, typer.Option(min=0, help="How many requests.", show_default="all of the trace")
    ] = None,
    block_size: options.MaybeBlockSize = None,
    kv_memory: options.MaybeKvMemory = None,
    tiers: options.Below = "",
    max_step_tokens: Annotated[int, typer.Option(help="Tokens per step.")] = 8192,
    max_sequences: Annotated[int, typer.Option(help="Requests that a replica runs at once.")] = 256,
    mfu: options.Mfu = 0.5,
    slo_ttft: Annotated[
        float | None, typer.Option(help="Seconds to the first token that are still good.")
    ] = None,
    slo_tpot: Annotated[
        float | None, typer.Option(help="Seconds per further token that are still good.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Times to tokens, throughput and hit rate of a service under a trace.

    Replicas batch continuously over the real cache manager; a roofline of model
    and accelerator says how long steps take. Equal input gives an equal result.

    [bold]Examples[/bold]

      quire simulate --trace trace.jsonl.gz --replicas 4
      quire simulate --trace trace.jsonl.gz --model qwen3-32b --gpu h200 --num-gpus 2
      quire simulate --trace trace.jsonl.gz --arrivals poisson:3 --slo-ttft 2
      quire simulate --trace trace.jsonl.gz --arrivals closed:64:10 --duration 600
      quire simulate --trace trace.jsonl.gz --below host=256GiB@50GB/s --json
    """
    from quire.sim.hardware import Roofline, accelerator_named, model_named
    from quire.sim.hardware.tiers import parse_tiers
    from quire.sim.serving import (
        Cluster,
        Limits,
        Load,
        Objective,
        RooflineTiming,
        blocks_that_fit,
        parse_arrivals,
        router_named,
    )

    facts = model_named(model)
    roofline = Roofline(facts, accelerator_named(gpu), num_gpus, mfu=mfu)
    chosen = router_named(router, load_limit=load_limit)
    arriving = parse_arrivals(arrivals, speed=speed, seed=seed)
    if speed != 1 and arrivals != "trace":
        raise ConfigError(f"--speed {speed:g} changes the times of a trace, not {arrivals}")
    has_objective = slo_ttft is not None or slo_tpot is not None
    objective = Objective(slo_ttft, slo_tpot) if has_objective else None
    below = tuple(parse_tiers(tiers))
    source = opened(trace, block_size)
    size = source.block_size
    block_bytes = max(facts.kv.per_token, 1) * size
    if kv_memory is None:
        num_blocks = blocks_that_fit(roofline, size, max_sequences=max_sequences)
    else:
        num_blocks = blocks_that_hold(kv_memory, size, facts, "--kv-memory")
    limits = Limits(num_blocks, size, policy, max_step_tokens, max_sequences)
    cluster = Cluster(limits, RooflineTiming(roofline), replicas, below, block_bytes)
    with progress("reading", SHOWN_STEPS) as say:
        say(f"reading {trace.name}")
        load = Load(list(islice(source, num_requests)), arriving, duration_s=duration)
        result = _run(cluster, load, chosen, objective, say)
    settings = {
        "trace": str(trace),
        "model": facts.name,
        "gpu": roofline.accelerator.name,
        "num_gpus": num_gpus,
        "router": router,
        "policy": policy,
        "arrivals": str(arriving),
        "num_blocks": num_blocks,
        "block_size": size,
    }
    if as_json:
        print_json(settings | msgspec.to_builtins(result))
        if result.overloaded:
            stderr().print(result.overloaded, style="yellow", markup=False, highlight=False)
        return
    _show(settings, result, roofline)


def _run(
    cluster: "Cluster", load: "Load", router: Any, objective: "Objective | None", say: Any
) -> "ServingResult":
    from quire.sim.serving import simulate

    total = len(load.requests)  # pyright: ignore[reportArgumentType]
    every = max(total // SHOWN_STEPS, 1)
    done = 0

    def tell(served: "Served") -> None:
        nonlocal done
        done += 1
        if not done % every:
            say(f"{done:,} of {total:,} requests, {served.finished_s:,.0f} s of virtual time")

    return simulate(cluster, load, router, objective=objective, observers=[tell])


def _show(settings: dict[str, Any], result: "ServingResult", roofline: "Roofline") -> None:
    from quire.cli import serving_picture

    console = stdout()
    kv, gpus = settings["num_blocks"] * settings["block_size"], settings["num_gpus"]
    devices = f"{result.num_replicas} x {f'{gpus} x ' * (gpus > 1)}{settings['gpu']}"
    console.print(
        f"\n[bold]{settings['model']}[/bold] on {devices}, KV for {kv:,} tokens "
        f"each; {settings['arrivals']}, router {settings['router']}, policy {settings['policy']}; "
        f"assumed: {roofline.mfu:.0%} of the peak FLOPs, "
        f"{roofline.bandwidth_efficiency:.0%} of the bandwidth\n"
    )
    if not result.num_requests:
        console.print("No requests, so nothing to report.\n")
        return
    console.print(serving_picture.durations(result))
    console.print(serving_picture.facts(result))
    console.print(serving_picture.histogram(result, console.width))
    console.print(serving_picture.queues(result, console.width))
    if result.overloaded:
        console.print(f"[yellow]{result.overloaded}[/yellow]\n")

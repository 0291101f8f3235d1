"""The result of a serving simulation as tables and small pictures."""

from math import ceil
from typing import TYPE_CHECKING, Any

from rich.table import Column
from rich.text import Text

from quire.cli.output import BAR_WIDTH, HEIGHTS, milliseconds
from quire.cli.tables import facts_table, plain_table

if TYPE_CHECKING:
    from quire.sim.serving import ServingResult

MAX_SHARES = 8
"""Replicas that are listed one by one, at most."""

FIRST, RUNNING, WAITING = "cyan", "green", "yellow"


def durations(result: "ServingResult") -> Any:
    """Return the table of what users waited for."""
    heads = ("mean", "p50", "p90", "p99", "max")
    table = plain_table(Column("seen by users", no_wrap=True), *heads)
    for name, spread in (
        ("first token, TTFT", result.ttft_s),
        ("of it in the queue", result.waited_s),
        ("further tokens, TPOT", result.tpot_s),
        ("whole request, E2E", result.e2e_s),
    ):
        if spread is not None:
            table.add_row(name, *(duration(getattr(spread, head)) for head in heads))
    return table


def facts(result: "ServingResult") -> Any:
    """Return throughput, goodput, hits and what went on inside."""
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


def duration(seconds: float) -> str:
    """Return a duration in ms, or from one second on in s."""
    return f"{milliseconds(seconds)} ms" if seconds < 1 else f"{seconds:,.4g} s"

"""`quire trace make`: made-up traffic as a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quire.cli.files import check_writable
from quire.cli.options import AsJson, BlockSize, Seed
from quire.cli.output import print_json, progress, stdout
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.sim.workload import Workload


def make(
    kind: Annotated[
        str, typer.Argument(help="chat, agent, rag, few-shot, scan or mix.", show_default=False)
    ],
    target: Annotated[
        Path, typer.Argument(help="The file to write: .gz, .zst, or plain.", show_default=False)
    ],
    *,
    num_requests: Annotated[int, typer.Option(min=0, help="How many requests.")] = 10_000,
    seed: Seed = 0,
    rate: Annotated[
        float | None,
        typer.Option(help="Expected requests per second.", show_default="2"),
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
    src/quire/sim/workload/settings.py has every distribution and default.

    [bold]Examples[/bold]

      quire trace make chat chats.jsonl.gz --num-requests 10000 --seed 1
      quire trace make mix traffic.jsonl.gz --rate 20 --set chat.turns=8
      quire trace make rag documents.jsonl --set documents=500 --set skew=1.2 --json
    """
    from quire.sim.trace import check_ending, save_trace
    from quire.sim.workload import Workload, parts_named
    from quire.sim.workload.settings import REQUESTS_PER_S

    check_writable(target)
    check_ending(target)
    workload = Workload(
        parts_named(kind, dict(_number(text) for text in change or [])),
        num_requests,
        seed,
        requests_per_s=REQUESTS_PER_S if rate is None else rate,
        block_size=block_size,
    )
    with progress(f"making {num_requests:,} requests"):
        save_trace(workload, target)
    size = target.expanduser().stat().st_size
    if as_json:
        print_json(_facts(workload, target, size))
        return
    stdout().print(
        f"{target}: {num_requests:,} requests of {workload.source}, in blocks of {block_size} tokens, "
        f"{size:,} bytes",
        markup=False,
        soft_wrap=True,
    )


def _facts(workload: Workload, target: Path, size: int) -> dict[str, Any]:
    from quire.sim.workload import numbers_of

    total = sum(part.share for part in workload.parts.values())
    return {
        "target": str(target),
        "requests": workload.num_requests,
        "seed": workload.seed,
        "requests_per_s": workload.requests_per_s,
        "block_size": workload.block_size,
        "bytes": size,
        "parts": {
            name: {"share": part.share / total} | numbers_of(part.kind)
            for name, part in workload.parts.items()
        },
    }


def _number(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number)
    except ValueError:
        raise ConfigError(f"--set takes NAME=NUMBER, for instance turns=8, got {text!r}") from None

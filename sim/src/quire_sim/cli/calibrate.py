"""`quire calibrate`: the costs of an engine's steps, fitted to measured ones."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from quire.cli import options
from quire.cli.files import check_writable, write_text
from quire.cli.output import print_json, stdout
from quire.cli.tables import facts_table, plain_table

UNITS = {
    "step_s": "a step, whatever is in it",
    "chunk_s": "a part of a prompt",
    "token_s": "a token of it",
    "first_token_s": "more for each of the first 128 in a step",
    "pair_s": "a pair of tokens of its attention",
    "sequence_s": "a sequence that decodes",
    "cached_token_s": "a token before that one",
}


def calibrate(
    profile: Annotated[
        Path,
        typer.Argument(help="Measured steps: a profile, or a log of vLLM.", show_default=False),
    ],
    *,
    timing: Annotated[
        Path | None,
        typer.Option(
            help="Write the fitted costs to this file, for --measured.", show_default=False
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Fit the costs of an engine's steps to measured ones, and report the error.

    A profile has a step a line: {"chunks": [[new, before]], "contexts": [before],
    "seconds": s}. vLLM logs its steps with --enable-logging-iteration-details. The
    error is that of steps that were left out, a fifth at a time.

    [bold]Examples[/bold]

      quire calibrate steps.jsonl.gz
      quire calibrate vllm.log --timing timing.json
      quire simulate --trace trace.jsonl.gz --measured timing.json
    """
    from quire_sim.hardware.profiles import calibrate_steps, read_profile

    check_writable(timing)
    found = calibrate_steps(read_profile(profile))
    if timing is not None:
        write_text(timing, msgspec.json.encode(found).decode() + "\n")
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    table = plain_table("microseconds", "for")
    for name, said in UNITS.items():
        table.add_row(f"{getattr(found.costs, name) * 1e6:,.4g}", said)
    console = stdout()
    console.print()
    console.print(table)
    said = f"steps by {found.error:.1%}, sums of a fifth of them by {found.sum_error:.1%}"
    facts = [("measured", f"{found.num_steps:,} steps"), ("off by", f"{said}, left out")]
    console.print(facts_table(facts))
    console.print()

"""The commands, and what happens to their errors."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quire._version import __version__
from quire.cli import (
    bench,
    cache,
    curve,
    demo,
    doctor,
    generate,
    inspection,
    plan,
    replay,
    simulate,
    trace,
)
from quire.cli.output import stderr
from quire.errors import QuireError

EXIT_BAD_INPUT = 2


class Commands(TyperGroup):
    """The group of all commands: a `QuireError` becomes one line and exit code 2.

    `--debug` may stand anywhere before `--`, since it is what one appends to a line that failed.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        if "--debug" in args[:end]:
            args = ["--debug", *(arg for arg in args[:end] if arg != "--debug"), *args[end:]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except QuireError as error:
            if ctx.params.get("debug"):
                raise
            stderr().print(f"error: {error}", style="red", markup=False, highlight=False)
            raise typer.Exit(EXIT_BAD_INPUT) from None


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"quire {__version__}\n")
        raise typer.Exit


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with [bold]quire demo[/bold]; [bold]quire COMMAND --help[/bold] has examples.",
)


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show a traceback instead of one line of error.")
    ] = False,
) -> None:
    """The KV cache of LLM inference as a library: keep it, share it, find it again."""


app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("inspect")(inspection.inspect)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("curve")(curve.curve)
app.command("replay")(replay.replay)
app.command("simulate")(simulate.simulate)
app.add_typer(cache.app, name="cache")
app.add_typer(trace.app, name="trace")
app.add_typer(bench.app, name="bench")

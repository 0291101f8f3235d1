"""The commands, and what happens to their errors."""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from quire._version import __version__
from quire.cli import (
    bench,
    cache,
    calibrate,
    chunks,
    curve,
    demo,
    doctor,
    failures,
    generate,
    inspection,
    plan,
    replay,
    route,
    serve,
    simulate,
    trace,
    watch,
)


class Commands(TyperGroup):
    """The group of all commands: an error becomes one line, a document with `--json`, a code.

    `--debug` may stand anywhere before `--`, since it is what one appends to a line that failed.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = failures.options_of(args)
        if "--debug" in options:
            args = ["--debug", *(arg for arg in options if arg != "--debug"), *args[len(options) :]]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise typer.Exit(failures.READER_GONE) from None  # typer would say 1

    def main(self, *given: Any, **others: Any) -> Any:
        args = given[0] if given else others.pop("args", None)
        words = list(sys.argv[1:] if args is None else args)
        options = failures.options_of(words)
        try:
            code = super().main(words, *given[1:], **others | {"standalone_mode": False})
            sys.stdout.flush()
        except BrokenPipeError:
            code = failures.READER_GONE
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - told, whatever it is
            code = failures.told(error, options)
        else:
            if code == failures.INTERRUPTED:
                failures.told(KeyboardInterrupt(), options)
        failures.close_quietly()
        sys.exit(code or 0)


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
app.command("serve")(serve.serve)
app.command("route")(route.route)
app.command("watch")(watch.watch)
app.command("inspect")(inspection.inspect)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
app.command("curve")(curve.curve)
app.command("replay")(replay.replay)
app.command("simulate")(simulate.simulate)
app.command("calibrate")(calibrate.calibrate)
app.add_typer(cache.app, name="cache")
app.add_typer(chunks.app, name="chunks")
app.add_typer(trace.app, name="trace")
app.add_typer(bench.app, name="bench")

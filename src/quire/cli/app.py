"""The commands, and the handling of their errors."""

import sys
from typing import Annotated, Any, cast

import typer

from quire._version import __version__
from quire.cli import (
    bench,
    cache,
    demo,
    doctor,
    failures,
    generate,
    gguf,
    inspection,
    serve,
    watch,
)
from quire.cli.elsewhere import PartlyElsewhere, offered

OWN = {
    "demo": demo.demo,
    "generate": generate.generate,
    "serve": serve.serve,
    "watch": watch.watch,
    "inspect": inspection.inspect,
    "doctor": doctor.doctor,
    "cache": cache.app,
    "gguf": gguf.app,
    "bench": bench.app,
}
"""The commands of this package."""

ORDER = (
    *("demo", "generate", "serve", "route", "tap", "watch", "inspect", "doctor"),
    *(
        "plan",
        "curve",
        "replay",
        "simulate",
        "calibrate",
        "cache",
        "gguf",
        "passages",
        "trace",
        "bench",
    ),
)


class Commands(PartlyElsewhere):
    """The group of all commands: an error becomes one line, a document with `--json`, a code.

    `--debug` may stand anywhere before `--`, since it is what one appends to a line that failed.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of help: those that are known, then those of other packages."""
        known = {name: at for at, name in enumerate(ORDER)}
        return sorted(
            super().list_commands(ctx), key=lambda name: (known.get(name, len(known)), name)
        )

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


def _add(name: str, command: Any) -> None:
    """Add a command by its name; "bench.serve" is the command `serve` of the group `bench`."""
    group, _, last = name.rpartition(".")
    into = cast("typer.Typer", OWN[group]) if group else app
    if isinstance(command, typer.Typer):
        into.add_typer(command, name=last)
    else:
        into.command(last)(command)


for _name, _command in {**offered(), **OWN}.items():
    _add(_name, _command)
